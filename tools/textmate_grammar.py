"""Makes the TextMate grammar of specs, which editors highlight with, of the words of the grammar:
`python -m tools.textmate_grammar > editors/vscode/syntaxes/peft.tmLanguage.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pygments.token import Comment, Error, Keyword, Number, Operator, Punctuation, String

from peftc.syntax.tables import tables
from peftc.syntax_highlighting import token_types

SCOPES: Mapping[object, str] = {
    Comment.Single: "comment.line.number-sign",
    Keyword.Declaration: "keyword.declaration",
    Keyword.Constant: "constant.language",
    Keyword: "keyword.control",
    Number: "constant.numeric",
    String.Double: "string.quoted.double",
    Operator: "keyword.operator",
    Punctuation: "punctuation",
    Error: "invalid.illegal",
}
# Names by what is around them, tried behind all other words.
NAMES = (
    ("entity.name.function", r"(?<=\bmethod |\bform )[A-Za-z_][A-Za-z_0-9]*"),
    ("entity.name.function", r"[A-Za-z_][A-Za-z_0-9]*(?=[ \t]*\()"),
    ("variable", r"[A-Za-z_][A-Za-z_0-9]*"),
)
_STRAY = r"\S"  # TextMate tries rules at white space, too


def patterns() -> list[dict[str, str]]:
    """A rule for each class of words, in the order in which the lexer tries them."""
    types, texts = token_types(), {terminal: text for text, terminal in tables().keywords.items()}
    rules: list[tuple[str, str]] = []
    for scope in ("comment.line.number-sign", "string.quoted.double", "constant.numeric"):
        rules += [(scope, pattern) for name, pattern in tables().terminals if SCOPES.get(types.get(name)) == scope]
    for kind in (Keyword.Declaration, Keyword.Constant, Keyword):
        words = sorted(text for terminal, text in texts.items() if types[terminal] is kind)
        rules.append((SCOPES[kind], rf"\b(?:{'|'.join(words)})\b"))
    rules += NAMES
    signs = [(types[name], pattern) for name, pattern in tables().terminals if is_sign(name)]
    rules += [(SCOPES[kind], pattern) for kind, pattern in signs]
    rules += [(SCOPES[Error], pattern) for name, pattern in tables().terminals if types.get(name) is Error]
    return [{"name": f"{scope}.peft", "match": _STRAY if pattern == "(?s:.)" else pattern} for scope, pattern in rules]


def is_sign(terminal: str) -> bool:
    """Whether a terminal is an operator or punctuation."""
    return terminal not in tables().keywords.values() and token_types().get(terminal) in (Operator, Punctuation)


def grammar() -> dict[str, object]:
    """The whole grammar."""
    return {
        "$schema": "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json",
        "name": "peft",
        "scopeName": "source.peft",
        "fileTypes": ["peft"],
        "patterns": patterns(),
    }


def main() -> None:
    print(json.dumps(grammar(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
