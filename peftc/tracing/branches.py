"""Decisions in the code of functions, as their instructions tell them: what may be another value, or a changed one, in another call."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Code:
    """The code of a function, the names that it finds outside of itself, and the class of its first argument."""

    code: CodeType
    names: Mapping[str, Any] = field(repr=False)
    owner: type | None = None


def code_of(frame: FrameType) -> Code:
    """The code that runs in a frame."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
    return Code(code, frame.f_globals, type(first) if isinstance(first, nn.Module) else None)


@cache
def decides(code: Code, start: int, stop: int | None) -> bool:
    """Whether a function may give a name that is read at `stop`, or where it returns, another value on but one of its ways there, or
    change it there in place.
    """
    after = [i for i in dis.get_instructions(code.code) if i.offset > start]
    stops = [i for i in after if i.offset == stop or (stop is None and i.opname.startswith("RETURN"))]
    passed = [i for i in after if stops and i.offset < stops[-1].offset]
    jumps = [i for i in passed if "_IF_" in i.opname]
    if jumps and (len(stops) > 1 or any(_within(jump, stops[0]) for jump in jumps)):
        return True
    read = {name for i in passed if _reads(i, stops[0]) for name in _named(i)}
    if jumps and any(_named(i) & read for i in passed if i.opname.startswith("STORE") and i.offset > jumps[0].offset):
        return True
    changed = {name for i in passed if jumps and i.offset > jumps[0].offset for name in _changed(code.code, i, passed)}
    return bool(changed & read) or any(_chooses(code, i, passed, read) for i in passed)


def mutates_conditionally(function: FunctionType, owner: type | None = None, argument: str = "") -> bool:
    """Whether a function may change an argument in place, this one or any, on some of its ways only; or calls one that may."""
    return _alters(function, owner, argument, 3)


@cache
def _alters(function: FunctionType, owner: type | None, argument: str, depth: int) -> bool:
    code = Code(function.__code__, function.__globals__, owner)
    instructions = list(dis.get_instructions(code.code))
    jumps = [i.offset for i in instructions if "_IF_" in i.opname]
    parameters = {*code.code.co_varnames[: code.code.co_argcount + code.code.co_kwonlyargcount]} - {"self"}
    names = _views({argument} if argument in parameters else parameters, instructions)
    later = [i for i in instructions if jumps and i.offset > jumps[0]]
    if any(_changed(code.code, i, instructions) & names for i in later):
        return True
    return depth > 0 and any(_alters(callee, owner, "", depth - 1) for callee in _callees(code, instructions))


@cache
def compares_identity(function: Callable[..., Any], owner: type, depth: int = 3) -> bool:
    """Whether a function, or one that it calls, asks whether something is a constant other than None (`x is True`, `x is Mode.FAST`):
    no proxy notices that.
    """
    instructions = list(dis.get_instructions(function))
    if any(is_.opname == "IS_OP" and _is_constant(last) for last, is_ in pairwise(instructions)):
        return True
    if depth == 0 or not isinstance(function, FunctionType):
        return False
    code = Code(function.__code__, function.__globals__, owner)
    return any(compares_identity(callee, owner, depth - 1) for callee in _callees(code, instructions))


def _is_constant(instruction: dis.Instruction) -> bool:
    """Whether an instruction loads a constant that is not None, or a name of a module or a class, where constants are."""
    if instruction.opname in ("LOAD_CONST", "LOAD_ATTR", "LOAD_GLOBAL"):
        return instruction.argval is not None
    return False


def _views(names: set[str], instructions: list[dis.Instruction]) -> set[str]:
    """These names and those of what a method or an index may make a view of: `u = t.view(-1)`, `u = t[0]`, `u = t`."""
    views = set(names)
    for last, store in pairwise(instructions):
        if store.opname.startswith("STORE_FAST") and last.opname.startswith(("CALL", "BINARY_SUBSCR", "LOAD_FAST")):
            heads = [i for i in _loads(instructions) if _start(i) == _start(last) and _within(i, last)]
            if heads and _named(heads[0]) & views:
                views |= _named(store)
    return views


