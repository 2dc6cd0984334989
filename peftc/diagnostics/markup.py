"""Text in HTML and XML. Names of models, modules and files are data: nothing in them is markup."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

_FORBIDDEN = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\ufffe\\uffff]")  # in XML, and what no one can read

# For a cell of a notebook: its own colours, light or dark, and thin lines of the same.
STYLE = (
    ".peftc-report{font-size:13px;line-height:1.45}.peftc-report table{border-collapse:collapse;margin:.5em 0}"
    ".peftc-report caption,.peftc-report th,.peftc-report td{text-align:left;vertical-align:top;padding:2px 14px 2px 0;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent);background:none;color:inherit}"
    ".peftc-report td.number,.peftc-report th.number{text-align:right;font-variant-numeric:tabular-nums}"
    ".peftc-report td{white-space:pre-wrap}.peftc-report td small{opacity:.7}"
    ".peftc-report pre{font-family:ui-monospace,Menlo,Consolas,monospace;background:none;color:inherit}"
    ".peftc-report summary{cursor:pointer}.peftc-report .wide{overflow-x:auto}"
)


def clean(content: str) -> str:
    """Text for XML: escaped, and without characters that XML cannot have."""
    return escape(_FORBIDDEN.sub("\ufffd", content), quote=True)


def lines_of(text: str) -> str:
    """Text of several lines, escaped."""
    return "\n".join(map(clean, text.splitlines()))


def report(parts: Iterable[str]) -> str:
    """Parts of HTML as the output of a cell."""
    return "\n".join([f'<div class="peftc-report"><style>{STYLE}</style>', *parts, "</div>"])


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> Iterator[str]:
    """A table of texts, which are escaped. `numbers`: the columns that stand at the right."""
    right = {*numbers}
    classes = [' class="number"' if i in right else "" for i in range(len(headers))]
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th{own}>{clean(text)}</th>" for own, text in zip(classes, headers, strict=True))
    yield "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td{own}>{lines_of(text)}</td>' for own, text in zip(classes, row, strict=True))}</tr>"
    yield "</tbody></table></div>"


def details(title: str, parts: Iterable[str]) -> Iterator[str]:
    """Parts that a reader opens."""
    yield f"<details><summary>{clean(title)}</summary>"
    yield from parts
    yield "</details>"
