"""The names that a model's own code gives to its values, read from its instructions."""

from __future__ import annotations

import dis
from bisect import bisect_right
from functools import cache
from itertools import pairwise
from types import CodeType

from torch import fx

from peftc.tracing.code_positions import instructions_of

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_ATTR", "STORE_GLOBAL")
_ENDS = (*_STORES, "RETURN_", "UNPACK_", "POP_TOP", "POP_JUMP", "STORE_SUBSCR")  # of the expression of a statement


def variable_of(node: fx.Node) -> str | None:
    """The variable that the model's code assigns a value to; None inside an expression."""
    names, _ = _assignment(node)
    index = node.args[1] if len(names) > 1 else 0  # of a tuple, or of a shape
    return names[index] if names and isinstance(index, int) and 0 <= index < len(names) else None


def statement_variable(node: fx.Node) -> str | None:
    """The variable that the model's code assigns the expression to of which a value is a part."""
    return _assignment(node)[1]


def unpacked_by_model(node: fx.Node) -> int:
    """The number of targets that the model's code unpacks `node`'s tuple into, or 0."""
    names, _ = _assignment(node)
    return len(names) if len(names) > 1 else 0


def aliases_of(node: fx.Node, name: str) -> list[str]:
    """Other names of a local variable in the code around: `residual = hidden_states`."""
    codes = {code for code, _ in instructions_of(node.meta.get("stack", ()))}
    return [new for code in codes for old, new in _aliases(code) if old == name]


def _assignment(node: fx.Node) -> tuple[list[str], str | None]:
    """The targets of a value, and the first target of the statement around it."""
    whole = True  # the value is all that its function returns, not a part of an expression
    for code, offset in instructions_of(node.meta.get("stack", ())):
        instructions = _instructions(code)
        at = _index(instructions, offset)
        shape = node.target == "size" and [i.opname for i in instructions[at + 1 : at + 2]] == ["UNPACK_SEQUENCE"]
        names = _targets(instructions, at + shape)
        if names and whole:
            return names, None
        end = next((i for i in instructions[at + 1 :] if i.opname.startswith(_ENDS)), None)
        if end is None or not end.opname.startswith("RETURN_"):
            return [], (_stored(end) or [None])[0] if end is not None else None
        whole = whole and instructions[at + 1] is end
    return [], None


def _targets(instructions: tuple[dis.Instruction, ...], at: int) -> list[str]:
    """The targets of an instruction's result: one name, or one for each part of a tuple."""
    if instructions[at].opname == "UNPACK_SEQUENCE":
        count = int(instructions[at].argval)
        stores = [name for i in instructions[at + 1 : at + 1 + count] for name in _stored(i) or [""]]
        return stores[:count] if count > 1 else []
    following = at + 1
    while following < len(instructions) and instructions[following].opname in ("COPY", "JUMP_FORWARD"):
        jump = instructions[following]
        following = following + 1 if jump.opname == "COPY" else _index(instructions, jump.argval)
    return _stored(instructions[following])[:1] if following < len(instructions) else []


def _index(instructions: tuple[dis.Instruction, ...], offset: int) -> int:
    return bisect_right([i.offset for i in instructions], offset) - 1


def _stored(instruction: dis.Instruction) -> list[str]:
    """The names that an instruction stores values in; of Python 3.13's pairs, in their order."""
    if not instruction.opname.startswith(_STORES):
        return []
    names = instruction.argval
    return list(names) if isinstance(names, tuple) else [str(names)]


@cache
def _aliases(code: CodeType) -> tuple[tuple[str, str], ...]:
    pairs = [(a, b) for a, b in pairwise(_instructions(code)) if (a.opname, b.opname) == ("LOAD_FAST", "STORE_FAST")]
    return tuple((str(a.argval), str(b.argval)) for a, b in pairs)


@cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP", "EXTENDED_ARG"))
