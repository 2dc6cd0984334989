"""The style sheet and the script of a page."""

STYLE = """
:root{color-scheme:light dark}
body{margin:0;font:16px/1.5 system-ui,'Segoe UI',Helvetica,Arial,sans-serif;color:var(--ink);background:var(--paper)}
header,main{max-width:76rem;margin:auto;padding:0 1rem}
h1{font-size:1.3rem;overflow-wrap:anywhere;margin:.8em 0 0}h2{font-size:1.15rem;margin:1.6em 0 .5em}h3{font-size:1rem}
code,pre,.diff{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.85rem}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1rem}a{color:var(--c0)}
search{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;margin:.7rem 0}
input{font:inherit;color:inherit;background:var(--box);border:1px solid var(--line);border-radius:6px;
padding:.25rem .6rem;min-width:0;flex:0 1 22rem}
output{color:var(--soft);font-size:.9rem}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:.3rem;background:var(--paper);padding:.3rem}
:focus-visible{outline:3px solid var(--c0);outline-offset:2px}
.panels{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-end}
figure{margin:0;min-width:0;max-width:100%;overflow-x:auto}
figure svg{max-width:100%;min-width:min(100%,360px);height:auto}
.wide,.diff,pre{overflow-x:auto}pre{background:var(--box);padding:.8rem;border-radius:8px}
table{border-collapse:collapse;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:.3rem .7rem .3rem 0;
border-bottom:1px solid var(--box);min-width:3.5rem}
td:nth-child(2),td:nth-child(3),td:nth-child(6){min-width:11rem}
.number{text-align:right;font-variant-numeric:tabular-nums}
.edit-chip{border:1.5px solid var(--own);border-radius:6px;padding:0 .4rem;color:var(--own);font-weight:600;
white-space:nowrap}
.edit-chip.dashed{border-style:dashed}
.e0{--own:var(--c0)}.e1{--own:var(--c1)}.e2{--own:var(--c2)}.e3{--own:var(--c3)}
.e4{--own:var(--c4)}.e5{--own:var(--c5)}.e6{--own:var(--c6)}.e7{--own:var(--c7)}
.totals{display:flex;flex-wrap:wrap;gap:.5rem 2rem}.totals div{min-width:6rem}dd{margin:0}dt{color:var(--soft)}
.tree details,.tree .leaf{padding-left:1.1rem}summary{cursor:pointer}.leaf{margin-left:.9rem}small{color:var(--soft)}
.tree{overflow-wrap:anywhere}
.row{display:grid;grid-template-columns:1fr 1fr;gap:0 .5rem;min-width:60rem}
.row span{display:block;white-space:pre;overflow:hidden;text-overflow:ellipsis}
.row i{color:var(--soft);font-style:normal;display:inline-block;width:2.4rem;
text-align:right;margin-right:.7rem;user-select:none}
.row:hover span{overflow:visible;white-space:pre-wrap}
.heads{color:var(--soft);border-bottom:1px solid var(--box)}
.other .old:not(.none){background:color-mix(in srgb,var(--c6) 16%,transparent)}
.other .new:not(.none){background:color-mix(in srgb,var(--c2) 18%,transparent)}
.other i::after{content:' ' attr(data-sign)}
.hit{outline:2px solid var(--c1);outline-offset:-1px}.no-hit{display:none}
@media (max-width:56rem){.row{grid-template-columns:1fr;min-width:0}.same .new,.row .none,.heads{display:none}
.row span{white-space:pre-wrap;overflow-wrap:anywhere}}
@media print{search,nav,.skip{display:none}}
"""

SCRIPT = """
const query=document.getElementById('query'),count=document.querySelector('output');
const rows=[...document.querySelectorAll('.find')],folded=new Map();
for(const one of document.querySelectorAll('details'))folded.set(one,one.open);
function search(){
  const text=query.value.trim().toLowerCase();let hits=0;
  for(const one of rows){
    const hit=text!==''&&one.textContent.toLowerCase().includes(text);
    one.classList.toggle('hit',hit);
    one.classList.toggle('no-hit',text!==''&&!hit&&!one.matches('.row,summary,pre'));
    hits+=hit;
  }
  for(const[one,open]of folded)one.open=text===''?open:one.querySelector('.hit')!==null;
  count.textContent=text===''?'':hits+(hits===1?' match':' matches');
}
query.addEventListener('input',search);
document.addEventListener('keydown',event=>{
  if(event.key==='/'&&document.activeElement!==query){event.preventDefault();query.focus();}
  if(event.key==='Escape'&&document.activeElement===query){query.value='';search();query.blur();}
  if(event.key==='Enter'&&document.activeElement===query){const hit=document.querySelector('.hit');
    if(hit){hit.scrollIntoView({block:'center'});}}
});
"""

NOTEBOOK_STYLE = """
.peftc{color:var(--ink);background:var(--paper);padding:8px}
.peftc .panels{display:flex;flex-wrap:wrap;gap:24px;align-items:flex-end}
.peftc figure{margin:0;max-width:100%}.peftc figure svg{max-width:100%;height:auto}.peftc .number{text-align:right}
.peftc .edit-chip{border:1.5px solid var(--own);border-radius:6px;padding:0 .4em;color:var(--own);font-weight:600}
.peftc .edit-chip.dashed{border-style:dashed}.peftc td,.peftc th{text-align:left;vertical-align:top}
"""
