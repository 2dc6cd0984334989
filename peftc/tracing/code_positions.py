"""Positions in code that identify an operation in every call, whatever branches are taken."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal, NamedTuple, TypeAlias

from peftc.tracing.bytecode import FunctionCode, is_path_dependent

_OWN = str(Path(__file__).parent.parent)
_TORCH_TRACING = ("/torch/fx/", "/torch/overrides.py")  # frames between an operation and a tracer
_ENTRY = str(Path(__file__).with_name("tracer.py"))

FrameKind: TypeAlias = Literal["model", "internal", "entry"]
Stack: TypeAlias = tuple[tuple[int, int], ...]  # (id of a code object, offset of the running instruction), inner first
_position_of: dict[Stack, str] = {}
_stack_at: dict[str, Stack] = {}
_codes: dict[int, tuple[FunctionCode, FrameKind]] = {}  # keeps code objects alive, so that ids stay unique


class Occurrence(NamedTuple):
    """One of the operations of one kind: `number` counts those at the same `position`."""

    position: str
    number: int


class Origin(NamedTuple):
    """What identifies a node in any trace: whose code ran it, what it does, which one it is."""

    module: str
    operation: str
    occurrence: Occurrence


def position_of(stack: Stack) -> str:
    """Function, line and column of each frame; lines count from the head of their function."""
    if stack not in _position_of:
        position = _position_of[stack] = "/".join(_line_and_column(*at) for at in stack)
        _stack_at[position] = stack
    return _position_of[stack]


def running_stack() -> Stack:
    """The instructions of all frames; those of one expression may share their `code_position`."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    frames: list[tuple[int, int]] = []
    while frame is not None:
        code = id(frame.f_code)
        if code not in _codes:
            _codes[code] = FunctionCode.running_in(frame), _frame_kind(frame)
        kind = _codes[code][1]
        if kind == "entry":
            break
        if kind == "model":
            frames.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def instructions_of(stack: Stack) -> list[tuple[CodeType, int]]:
    """The code of each function, with the offset of the running instruction."""
    return [(_codes[code][0].code, offset) for code, offset in stack]


def may_diverge(start: str, stop: str) -> bool:
    """Whether what is read at position `stop` depends on the path from `start` to it.

    An empty position is the beginning or the end of the code. Positions from other processes may
    diverge.
    """
    if any(position and position not in _stack_at for position in (start, stop)):
        return True
    first, last = ([*reversed(_stack_at[position])] if position else [] for position in (start, stop))
    while first and last and first[0] == last[0]:
        del first[0], last[0]
    if first and last:
        (code, one), (other_code, other) = first.pop(0), last.pop(0)
        if code != other_code or is_path_dependent(_codes[code][0], min(one, other), max(one, other)):
            return True
    to_return = any(is_path_dependent(_codes[code][0], offset, None) for code, offset in first)
    return to_return or any(is_path_dependent(_codes[code][0], 0, offset) for code, offset in last)


def _frame_kind(frame: FrameType) -> FrameKind:
    code = frame.f_code
    if code.co_filename == _ENTRY and code.co_name in ("enter", "trace_region"):  # they call a module's forward
        return "entry"
    internal = code.co_filename.startswith(_OWN) or any(part in code.co_filename for part in _TORCH_TRACING)
    return "internal" if internal else "model"


@cache
def _line_and_column(code_id: int, offset: int) -> str:
    code = _codes[code_id][0].code
    line, _, column, _ = list(code.co_positions())[offset // 2]
    return f"{code.co_qualname}:{(line or 0) - code.co_firstlineno}:{column or 0}"
