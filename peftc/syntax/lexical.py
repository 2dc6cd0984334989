"""Mistakes within a word: characters without a meaning, strings and numbers that are none."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from peftc.diagnostics import Diagnostic
from peftc.syntax.situation import shown
from peftc.syntax.tokens import span_of

# Characters that came from a paper, a word processor or another language: what they stand for here (terminal, text).
LOOKALIKES = {
    "×": ("STAR", "*"),
    "·": ("STAR", "*"),
    "⊙": ("STAR", "*"),
    "∗": ("STAR", "*"),
    "−": ("MINUS", "-"),
    "–": ("MINUS", "-"),
    "—": ("MINUS", "-"),
    "÷": ("SLASH", "/"),
    "≤": ("COMPARISON", "<="),
    "≥": ("COMPARISON", ">="),
    "≠": ("COMPARISON", "!="),
    "←": ("EQUAL", "="),
    "…": ("DOT_DOT", ".."),
}
_HELP = {
    ":": "a range of layers is written `0..5` (both ends included), an argument `r=8`",
    ";": "statements and equations need nothing between them",
    "'": 'strings stand in double quotes: "file.peft"',
    "“": 'strings stand in straight quotes: "file.peft"',
    "”": 'strings stand in straight quotes: "file.peft"',
    "@": "there is no matrix product; a form such as `lora(x, r=8)` is called with its input",
    "\xa0": "this is a no-break space; write an ordinary one",
}

# (example, code): tested together with the rows of `mistakes`.
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


def lexical(tokens: Sequence[Token]) -> tuple[list[Token], list[Diagnostic]]:
    """The tokens with every such mistake put right (or left out), and a diagnostic for each."""
    good: list[Token] = []
    found: list[Diagnostic] = []
    for token in tokens:
        repaired = token
        if token.type == "STRAY":
            repaired = _stray(token, found)
        elif token.type == "OPEN_STRING":
            help_ = 'a string ends on its line with `"`'
            found.append(Diagnostic("P004", "this string is never closed", span_of(token), help=help_))
            repaired = Token.new_borrow_pos("STRING", f'{token}"', token)
        elif token.type == "BAD_NUMBER":
            help_ = "a number is digits, at most one point and one of `%`, `K`, `M`, `B`; names begin with a letter"
            found.append(Diagnostic("P005", f"`{shown(token)}` is no number", span_of(token), help=help_))
            repaired = Token.new_borrow_pos("NUMBER", "1", token)
        if repaired is not None:
            good.append(repaired)
    return good, found


def _stray(token: Token, found: list[Diagnostic]) -> Token | None:
    char = str(token)[0]
    likely = LOOKALIKES.get(str(token))
    help_ = f"did you mean `{likely[1]}`?" if likely else _HELP.get(char)
    found.append(Diagnostic("P003", f"`{shown(token)}` has no meaning here", span_of(token), help=help_))
    if str(token) == ":":
        return Token.new_borrow_pos("DOT_DOT", "..", token)
    return Token.new_borrow_pos(likely[0], likely[1], token) if likely else None
