"""Where in a module's code an operation is run: the same for every call of that code, whatever branches it takes before."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal, TypeAlias

from peftc.tracing.branches import Code, code_of, decides

Occurrence: TypeAlias = tuple[str, int]  # a place, and the number of the operation among those of one sort there
Origin: TypeAlias = tuple[
    str, str, Occurrence
]  # the module whose code ran an operation, the sort of operation, and which it is
Sort: TypeAlias = Literal["model", "between", "entry"]

_OWN = str(Path(__file__).parent.parent)
_BETWEEN = ("/torch/fx/", "/torch/overrides.py")  # what torch runs to get from an operation to a tracer
_ENTRIES = (str(Path(__file__).with_name("tracer.py")), ("enter", "trace_region"))  # what calls the code of a module
_names: dict[tuple[tuple[int, int], ...], str] = {}
_keys: dict[str, tuple[tuple[int, int], ...]] = {}
_parts: dict[tuple[int, int], str] = {}
_codes: dict[int, tuple[Code, Sort]] = {}  # kept, so that no other code gets the identity of one


def place() -> str:
    """The lines and columns that are running, from the operation up to the forward of its module, behind the names of functions.

    Lines are counted from the head of their function. Code of peftc, and of torch's that traces, is left out.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    running: list[tuple[int, int]] = []
    while frame is not None:
        code = frame.f_code
        if id(code) not in _codes:
            _codes[id(code)] = code_of(frame), _sort(code)
        sort = _codes[id(code)][1]
        if sort == "entry":
            break
        if sort == "model":
            running.append((id(code), frame.f_lasti))
        frame = frame.f_back
    key = tuple(running)
    if key not in _names:
        _names[key] = "/".join(map(_part, key))
        _keys[_names[key]] = key
    return _names[key]


def may_diverge(start: str, stop: str) -> bool:
    """Whether the code of a module may go different ways between two places of it, and make what the later one takes by one of them.

    From the beginning of the code, or to its end, where one place is "". Where that is not known, as in code of another process, it may.
    """
    if any(name and name not in _keys for name in (start, stop)):
        return True
    first, last = ([*reversed(_keys[name])] if name else [] for name in (start, stop))
    while first and last and first[0] == last[0]:
        del first[0], last[0]
    if first and last:
        (code, here), (other, there) = first.pop(0), last.pop(0)
        if code != other or decides(_codes[code][0], min(here, there), max(here, there)):
            return True
    ends = any(decides(_codes[code][0], at, None) for code, at in first)
    return ends or any(decides(_codes[code][0], 0, at) for code, at in last)


def _sort(code: CodeType) -> Sort:
    file, names = _ENTRIES
    if code.co_name in names and code.co_filename == file:
        return "entry"
    between = code.co_filename.startswith(_OWN) or any(part in code.co_filename for part in _BETWEEN)
    return "between" if between else "model"


def _part(at: tuple[int, int]) -> str:
    """One function and the place in it."""
    if at not in _parts:
        code = _codes[at[0]][0].code
        positions = list(code.co_positions())
        line, _, column, _ = positions[at[1] // 2]
        _parts[at] = f"{code.co_qualname}:{(line or 0) - code.co_firstlineno}:{column or 0}"
    return _parts[at]
