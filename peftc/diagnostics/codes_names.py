"""P1xx, and what of P2xx and P3xx can be seen without a model."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo, explained

_ADAPTER = "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }"
_METHOD = "peft 1\nmethod m(r = 64) { edit ffn at layer[*].ffn { h += adapter(x, r=r) } }"

NAMES: dict[str, CodeInfo] = {
    "P101": explained(
        "unknown form",
        "A function in an equation is a form (`adapter`, `lora`, …), `concat`, a frozen sub-module of the site (`norm`, "
        "`head`), or something bound by `let NAME = shared(…)`.",
        "peft 1\nedit ffn at layer[*].ffn { h += adaptor(x, r=64) }",
        _ADAPTER,
    ),
    "P102": explained(
        "unknown argument",
        "The form or method has no argument of this name. Nothing is ignored: a misspelt name would silently mean the default.",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8, lora_alpha=16) }",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8, alpha=16) }",
    ),
    "P103": explained(
        "missing argument",
        "This argument has no default, since no value would be right everywhere.",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x) }",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8) }",
    ),
    "P104": explained(
        "given twice",
        "An argument, a parameter of `apply` or a state of `train` is written twice.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64, r=32) }",
        _ADAPTER,
    ),
    "P105": explained(
        "wrong type",
        "The argument wants another kind of value: a whole number, a number, `true` or `false`, or a nested form.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64, bias=1) }",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64, bias=true) }",
    ),
    "P106": explained(
        "value that is not allowed",
        "The value is outside of the range of the argument, or none of its choices.",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8, dropout=1.5) }",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8, dropout=0.1) }",
    ),
    "P107": explained(
        "unknown name",
        "In an equation a name is a state of the site (`h x res c q k v kv z w b`), something bound by `let`, or a parameter "
        "of the method. `train` names `w` and `b`.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(input, r=64) }",
        _ADAPTER,
    ),
    "P108": explained(
        "wrong number of inputs",
        "Some forms read one hidden state, which comes first; others (`prefix`, `vector`, `lowrank`) read none. `concat` joins "
        "two parts or more.",
        "peft 1\nedit p at layer[*].attn { kv = concat(prefix(30), kv) }",
        "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=30), kv) }",
    ),
    "P109": explained(
        "unknown method",
        "`apply` names a method of the file, or one that `use` brought in.",
        "peft 1\nuse mamm from std\napply mamm()",
        "peft 1\nuse mam from std\napply mam()",
    ),
    "P110": CodeInfo(
        "unknown setting",
        "`--set name=value` overrides a parameter of the one method of a file, or a constant that a file binds by `let`. The "
        "file has nothing of this name, so that the setting would change nothing.",
    ),
    "P111": explained(
        "name that is used twice",
        "Edits, `train`s, methods, parameters and constants are each named once: trained tensors are saved under the name of "
        "their edit. A method that is applied twice gets two names by `as`.",
        "peft 1\nuse parallel from std\napply parallel(r=8) at encoder\napply parallel(r=16) at decoder",
        "peft 1\nuse parallel from std\napply parallel(r=8) at encoder as enc\napply parallel(r=16) at decoder as dec",
    ),
    "P112": CodeInfo(
        "file that cannot be read",
        '`use NAME from "file"` names a file relative to the one it stands in. There is none, or it cannot be read.',
    ),
    "P113": explained(
        "method or file that needs itself",
        "A method may apply other methods, and a file may use other files, but not in a circle.",
        "peft 1\nmethod a() { apply b() }\nmethod b() { apply a() }\napply a()",
        "peft 1\nmethod a() { edit ffn at layer[*].ffn { h += adapter(x, r=64) } }\nmethod b() { apply a() }\napply b()",
    ),
    "P114": explained(
        "name that is never used",
        "A parameter that nothing reads is an error: setting it would change nothing. A constant that nothing reads is a warning.",
        "peft 1\nmethod m(r = 64, s = 4) { edit ffn at layer[*].ffn { h += adapter(x, r=r) } }",
        _METHOD,
    ),
    "P115": explained(
        "`let` of something that is not constant",
        "Outside of an edit there is no site, and so no state and no parameters of its own: `let` binds a constant there, or "
        "one set of parameters for all sites, by `shared`.",
        "peft 1\nlet P = adapter(r=8)\nedit ffn at layer[*].ffn { h += P(x) }",
        "peft 1\nlet P = shared(adapter(r=8))\nedit ffn at layer[*].ffn { h += P(x) }",
    ),
    "P116": explained(
        "unknown fact",
        "An expectation is about `trained`, `stored`, `changed` or `served` (numbers, or percent of the base), `sites(edit)`, "
        "`foldable(edit)` or `identity(edit)`.",
        _ADAPTER + "\nexpect parameters <= 3%",
        _ADAPTER + "\nexpect stored <= 3%",
    ),
    "P117": explained(
        "unknown edit",
        "`sites`, `foldable` and `identity` take the name of an edit or a `train`; after `apply … as enc`, with `enc.` before it.",
        _ADAPTER + "\nexpect sites(fnn) == 12",
        _ADAPTER + "\nexpect sites(ffn) == 12",
    ),
    "P119": explained(
        "nothing to do",
        "The spec has no `edit`, `train` or `apply` (and not exactly one method), or an edit has no equation.",
        "peft 1\nlet r = 64",
        _ADAPTER,
    ),
    "P120": explained(
        "arithmetic that fails",
        "Arithmetic on constants is done before anything else. It divides by zero, gives a number that is too large, or makes "
        "the spec too large.",
        "peft 1\nedit ffn at layer[*].ffn { h += 1 / 0 * adapter(x, r=64) }",
        "peft 1\nedit ffn at layer[*].ffn { h += 1 / 2 * adapter(x, r=64) }",
    ),
    "P121": explained(
        "name that hides another",
        "The states (`h`, `x`, …) and the forms keep their names everywhere; nothing else can be called so.",
        "peft 1\nmethod m(b = 64) { edit ffn at layer[*].ffn { h += adapter(x, r=b) } }",
        _METHOD,
    ),
    "P122": explained(
        "selector that cannot be narrowed",
        "`apply … at encoder` takes every selector of the method within the encoder. That cannot be said of a pattern on the "
        "names of modules, or of a site that is elsewhere.",
        "peft 1\nmethod m() { edit ffn at decoder.layer[*].ffn { h += adapter(x, r=64) } }\napply m() at encoder",
        "peft 1\nmethod m() { edit ffn at layer[*].ffn { h += adapter(x, r=64) } }\napply m() at encoder",
    ),
    "P123": CodeInfo(
        "file outside of the folders of a spec",
        '`use NAME from "file"` reads files that lie, symbolic links followed, in the folder of the spec that is compiled or below it '
        "(for standard input: the working directory), or in a folder that you name by `--include DIR`, in Python "
        "`include=[DIR]`. The spec of a saved adapter uses no files.",
    ),
    "P124": CodeInfo(
        "no folder to include", "`--include DIR`, in Python `include=[DIR]`, names a folder that is there."
    ),
    "P125": CodeInfo(
        "file that is no spec",
        '`use NAME from "file"` names a spec, whose first words are `peft 1`. This file begins otherwise. It is not shown, since '
        "whoever wrote the `use` may not be whoever reads this message.",
    ),
    "P126": CodeInfo(
        "too many files within files",
        "A file that is used may use other files, and they others, but not as many after each other as here.",
    ),
    "P205": explained(
        "state that the site does not have",
        "Which states there are depends on the site: `w` and `b` belong to a single module such as `attn.q`, `kv` to an "
        "attention, `z` to an ffn.",
        "peft 1\nedit dora at layer[*].attn { w = magnitude(w + lowrank(r=8)) }",
        "peft 1\nedit dora at layer[*].attn.q { w = magnitude(w + lowrank(r=8)) }",
    ),
    "P208": explained(
        "unknown site name",
        "Sites are named by what they do: `layer`, `attn` (`.self`, `.cross`), `.q .k .v .o .heads`, `ffn`, `.up .gate .down "
        ".hidden .router .experts .shared`, `norm`, `add`, `embed`, `head`. Names of modules stand in quotes.",
        "peft 1\nedit q at layer[*].attn.q_proj { h += lora(x, r=8) }",
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=8) }",
    ),
    "P302": explained(
        "two edits that assign one state",
        "Edits with `+=` and `*=` add up in the order of the text. Two that assign (`=`) one state at one site are an error: "
        "the second would drop what the first did.",
        "peft 1\nedit a at layer[*].attn { kv = concat(prefix(len=30), kv) }\n"
        "edit b at layer[*].attn { kv = concat(prefix(len=10), kv) }",
        "peft 1\nedit a at layer[*].attn { kv = concat(prefix(len=40), kv) }",
    ),
}
