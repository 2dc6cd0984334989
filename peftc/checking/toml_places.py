"""Where a key or a value stands in a TOML text, for messages: `tomllib` does not say."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from peftc.diagnostics import Span

_HEADER = re.compile(r"^[ \t]*(\[\[?)([^\[\]\n]+)\]\]?", re.MULTILINE)
_PART = re.compile(r"""[\w-]+|"[^"\n]*"|'[^'\n]*'""")
_KEY = re.compile(rf"^[ \t]*((?:{_PART.pattern})(?:[ \t]*\.[ \t]*(?:{_PART.pattern}))*)[ \t]*=", re.MULTILINE)

Path = tuple[str | int, ...]


def place(text: str, path: Sequence[str | int], value: object = None) -> Span | None:
    """The place of the longest part of `path` that stands in the text, or of a text `value` there.

    Args: `path`: keys, and numbers of items.
    """
    best: tuple[int, int, int] | None = None
    for keys, start, end in _definitions(text):
        length = len(keys)
        if keys == tuple(path[:length]) and (best is None or length > best[0]):
            best = (length, start, end)
    if best is None:
        return None
    _, start, end = best
    if isinstance(value, str):
        at = min((i for i in (text.find(f'"{value}"', end), text.find(f"'{value}'", end)) if i >= 0), default=-1)
        start, end = (at, at + len(value) + 2) if at >= 0 else (start, end)
    return span_of(text, start, end)


def span_of(text: str, start: int, end: int) -> Span:
    """The span between two offsets."""
    line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    end_line, end_column = text.count("\n", 0, end) + 1, end - text.rfind("\n", 0, end)
    return Span(start, end, line, column, end_line, end_column)


def _definitions(text: str) -> Iterator[tuple[Path, int, int]]:
    """Each table and each key with its whole path, and the offsets of its name."""
    tables: Counter[Path] = Counter()
    headers: list[tuple[int, Path]] = [(0, ())]
    for match in _HEADER.finditer(text):
        keys = _with_numbers(_parts(match[2]), tables)
        if match[1] == "[[":
            tables[keys] += 1
            keys = (*keys, tables[keys] - 1)
        headers.append((match.start(), keys))
        yield keys, match.start(2), match.end(2)
    for match in _KEY.finditer(text):
        table = next(keys for start, keys in reversed(headers) if start <= match.start())
        yield (*table, *_parts(match[1])), match.start(1), match.end(1)


def _with_numbers(keys: Path, tables: Counter[Path]) -> Path:
    """`specs.x` below the second `[[specs]]` is `specs`, 1, `x`."""
    path: Path = ()
    for number, key in enumerate(keys):
        path = (*path, key)
        if path in tables and number < len(keys) - 1:
            path = (*path, tables[path] - 1)
    return path


def _parts(name: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(name))
