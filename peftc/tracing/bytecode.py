"""Positions in bytecode, which identify an operation in every call, and data flow between them:

values and in-place changes that depend on the path taken. The analysis errs towards yes. It knows
names and the ranges of source positions of instructions, not the stack.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from peftc.diagnostics.model_line import ModelLine, is_model_code

DEPTH = 3  # of calls that are followed
LIBRARIES = frozenset({"torch", *sys.stdlib_module_names} - {"__main__"})  # their functions are not entered
_OWN = str(Path(__file__).parent.parent)
_TORCH_TRACING = ("/torch/fx/", "/torch/overrides.py")  # frames between an operation and a tracer
_ENTRY = str(Path(__file__).with_name("tracer.py"))

FrameKind: TypeAlias = Literal["model", "internal", "entry"]
Stack: TypeAlias = tuple[tuple[int, int], ...]  # (id of a code object, offset of the running instruction), inner first
_position_of: dict[Stack, str] = {}
_stack_at: dict[str, Stack] = {}
_codes: dict[int, tuple[FunctionCode, FrameKind]] = {}  # keeps code objects alive, so that ids stay unique


@dataclass(frozen=True, eq=False)
class FunctionCode:
    """A code object with its globals and, of a method, the class of `self`."""

    code: CodeType
    names: Mapping[str, Any] = field(repr=False)
    owner: type | None = None

    @classmethod
    def running_in(cls, frame: FrameType) -> FunctionCode:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
        return cls(code, frame.f_globals, type(first) if isinstance(first, nn.Module) else None)

    @classmethod
    def of(cls, function: FunctionType, owner: type | None) -> FunctionCode:
        return cls(function.__code__, function.__globals__, owner)

    def callees(self, instructions: Sequence[dis.Instruction]) -> Iterator[FunctionType]:
        return (callee for i in instructions if (callee := self.callee(i, instructions)) is not None)

    def callee(self, call: dis.Instruction, instructions: Sequence[dis.Instruction]) -> FunctionType | None:
        """The global or method of `self` that is called; None for torch's, and where unknown."""
        value = self.called(call, instructions)
        in_torch = str(getattr(value, "__module__", "")).startswith("torch")
        return value if isinstance(value, FunctionType) and not in_torch else None

    def called(self, call: dis.Instruction, instructions: Sequence[dis.Instruction]) -> Any:
        """The global or attribute of the class of `self` that is called; None where unknown."""
        if not call.opname.startswith("CALL") or call.positions is None:
            return None
        loads = [i for i in _loads_of(call, instructions) if i.offset < call.offset]
        names = [str(i.argval) for i in loads]
        if len(loads) == 1 and loads[0].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self.names.get(names[0], getattr(builtins, names[0], None))
        if len(loads) == 2 and names[0] == "self" and self.owner is not None:
            return getattr(self.owner, names[1], None)
        return None


def is_cached_call(frame: FrameType) -> bool:
    """Whether the running instruction calls a function that `functools.lru_cache` wraps."""
    instructions = _instructions(frame.f_code)
    call = next((i for i in instructions if i.offset == frame.f_lasti), None)
    called = FunctionCode.running_in(frame).called(call, instructions) if call is not None else None
    return hasattr(called, "cache_parameters") and hasattr(called, "__wrapped__")


def is_used_unseen(code: CodeType, offset: int, is_operand: bool) -> bool:
    """Whether C code (`range`, an index of a list) may use the number that code reads at an offset.

    It does not use an operand of the graph that code gives to no variable, nor what code only
    compares with None.
    """
    after = _instructions_behind(code, offset)[:2]
    names = [i.opname for i in after]
    if names and names[0].startswith(("STORE_FAST", "STORE_DEREF")):
        return True
    asks_for_none = bool(names) and names[0].endswith(("_IF_NONE", "_IF_NOT_NONE"))
    is_compared = names == ["LOAD_CONST", "IS_OP"] and after[0].argval is None
    return not (is_operand or asks_for_none or is_compared)


def _instructions_behind(code: CodeType, offset: int) -> list[dis.Instruction]:
    return [i for i in _instructions(code) if i.offset > offset and i.opname not in ("CACHE", "NOP", "NOT_TAKEN")]