def _changed(code: CodeType, instruction: dis.Instruction, among: list[dis.Instruction]) -> set[str]:
    """The names whose tensors an instruction may change in place: `t.mul_`, `t[0] = …`, `t += …`, `out=t`."""
    name = instruction.argval
    method = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name.endswith("_") and not name.endswith("__")
    augmented = instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
    constant = code.co_consts[instruction.arg or 0] if instruction.opname in ("KW_NAMES", "LOAD_CONST") else None
    if isinstance(constant, tuple) and ("out" in constant or "inplace" in constant):
        return {n for i in among if "LOAD_FAST" in i.opname for n in _named(i)}
    if not (method or augmented or instruction.opname == "STORE_SUBSCR"):
        return set()
    return {
        n for i in among if "LOAD" in i.opname and _within(i, instruction) and i is not instruction for n in _named(i)
    }


def _chooses(code: Code, call: dis.Instruction, passed: list[dis.Instruction], read: set[str]) -> bool:
    """Whether an instruction calls a function of the model's that decides what it returns, or what it does to what it is given, where
    one of these is read.
    """
    callee = _callee(code, call, passed)
    if callee is None or not _ways(callee, code.owner):
        return False
    at = passed.index(call)
    stored = {n for i in passed[at + 1 : at + 2] if i.opname.startswith("STORE") for n in _named(i)}
    arguments = {n for i in passed[:at] if "LOAD" in i.opname and _within(i, call) for n in _named(i)}
    return bool((stored | arguments) & (read - {"self"}))


@cache
def _ways(function: FunctionType, owner: type | None) -> bool:
    """Whether a function decides what it returns, or whether it changes something in place."""
    return mutates_conditionally(function, owner) or decides(
        Code(function.__code__, function.__globals__, owner), 0, None
    )


def _callees(code: Code, instructions: list[dis.Instruction]) -> Iterator[FunctionType]:
    """The functions of the model's that the code calls, where they can be told."""
    return (callee for i in instructions if (callee := _callee(code, i, instructions)) is not None)


def _callee(code: Code, call: dis.Instruction, among: list[dis.Instruction]) -> FunctionType | None:
    """The function that an instruction calls by a global name or as a method of the module; None of torch's, and of any other."""
    if not call.opname.startswith("CALL") or call.positions is None:
        return None
    own = call.positions.lineno, call.positions.col_offset
    heads = [i for i in _loads(among) if i.offset < call.offset and _start(i) == own and _within(i, call)]
    names = [str(i.argval) for i in heads]
    if len(heads) == 1 and heads[0].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        value = code.names.get(names[0], getattr(builtins, names[0], None))
    elif len(heads) == 2 and names[0] == "self" and code.owner is not None:
        value = getattr(code.owner, names[1], None)
    else:
        return None
    torch = str(getattr(value, "__module__", "")).startswith("torch")
    return value if isinstance(value, FunctionType) and not torch else None


def _loads(among: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    return (i for i in among if i.opname.startswith("LOAD"))


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    at = instruction.positions
    return (None, None) if at is None else (at.lineno, at.col_offset)


def _reads(instruction: dis.Instruction, stop: dis.Instruction) -> bool:
    """Whether an instruction may get a name's value for another one; one that stores, too, does not tell what it is for."""
    return "LOAD" in instruction.opname and (instruction.opname.startswith("STORE") or _within(instruction, stop))


def _within(inner: dis.Instruction, outer: dis.Instruction) -> bool:
    """Whether an instruction is of the expression that another one computes, or of what it returns; where that is not told, it is."""
    one, other = inner.positions, outer.positions
    if one is None or other is None:
        return True
    inside, around = (
        [(p.lineno or 0, p.col_offset or 0), (p.end_lineno or 0, p.end_col_offset or 0)] for p in (one, other)
    )
    return around[0] <= inside[0] and inside[1] <= around[1]


def _named(instruction: dis.Instruction) -> set[str]:
    names: Any = instruction.argval
    return set(names) if isinstance(names, tuple) else {str(names)}
