"""Errors within a token: unknown characters, unterminated strings, malformed numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax.error_context import excerpt
from peftc.syntax.lexer import span_of

# Characters from papers and word processors: the terminal and the text that they stand for.
LOOKALIKES = {
    **dict.fromkeys("×·⊙∗", ("STAR", "*")),
    **dict.fromkeys("−–—", ("MINUS", "-")),
    "÷": ("SLASH", "/"),
    "≤": ("COMPARISON", "<="),
    "≥": ("COMPARISON", ">="),
    "≠": ("COMPARISON", "!="),
    "←": ("EQUAL", "="),
    "…": ("DOT_DOT", ".."),
}
_HELP = {
    ":": "write a range of layers as `0..5` (both ends included), an argument as `r=8`",
    ";": "statements and equations need no separator",
    "'": 'use double quotes: "file.peft"',
    "“": 'use straight quotes: "file.peft"',
    "”": 'use straight quotes: "file.peft"',
    "@": "there is no matrix product; call a form such as `lora(x, r=8)` with its input",
    "\xa0": "this is a no-break space; write an ordinary one",
}

# (malformed text, code): tested together with the examples of `error_rules`.
EXAMPLES = (
    ("peft 1 edit a at layer[*].ffn { h += $ x }", "P003"),
    ("peft 1 edit a at layer[*].ffn { h += x; }", "P003"),
    ("peft 1 edit a at layer[0:5].ffn { h += x }", "P003"),
    ("peft 1 edit a at layer[*].ffn { h += 4 × x }", "P003"),
    ("peft 1 \x00", "P003"),
    ('peft 1 use mam from "mam.peft', "P004"),
    ("peft 1 let r = 1_000", "P005"),
    ("peft 1 let r = 30x", "P005"),
    ("peft 1 let r = 1.5.2", "P005"),
)


def repair_tokens(tokens: Sequence[Token]) -> tuple[list[Token], list[Diagnostic]]:
    """The tokens with lexical errors repaired (or removed), and a diagnostic for each."""
    repaired: list[Token] = []
    errors: list[Diagnostic] = []
    for token in tokens:
        text = str(token)
        match token.type:
            case "STRAY":
                replacement = LOOKALIKES.get(text)
                help_ = f"did you mean `{replacement[1]}`?" if replacement else _HELP.get(text[0])
                error = ("P003", f"unknown character `{excerpt(text)}`", help_)
                replacement = ("DOT_DOT", "..") if text == ":" else replacement
            case "OPEN_STRING":
                error = ("P004", "this string is never closed", 'a string ends on its line with `"`')
                replacement = ("STRING", f'{text}"')
            case "BAD_NUMBER":
                help_ = "a number is digits, at most one point and one of `%`, `K`, `M`, `B`; names begin with a letter"
                error = ("P005", f"`{excerpt(text)}` is not a number", help_)
                replacement = ("NUMBER", "1")
            case _:
                repaired.append(token)
                continue
        code, message, help_ = error
        errors.append(Diagnostic(code, message, span_of(token), help=help_))
        repaired += [Token.new_borrow_pos(*replacement, token)] if replacement else []
    return repaired, errors