def is_raised(frame: FrameType) -> bool:
    """Whether the running instruction is part of a `raise`, or of an `assert` that fails."""
    after = (i.opname for i in _instructions(frame.f_code) if i.offset >= frame.f_lasti)
    ends = (name for name in after if name.startswith(("RAISE", "STORE", "POP", "RETURN", "JUMP")) or "_IF_" in name)
    return next(ends, "").startswith("RAISE")


@cache
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@cache
def is_path_dependent(function: FunctionCode, start: int, stop: int | None) -> bool:
    """Whether what is read at offset `stop`, or at the return, depends on the path from `start`."""
    after = [i for i in _instructions(function.code) if i.offset > start]
    stops = [i for i in after if i.offset == stop or (stop is None and i.opname.startswith("RETURN"))]
    path = [i for i in after if stops and i.offset < stops[-1].offset]
    jumps = [i for i in path if "_IF_" in i.opname]
    if jumps and (len(stops) > 1 or any(_within(jump, stops[0]) for jump in jumps)):
        return True
    # An instruction that also stores (`STORE_FAST_LOAD_FAST`) may read for any stop.
    loads = [i for i in path if "LOAD" in i.opname and (i.opname.startswith("STORE") or _within(i, stops[0]))]
    reads = {name for i in loads for name in _names(i)}
    behind = [i for i in path if jumps and i.offset > jumps[0].offset]
    stores = {name for i in behind if i.opname.startswith("STORE") for name in _names(i)}
    mutations = {name for i in behind for name in _mutated_names(function.code, i, path)}
    return bool((stores | mutations) & reads) or any(_calls_path_dependent(function, i, path, reads) for i in path)


@cache
def mutates_conditionally(
    function: FunctionType, owner: type | None = None, argument: str = "", depth: int = DEPTH
) -> bool:
    """Whether some paths of a function, but not all, may change `argument` (or any) in place."""
    code = FunctionCode.of(function, owner)
    instructions = _instructions(code.code)
    first_jump = next((i.offset for i in instructions if "_IF_" in i.opname), None)
    parameters = {*code.code.co_varnames[: code.code.co_argcount + code.code.co_kwonlyargcount]} - {"self"}
    names = _aliases({argument} if argument in parameters else parameters, instructions)
    behind = [i for i in instructions if first_jump is not None and i.offset > first_jump]
    if any(_mutated_names(code.code, i, instructions) & names for i in behind):
        return True
    return depth > 0 and any(mutates_conditionally(f, owner, "", depth - 1) for f in code.callees(instructions))


@cache
def compares_identity(function: Callable[..., Any], owner: type, depth: int = DEPTH) -> bool:
    """Whether a function, or one that it calls, tests `x is True`, which no proxy can observe."""
    instructions = list(dis.get_instructions(function))
    for last, test in pairwise(instructions):
        loads_constant = last.opname in ("LOAD_CONST", "LOAD_ATTR", "LOAD_GLOBAL")  # kept in modules and classes
        if test.opname == "IS_OP" and loads_constant and last.argval is not None:  # None is never a proxy
            return True
    if depth == 0 or not isinstance(function, FunctionType):
        return False
    callees = FunctionCode.of(function, owner).callees(instructions)
    return any(compares_identity(callee, owner, depth - 1) for callee in callees)


def _aliases(names: set[str], instructions: Sequence[dis.Instruction]) -> set[str]:
    """`names`, and those that may be views of them: `u = t.view(-1)`, `u = t[0]`, `u = t`."""
    aliases = set(names)
    for last, store in pairwise(instructions):
        if store.opname.startswith("STORE_FAST") and last.opname.startswith(("CALL", "BINARY_SUBSCR", "LOAD_FAST")):
            heads = _loads_of(last, instructions)
            if heads and _names(heads[0]) & aliases:
                aliases |= _names(store)
    return aliases


