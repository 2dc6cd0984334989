"""Comments that suppress warnings: `# peftc: ignore[P114] reason`.

One behind a statement is about its line, one alone on a line about the next line. Only warnings can
be suppressed: a spec with an error compiles onto no model, whatever a comment says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from peftc.diagnostics import Diagnostic, Source, Span
from peftc.diagnostics.suggestions import join_names
from peftc.syntax.lexer import Lexemes, Token

_COMMENT = re.compile(r"#\s*peftc\s*:\s*ignore\b\s*(?:\[([^\]]*)\])?\s*:?\s*(.*)")
_MENTION = re.compile(r"#\s*peftc\s*:")
_OF_SPECS_ALONE = frozenset({"P205", "P208", "P302"})  # besides P0xx and P1xx
UNSUPPRESSIBLE = frozenset({"P127", "P128", "P129"})  # what is wrong with comments


@dataclass
class Suppression:
    """A comment, the line that it is about, and the codes that it has suppressed."""

    codes: tuple[str, ...]
    reason: str
    span: Span
    line: int
    used: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])  # codes of errors on the line

    @property
    def is_complete(self) -> bool:
        return bool(self.codes and self.reason)


class Suppressions:
    """The comments of all sources of a run."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[Suppression]] = {}

    def of(self, source: Source) -> list[Suppression]:
        key = (source.path, source.text)
        if key not in self._of:
            self._of[key] = list(read_suppressions(source.text))
        return self._of[key]

    def reason(self, diagnostic: Diagnostic) -> str | None:
        """Why a diagnostic is suppressed; None if it is not."""
        if diagnostic.source is None or diagnostic.span is None or diagnostic.code in UNSUPPRESSIBLE:
            return None
        for one in self.of(diagnostic.source):
            if one.line == diagnostic.span.line and diagnostic.code in one.codes and one.is_complete:
                if diagnostic.severity == "error":
                    one.refused.add(diagnostic.code)
                    return None
                one.used.add(diagnostic.code)
                return one.reason
        return None

    def diagnostics(self, source: Source, on_models: bool) -> Iterator[Diagnostic]:
        """What is wrong with the comments of a spec: P127, P128, P129.

        Args: `on_models`: whether the spec was checked on models, so that all codes can arise.
        """
        for one in self.of(source):
            if not one.is_complete:
                missing = "a reason" if one.codes else "the codes in brackets"
                help_ = "write `# peftc: ignore[P114] why`"
                message = f"this comment suppresses nothing: it lacks {missing}"
                yield Diagnostic("P127", message, one.span, source, help=help_, severity="warning")
                continue
            if one.refused:
                message = f"{join_names(sorted(one.refused))} is an error, which no comment suppresses"
                yield Diagnostic("P129", message, one.span, source, help="correct the spec", severity="warning")
            idle = [code for code in one.codes if code not in one.used | one.refused and _arises(code, on_models)]
            if idle:
                message = f"there is no {join_names(idle, 'or')} on line {one.line} to suppress"
                yield Diagnostic("P128", message, one.span, source, help="remove it", severity="warning")


def _arises(code: str, on_models: bool) -> bool:
    """Whether a check can give a code. Codes that there are not are reported, too."""
    from peftc.diagnostics.codes import CODES  # 20 ms

    return on_models or code < "P2" or code in _OF_SPECS_ALONE or code not in CODES


def read_suppressions(text: str) -> Iterator[Suppression]:
    """The comments of a text that suppress, or try to."""
    if _MENTION.search(text) is None:
        return
    lines = text.split("\n")
    for comment in Lexemes(text).comments:
        if match := _COMMENT.fullmatch(comment.text.rstrip()):
            codes = tuple(code for code in re.split(r"[\s,]+", (match[1] or "").strip()) if code)
            yield Suppression(codes, match[2].strip(), comment.span, _line(comment, lines))


def _line(comment: Token, lines: list[str]) -> int:
    """The line that a comment is about."""
    line = comment.span.line
    if lines[line - 1][: comment.span.column - 1].strip():
        return line
    while line < len(lines) and lines[line].lstrip().startswith("#"):
        line += 1
    return line + 1


def unsuppressed(diagnostics: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """The diagnostics without warnings that comments in their specs suppress."""
    suppressions = Suppressions()
    return tuple(one for one in diagnostics if suppressions.reason(one) is None)
