"""A difference as text, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peftc.comparison.difference import SCALARS, Difference, EditDifference, SpecDifference

SIGNS = {"added": "+", "removed": "-", "changed": "~"}
NUMBERS = {*SCALARS, "parameters", "architecture", "model"}  # one value on each side


def plain_lines(difference: SpecDifference) -> Iterator[str]:
    """The difference as lines; one line if there is none."""
    on = "" if difference.model is None else f", on {difference.model}"
    yield f"{difference.old} → {difference.new}{on}"
    if difference.is_empty:
        yield "no difference"
    for edit in difference.edits:
        yield ""
        yield f"{SIGNS[edit.change]} edit {edit.name}"
        yield from _indented(edit.differences)
    for title, part in (("beside the edits", _texts(difference.others)), ("total", _counts(difference.others))):
        if part:
            yield ""
            yield title
            yield from _indented(part)


def _texts(differences: Iterable[Difference]) -> list[Difference]:
    return [one for one in differences if one.name not in SCALARS]


def _counts(differences: Iterable[Difference]) -> list[Difference]:
    return [one for one in differences if one.name in SCALARS]


def _indented(differences: Iterable[Difference]) -> Iterator[str]:
    for one in differences:
        if one.name in NUMBERS:
            yield f"  {one.name:<11}{number_text(one)}"
            continue
        signed = [*(f"- {line}" for line in one.old), *(f"+ {line}" for line in one.new)]
        for i, line in enumerate(signed):
            yield f"  {'' if i else one.name:<11}{line}" if len(one.name) < 11 else f"  {one.name}  {line}"


def number_text(one: Difference) -> str:
    """`1,024 → 2,048 (+1,024)`; of one side alone its value."""
    if not (one.old and one.new):
        return (one.old or one.new)[0]
    text = f"{one.old[0]} → {one.new[0]}"
    try:
        change = int(one.new[0].replace(",", "")) - int(one.old[0].replace(",", ""))
    except ValueError:
        return text
    return f"{text} ({change:+,})"


def markdown(difference: SpecDifference) -> str:
    """The difference for a pull request: a table of counts, and lines of each edit as a diff."""
    on = "" if difference.model is None else f" on `{difference.model}`"
    lines = [f"### `{difference.old}` → `{difference.new}`{on}", ""]
    if difference.is_empty:
        return "\n".join([*lines, "No difference.", ""])
    rows = [*((edit.name, edit.differences) for edit in difference.edits), ("total", difference.others)]
    counted = [(name, {one.name: one for one in all_ if one.name in SCALARS}) for name, all_ in rows]
    columns = [name for name in SCALARS if any(name in numbers for _, numbers in counted)]
    if columns:
        lines += [f"| edit | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        for name, numbers in counted:
            if numbers:
                cells = (number_text(numbers[column]) if column in numbers else "" for column in columns)
                lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    for edit in difference.edits:
        lines += _fenced(f"{SIGNS[edit.change]} edit {edit.name}", edit.differences)
    lines += _fenced("beside the edits", difference.others)
    return "\n".join(lines)


def _fenced(title: str, differences: Iterable[Difference]) -> list[str]:
    body: list[str] = []
    for one in _texts(differences):
        body.append(f"@@ {one.name} @@")
        body += [*(f"- {line}" for line in one.old), *(f"+ {line}" for line in one.new)]
    fence = "`" * max(3, 1 + max((len(run) for line in body for run in line.split() if set(run) == {"`"}), default=0))
    return [f"**{title}**", "", f"{fence}diff", *body, fence, ""] if body else []


def edit_lines(edit: EditDifference) -> list[str]:
    """The lines of one edit, for the notes of a diagnostic."""
    return [f"{SIGNS[edit.change]} edit {edit.name}", *_indented(edit.differences)]
