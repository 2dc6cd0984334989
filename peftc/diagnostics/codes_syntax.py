"""P0xx: what is wrong with a text before it means anything."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo, explained

_EDIT = "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }"

SYNTAX: dict[str, CodeInfo] = {
    "P001": explained(
        "missing header",
        "Every spec begins with the version of the language it is written in, so that it still means the same later.",
        "edit ffn at layer[*].ffn { h += adapter(x, r=64) }",
        _EDIT,
    ),
    "P002": explained(
        "unknown language version",
        "The number after `peft` is the version of the language. This peftc reads version 1.",
        "peft 2\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }",
        _EDIT,
    ),
    "P003": explained(
        "character without a meaning",
        "The language is written in plain ASCII, apart from comments and strings. Signs copied from a paper have to be "
        "replaced: `×` by `*`, `−` by `-`, `≤` by `<=`.",
        "peft 1\nedit ffn at layer[*].ffn { h += 4 × adapter(x, r=64) }",
        "peft 1\nedit ffn at layer[*].ffn { h += 4 * adapter(x, r=64) }",
    ),
    "P004": explained(
        "string without an end",
        'A string (a file, or a pattern on the names of modules) begins and ends with `"` on one line.',
        'peft 1\nedit ffn at "model.layers.*.mlp { h += adapter(x, r=64) }',
        'peft 1\nedit ffn at "model.layers.*.mlp" { h += adapter(x, r=64) }',
    ),
    "P005": explained(
        "malformed number",
        "A number is digits with at most one point, perhaps an exponent, and perhaps one of `%`, `K`, `M`, `B`.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=1_024) }",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=1024) }",
    ),
    "P006": explained(
        "bracket that is never closed",
        "The bracket shown is still open where the text ends, or where something begins that cannot stand inside of it.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64 }",
        _EDIT,
    ),
    "P007": explained(
        "closing bracket without an opening one",
        "No bracket of this kind is open here.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64)) }",
        _EDIT,
    ),
    "P008": explained(
        "missing comma",
        "Arguments, parameters and indices are separated by commas.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x r=64) }",
        _EDIT,
    ),
    "P009": explained(
        "missing `at`",
        "An edit, and a `train`, says where: `at` and a selector.",
        "peft 1\nedit ffn layer[*].ffn { h += adapter(x, r=64) }",
        _EDIT,
    ),
    "P010": explained(
        "missing body",
        "The equations of an edit, and the statements of a method, stand in braces.",
        "peft 1\nedit ffn at layer[*].ffn h += adapter(x, r=64)",
        _EDIT,
    ),
    "P011": explained(
        "missing name",
        "A statement that defines something names it. The words of the language (`at`, `edit`, `train`, …) are no names.",
        "peft 1\nedit at layer[*].ffn { h += adapter(x, r=64) }",
        _EDIT,
    ),
    "P012": explained(
        "wrong assignment",
        "An equation writes a state by `=`, `+=` or `*=`; `let` and parameters take `=`.",
        "peft 1\nedit ffn at layer[*].ffn { h -= adapter(x, r=64) }",
        "peft 1\nedit ffn at layer[*].ffn { h += -adapter(x, r=64) }",
    ),
    "P013": explained(
        "unknown statement",
        "A statement begins with `method`, `use`, `apply`, `edit`, `train`, `expect` or `let`.",
        "peft 1\nedti ffn at layer[*].ffn { h += adapter(x, r=64) }",
        _EDIT,
    ),
    "P014": explained(
        "statement out of place",
        "Equations stand in edits; `use` and `method` at the top of a file; `peft 1` once, before everything else.",
        "peft 1\nh += adapter(x, r=64)",
        _EDIT,
    ),
    "P015": explained(
        "missing expression",
        "Something has to stand after an operator, a comma or an `=`.",
        "peft 1\nedit ffn at layer[*].ffn { h += 4 * }",
        "peft 1\nedit ffn at layer[*].ffn { h += 4 * adapter(x, r=64) }",
    ),
    "P016": explained(
        "malformed selector",
        "A selector is made of paths such as `encoder.layer[*].attn.q` and of patterns in quotes, joined by `|` and "
        "narrowed by `-`.",
        "peft 1\nedit a at layer[*].attn, layer[*].ffn { h += adapter(x, r=64) }",
        "peft 1\nedit a at layer[*].attn | layer[*].ffn { h += adapter(x, r=64) }",
    ),
    "P017": explained(
        "malformed index",
        "An index is a whole number counted from 0 (or from the end: `-1`), `*`, or a range with both ends included.",
        "peft 1\nedit low at layer[0-5].ffn { h += adapter(x, r=64) }",
        "peft 1\nedit low at layer[0..5].ffn { h += adapter(x, r=64) }",
    ),
    "P018": explained(
        "nested too deeply",
        "Brackets, or an expression, are nested deeper than anything that could be read.",
        "peft 1\nlet r = " + "(" * 50 + "8" + ")" * 50,
        "peft 1\nlet r = 8\nedit ffn at layer[*].ffn { h += adapter(x, r=r) }",
    ),
    "P019": explained(
        "parameter without a default",
        "Every parameter has a default, so that every method can be planned as it stands.",
        "peft 1\nmethod m(r) { edit ffn at layer[*].ffn { h += adapter(x, r=r) } }",
        "peft 1\nmethod m(r = 64) { edit ffn at layer[*].ffn { h += adapter(x, r=r) } }",
    ),
    "P020": explained(
        "argument without a name",
        "The input of a form comes first, without a name; all other arguments are named. Those of a method always are.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(r=64, x) }",
        _EDIT,
    ),
    "P021": explained(
        "malformed `train`",
        "`train NAME = [w, b] at SELECTOR` trains weights (`w`) and biases (`b`) of the base model itself.",
        "peft 1\ntrain norms [w, b] at layer[*].norm",
        "peft 1\ntrain norms = [w, b] at layer[*].norm",
    ),
    "P022": explained(
        "malformed `use`",
        "A method is taken from the standard recipes, or from a file named relative to the one that uses it.",
        "peft 1\nuse mam\napply mam()",
        "peft 1\nuse mam from std\napply mam()",
    ),
    "P023": explained(
        "unexpected word",
        "The grammar has no place for this word here.",
        "peft 1\nuse mam from std\napply mam() as a as b",
        "peft 1\nuse mam from std\napply mam() as a",
    ),
    "P024": CodeInfo(
        "not a text",
        "A spec is a text in UTF-8. The file shown is something else, or was saved in another encoding.",
    ),
    "P026": CodeInfo(
        "not a regular file",
        "Specs, adapters and configurations are read from regular files. A directory, a named pipe, a socket or a device is not "
        "opened: reading it could wait for ever, or change something. A path has no NUL in it. A spec comes through a pipe as "
        "standard input: `-`.",
    ),
    "P027": CodeInfo(
        "file that is too large",
        "Files that others may have written have a size beyond which they are not read: a spec a million bytes, a "
        "configuration 16 million, the description of an adapter 256 million, its tensors what the description lists.",
    ),
    "P025": explained(
        "malformed comparison",
        "An expectation compares two values once, by `==`, `!=`, `<`, `<=`, `>` or `>=`.",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\nexpect sites(ffn) = 12",
        "peft 1\nedit ffn at layer[*].ffn { h += adapter(x, r=64) }\nexpect sites(ffn) == 12",
    ),
}
