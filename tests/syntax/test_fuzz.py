"""Any text of up to 10 kB gives a Spec or diagnostics in bounded time."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peftc.diagnostics import PeftcError
from peftc.diagnostics.formats.records import render_json
from peftc.diagnostics.render import render_text
from peftc.filesystem import resources
from peftc.semantics import check_file, expand
from peftc.syntax import parse_text, print_spec

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(resources.recipes().values())]
WORDS = [
    "?",
    ".{",
    "peft",
    "method",
    "use",
    "from",
    "apply",
    "at",
    "as",
    "edit",
    "per",
    "train",
    "expect",
    "let",
    "moved",
    "true",
    "false",
    "std",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    ".",
    "..",
    "=",
    "+=",
    "*=",
    "+",
    "-",
    "->",
    "*",
    "**",
    "/",
    "|",
    "<",
    "<=",
    "==",
    "!=",
    "1",
    "1.",
    ".5",
    "1e9",
    "30%",
    "4M",
    "1e",
    "0x1",
    '"',
    '"a"',
    "'",
    "#",
    "\\",
    "\x00",
    "\ufeff",
    "é",
    "×",
    "h",
    "x",
    "kv",
    "layer",
    "attn",
    "ffn",
    "lora",
    "adapter",
    "\n",
    "\r\n",
    "\t",
]
SECONDS = 3.0  # seconds of CPU for one text; most take a hundredth of that


def survives(text: str) -> None:
    start = time.process_time()
    try:
        spec = parse_text(text)
    except PeftcError as error:
        spec, diagnostics = None, list(error.diagnostics)
    if spec is None:
        assert diagnostics
        assert all(error.code.startswith("P0") for error in diagnostics)
    else:
        assert parse_text(print_spec(spec)) == spec
        diagnostics = check_file(spec)
    render_text(diagnostics, color=True)
    render_json(diagnostics)
    assert time.process_time() - start < SECONDS


@given(st.text(max_size=10_000))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text(text: str) -> None:
    survives(text)
    survives("peft 1\n" + text)


@given(st.lists(st.sampled_from(WORDS), max_size=300))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_words(words: list[str]) -> None:
    survives("peft 1 " + " ".join(words))


@pytest.mark.parametrize("seed", range(120))
def test_mutations_of_shipped_specs(seed: int) -> None:
    random_ = random.Random(seed)
    text = random_.choice(TEXTS)
    for _ in range(random_.randint(1, 6)):
        at, length = random_.randrange(len(text)), random_.randint(0, 12)
        piece = random_.choice([random_.choice(WORDS), "", chr(random_.randrange(1, 0x2FFF)), text[at : at + 40]])
        text = text[:at] + piece + text[at + length :]
    survives(text)


LONG = {
    "parentheses": "peft 1 let a = " + "(" * 9_900,
    "closing": "peft 1 " + ")" * 9_900,
    "alternatives": "peft 1 edit a at layer" + ".{a,b" * 3_000 + "}" * 3_000 + " { h = x }",
    "products of alternatives": "peft 1 edit a at layer" + ".{a,b}" * 3_000 + " { h = x }",
    "optional": "peft 1 edit a at layer" + "?" * 9_900 + " { h = x }",
    "balanced": "peft 1 let a = " + "(" * 4_900 + "1" + ")" * 4_900,
    "minus": "peft 1 let a = " + "-" * 9_900 + "1",
    "sum": "peft 1 let a = 1" + "+1" * 4_900,
    "calls": "peft 1 let a = " + "f(" * 3_000 + ")" * 3_000,
    "braces": "peft 1 " + "method m() {" * 800,
    "selectors": "peft 1 edit a at " + "b-" * 4_000 + "b { h = h }",
    "union": "peft 1 edit a at " + "b|" * 4_000 + "b { h = h }",
    "path": "peft 1 edit a at " + "b." * 4_000 + "b { h = h }",
    "digits": "peft 1 let a = " + "9" * 9_900,
    "name": "peft 1 let " + "a" * 9_900 + " = 1",
    "quotes": "peft 1 " + '"' * 9_901,
    "strays": "peft 1 " + "$ " * 4_900,
    "zeros": "\x00" * 10_000,
    "comments": "peft 1\n" + "#\n" * 4_900,
    "edits": "peft 1" + " edit a at b{h=h}" * 550,
    "mistakes": "peft 1" + " edit a at {" * 800,
    "equals": "peft 1 edit a at b {" + " h =" * 2_400,
    "commas": "peft 1 let a = f(" + "," * 9_900,
    "doubling": "peft 1\nmethod m0(a = h) { edit e at layer[*].ffn { h += a } }\n"
    + "".join(f"method m{n + 1}(a = h) {{ apply m{n}(a=a+a) apply m{n}(a=a*a) as x }}\n" for n in range(100)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts(name: str) -> None:
    survives(LONG[name][:10_000])


def test_expansion_ends() -> None:
    for text in TEXTS:
        expand(parse_text(text, str(resources.folder("specs") / "x.peft")))
