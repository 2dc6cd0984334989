"""What breaks, as text, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.comparison.findings import BreakingReport, Comparison, Finding

ON_MODEL = "sites, sizes and folds are compared on a model: --model"


def plain_lines(report: BreakingReport) -> Iterator[str]:
    """The report as lines; one line for a pair in which nothing breaks."""
    for number, one in enumerate(report.comparisons):
        if number:
            yield ""
        yield _title(one)
        if not one.findings:
            yield "nothing breaks"
        for finding in one.findings:
            yield ""
            yield from _finding_lines(finding)
        if one.model is None:
            yield ""
            yield ON_MODEL


def _title(one: Comparison) -> str:
    return f"{one.old} → {one.new}" + ("" if one.model is None else f", on {one.model}")


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.category}  {'' if finding.edit is None else f'edit {finding.edit}: '}{finding.reason}"
    for name, lines in (("parameters", finding.parameters), ("at", finding.sites), ("way out", (finding.help,))):
        for i, line in enumerate(lines):
            yield f"  {'' if i else name:<12}{line}"


def markdown(report: BreakingReport) -> str:
    """The report for a pull request: a table for each pair."""
    lines: list[str] = []
    for one in report.comparisons:
        lines += [f"### {_title(one)}", ""]
        if one.findings:
            lines += ["| breaks | edit | reason | way out |", "| --- | --- | --- | --- |"]
            lines += [f"| {' | '.join(map(_cell, _cells(finding)))} |" for finding in one.findings]
        else:
            lines.append("Nothing breaks.")
        lines.append("")
    return "\n".join(lines)


def _cells(finding: Finding) -> tuple[str, ...]:
    places = [f"`{line}`" for line in (*finding.parameters, *finding.sites)]
    return finding.category, finding.edit or "", "<br>".join((finding.reason, *places)), finding.help


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
