"""From version 1 of the language to version 2, which has more keywords and the same meaning."""

from collections.abc import Iterable
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.syntax import ast
from peftc.syntax.lexer import Lexemes, keywords, unknown_terminals
from peftc.syntax.printer import print_statement


def check_keywords(statements: Iterable[ast.Statement], source: Source) -> None:
    """Raises: PeftcError P029 if statements of version 1 have names that version 2 cannot print."""
    words = {text for terminal, text in keywords().items() if terminal in unknown_terminals("1")}
    tokens = Lexemes("peft 1\n" + "\n".join(map(print_statement, statements))).tokens
    if names := [token.text for token in tokens if token.type == "NAME" and token.text in words]:
        message = f"`{names[0]}` is a keyword of version 2, in which the forms of this spec are written"
        raise PeftcError(Diagnostic("P029", message, source=source, help="use another name"))


def upgraded(spec: ast.Spec) -> ast.Spec:
    """A spec in version 2. Raises: PeftcError P029 for names that are keywords there."""
    if spec.version != 1:
        return spec
    words = {text for terminal, text in keywords().items() if terminal in unknown_terminals("1")}
    tokens = (token for token in Lexemes(spec.source.text).tokens if token.type == "NAME" and token.text in words)
    errors = [
        Diagnostic(
            "P029", f"`{token.text}` is a keyword of version 2", token.span, spec.source, help="use another name"
        )
        for token in tokens
    ]
    if errors:
        raise PeftcError(errors)
    return replace(spec, version=2)