def _mutated_names(code: CodeType, instruction: dis.Instruction, instructions: Sequence[dis.Instruction]) -> set[str]:
    """The names of tensors that `t.mul_`, `t[0] = …`, `t += …` or `out=t` changes in place."""
    name = instruction.argval
    method = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name.endswith("_") and not name.endswith("__")
    augmented = instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
    constant = code.co_consts[instruction.arg or 0] if instruction.opname in ("KW_NAMES", "LOAD_CONST") else None
    if isinstance(constant, tuple) and ("out" in constant or "inplace" in constant):
        operands = [i for i in instructions if "LOAD_FAST" in i.opname]
    elif method or augmented or instruction.opname == "STORE_SUBSCR":
        operands = [i for i in instructions if "LOAD" in i.opname and _within(i, instruction) and i is not instruction]
    else:
        operands = []
    return {n for i in operands for n in _names(i)}


def _calls_path_dependent(
    function: FunctionCode, call: dis.Instruction, path: list[dis.Instruction], reads: set[str]
) -> bool:
    """Whether a path in the callee decides on one of `reads`, or on a change of it in place."""
    callee, owner = function.callee(call, path), function.owner
    if callee is None:
        return False
    if not mutates_conditionally(callee, owner) and not is_path_dependent(FunctionCode.of(callee, owner), 0, None):
        return False
    at = path.index(call)
    stores = {n for i in path[at + 1 : at + 2] if i.opname.startswith("STORE") for n in _names(i)}
    arguments = {n for i in path[:at] if "LOAD" in i.opname and _within(i, call) for n in _names(i)}
    return bool((stores | arguments) & (reads - {"self"}))


def _loads_of(head: dis.Instruction, instructions: Sequence[dis.Instruction]) -> list[dis.Instruction]:
    """The loads with which the expression of an instruction begins."""
    loads = [i for i in instructions if i.opname.startswith("LOAD")]
    return [i for i in loads if _start(i) == _start(head) and _within(i, head)]


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    at = instruction.positions
    return (None, None) if at is None else (at.lineno, at.col_offset)


def _within(inner: dis.Instruction, outer: dis.Instruction) -> bool:
    """Whether the source range of `inner` is in that of `outer`; yes where ranges are missing."""
    if inner.positions is None or outer.positions is None:
        return True
    (first, last), (start, end) = (
        ((p.lineno or 0, p.col_offset or 0), (p.end_lineno or 0, p.end_col_offset or 0))
        for p in (inner.positions, outer.positions)
    )
    return start <= first and last <= end


def _names(instruction: dis.Instruction) -> set[str]:
    names: Any = instruction.argval
    return set(names) if isinstance(names, tuple) else {str(names)}


def running_instruction(frames: int) -> tuple[CodeType, int]:
    """The code that called the function so many frames above this one, and where it is."""
    frame = sys._getframe(frames + 1)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code, frame.f_lasti


def reading_instruction() -> tuple[CodeType, int] | None:
    """The instruction of a model's code that reads an attribute, in the innermost frame of it."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("peftc."):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


@cache
def asks_for_class(code: CodeType, offset: int) -> bool:
    """Whether an instruction asks for the class of a value: `isinstance(x, …)`, `x.__class__` or a
    pattern. A call of another function is one whose C code asks.
    """
    instructions = _instructions(code)
    running = next((i for i in instructions if i.offset == offset), None)
    if running is None or not running.opname.startswith("CALL") or _start(running) == (None, None):
        return True
    names = {i.argval for i in instructions if i.opname.startswith("LOAD_") and _start(i) == _start(running)}
    return not names or "isinstance" in names


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


def line_of(stack: Stack) -> ModelLine | None:
    """The innermost line of code not PyTorch's."""
    for code, offset in instructions_of(stack):
        number = [line for line, *_ in code.co_positions()][offset // 2]
        if number is not None and is_model_code(code.co_filename):
            return ModelLine(code, number)
    return None


def may_diverge(start: str, stop: str) -> bool:
    """Whether what is read at `stop` depends on the path from `start`."""
    # "" is the beginning or the end of the code. Positions from other processes may diverge.
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
    line, _, column, _ = next(islice(code.co_positions(), offset // 2, None))
    return f"{code.co_qualname}:{(line or 0) - code.co_firstlineno}:{column or 0}"
