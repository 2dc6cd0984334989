"""Lists of what comes with peftc: a line for each, cut to the width of a terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_GAP = 2  # blanks between columns
_LEAST = 20  # characters of a column; the last ones are left out where there is no room


def render_list(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> RenderableType:
    """A table with a line for each row. Names, the first column, are whole; others may be cut."""
    widths = _widths([max(map(len, column)) for column in zip(headers, *rows, strict=True)], width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for header, own in zip(headers, widths, strict=False):
        table.add_column(header, no_wrap=True, width=own)
    for row in rows:
        table.add_row(*(Text(_cut(cell, own)) for cell, own in zip(row, widths, strict=False)))
    return table


def _widths(natural: Sequence[int], width: int) -> list[int]:
    """The widths of the columns that there is room for. The last of them has the rest."""
    least = [natural[0], *(min(own, _LEAST) for own in natural[1:])]
    number = max((n for n in range(1, len(least) + 1) if sum(least[:n]) + _GAP * (n - 1) <= width), default=1)
    widths, rest = least[:number], width - sum(least[:number]) - _GAP * (number - 1)
    for i in range(1, number):
        more = min(natural[i] - widths[i], rest)
        widths[i] += more
        rest -= more
    return widths


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
