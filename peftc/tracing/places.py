"""Where in a module's code an operation is run: the same for every call of that code, whatever branches it takes before."""

from __future__ import annotations

import dis
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal, TypeAlias

Turn: TypeAlias = tuple[str, int]  # a place, and the how manieth operation of one sort it is there
Origin: TypeAlias = tuple[
    str, str, Turn
]  # the module whose code ran an operation, the sort of operation, and which of them
Sort: TypeAlias = Literal["model", "between", "entry"]

_OWN = str(Path(__file__).parent.parent)
_BETWEEN = ("/torch/fx/", "/torch/overrides.py")  # what torch runs to get from an operation to a tracer
_ENTRIES = (str(Path(__file__).with_name("tracer.py")), ("enter", "trace_region"))  # what calls the code of a module
_names: dict[tuple[tuple[int, int], ...], str] = {}
_keys: dict[str, tuple[tuple[int, int], ...]] = {}
_parts: dict[tuple[int, int], str] = {}
_codes: dict[int, tuple[CodeType, Sort]] = {}  # kept, so that no other code gets the identity of one


def place() -> str:
    """The lines and columns that are running, from the operation up to the forward of its module, behind the names of functions.

    Lines are counted from the head of their function. Code of peftc, and of torch's that traces, is left out.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    running: list[tuple[int, int]] = []
    while frame is not None:
        code = frame.f_code
        if id(code) not in _codes:
            _codes[id(code)] = code, _sort(code)
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


def branches(start: str, stop: str) -> bool:
    """Whether the code of a module may go different ways between two places of it; from its beginning, or to its end, where one is "".

    Where that is not known, as in code of another process, it may.
    """
    ends = [_keys[name][-1] for name in (start, stop) if _keys.get(name)]
    if not ends or len(ends) < bool(start) + bool(stop) or len({code for code, _ in ends}) > 1:
        return True
    first, last = ends[0][1] if start else 0, ends[-1][1] if stop else sys.maxsize
    return any(min(first, last) < at < max(first, last) for at in _jumps(ends[0][0]))


@cache
def _jumps(code: int) -> tuple[int, ...]:
    """Where a function decides how to go on."""
    return tuple(i.offset for i in dis.get_instructions(_codes[code][0]) if "_IF_" in i.opname)


def _sort(code: CodeType) -> Sort:
    file, names = _ENTRIES
    if code.co_name in names and code.co_filename == file:
        return "entry"
    between = code.co_filename.startswith(_OWN) or any(part in code.co_filename for part in _BETWEEN)
    return "between" if between else "model"


def _part(at: tuple[int, int]) -> str:
    """One function and the place in it."""
    if at not in _parts:
        code = _codes[at[0]][0]
        positions = list(code.co_positions())
        line, _, column, _ = positions[at[1] // 2]
        _parts[at] = f"{code.co_qualname}:{(line or 0) - code.co_firstlineno}:{column or 0}"
    return _parts[at]
