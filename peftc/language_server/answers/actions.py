"""Code actions: fixes of diagnostics, all safe fixes of a text, comments that suppress warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lsprotocol import types

from peftc.checking.fixes import fix_text
from peftc.checking.suppressions import UNSUPPRESSIBLE, read_suppressions
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.language_server.analysis import Analysis
from peftc.language_server.answers.formatting import end_of_line, text_edits
from peftc.semantics.expand import check_file
from peftc.semantics.files import Include
from peftc.syntax.parser import parse_text

FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.peftc"
KINDS = [types.CodeActionKind.QuickFix, FIX_ALL]
REASON = "TODO: say why"


def actions(analysis: Analysis, start: int, end: int, shown: Iterable[types.Diagnostic]) -> Iterator[types.CodeAction]:
    """The actions for a range of a text.

    Args: `shown`: the diagnostics that the client has there.
    """
    document = analysis.document
    by_place = {(one.code, one.range.start.line, one.range.start.character): one for one in shown}
    for one in analysis.report.diagnostics:
        span = one.span
        is_here = one.source == Source(document.path, document.text) and span is not None
        if not is_here or span is None or span.start > end or span.end < start:
            continue
        at = document.positions.position(span.start)
        record = by_place.get((one.code, at.line, at.character))
        yield from (_with_record(action, record) for action in _of_diagnostic(one, analysis))


def _with_record(action: types.CodeAction, record: types.Diagnostic | None) -> types.CodeAction:
    action.diagnostics = None if record is None else [record]
    return action


def _of_diagnostic(diagnostic: Diagnostic, analysis: Analysis) -> Iterator[types.CodeAction]:
    document = analysis.document
    if (fix := diagnostic.fix) is not None:
        edits = [types.TextEdit(document.positions.range(one.span), one.text) for one in fix.replacements]
        yield types.CodeAction(
            title=_title(diagnostic),
            kind=types.CodeActionKind.QuickFix,
            is_preferred=fix.applicability == "safe",
            edit=types.WorkspaceEdit(changes={document.uri: edits}),
        )
    if diagnostic.severity == "warning" and diagnostic.code not in UNSUPPRESSIBLE:
        yield types.CodeAction(
            title=f"Suppress {diagnostic.code} here, with a reason",
            kind=types.CodeActionKind.QuickFix,
            edit=types.WorkspaceEdit(changes={document.uri: [suppression(diagnostic, analysis)]}),
        )


def _title(diagnostic: Diagnostic) -> str:
    changes = diagnostic.fix.replacements if diagnostic.fix else ()
    if len(changes) != 1 or (source := diagnostic.source) is None:
        return f"Correct {diagnostic.code}"
    text = changes[0].text
    old = source.text[changes[0].span.start : changes[0].span.end]
    return f"Replace `{old}` with `{text}`" if old and text else f"Insert `{text}`" if text else f"Remove `{old}`"


def suppression(diagnostic: Diagnostic, analysis: Analysis) -> types.TextEdit:
    """The comment that suppresses a warning: behind its line, or above if there is another one."""
    document = analysis.document
    assert diagnostic.span is not None
    line, code = diagnostic.span.line, diagnostic.code
    lines = document.text.split("\n")
    start = sum(len(one) + 1 for one in lines[: line - 1])
    own = next((one for one in read_suppressions(document.text) if one.line == line and one.codes), None)
    if own is not None:  # its brackets get one more code
        at = document.text.index("]", own.span.start)
        return types.TextEdit(document.positions.between(at, at), f", {code}")
    comment = f"# peftc: ignore[{code}] {REASON}"
    end = start + len(lines[line - 1].rstrip())
    if any(one.span.line == line for one in document.partial.lexemes.comments):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        return types.TextEdit(
            document.positions.between(start, start), f"{indent}{comment}{end_of_line(document.text)}"
        )
    return types.TextEdit(document.positions.between(end, end), f"  {comment}")


def fix_all(analysis: Analysis, include: Include) -> types.CodeAction | None:
    """All safe fixes of a text, as `check --fix` applies them; None if there are none."""
    document = analysis.document

    def check(text: str) -> Iterable[Diagnostic]:
        try:
            return check_file(parse_text(text, document.path), include)
        except PeftcError as error:
            return error.diagnostics

    fixed = fix_text(document.text, document.path, check)
    if fixed.text == document.text:
        return None
    edits = text_edits(document, fixed.text)
    return types.CodeAction("Apply all safe fixes", FIX_ALL, edit=types.WorkspaceEdit(changes={document.uri: edits}))
