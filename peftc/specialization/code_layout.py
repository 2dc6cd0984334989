"""The layout of generated functions: signatures, calls, wrapped lines, nested conditions."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable

WIDTH = 110


def function(name: str, signature: inspect.Signature, lines: Iterable[str]) -> str:
    """The source of a function of `signature` with these body lines."""
    return "\n".join([f"def {name}({parameters(signature)}):", *indented(lines)])


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def parameters(signature: inspect.Signature) -> str:
    """A forward's parameters as code; defaults that are no plain constants become None."""
    texts: list[str] = []
    starred = False
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            starred = True
            texts.append(f"{'*' if p.kind is p.VAR_POSITIONAL else '**'}{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            texts.append("*")
            starred = True
        plain = isinstance(p.default, (bool, int, float, str))
        default = "" if p.default is p.empty else f"={p.default!r}" if plain else "=None"
        texts.append(p.name + default)
    return ", ".join(texts)


def call_arguments(signature: inspect.Signature, values: Iterable[str] | None = None) -> str:
    """The arguments of a call that passes a forward's parameters, or `values` instead."""
    texts: list[str] = []
    for p, value in zip(signature.parameters.values(), values or signature.parameters, strict=True):
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        texts.append(f"{p.name}={value}" if p.kind is p.KEYWORD_ONLY else star + value)
    return ", ".join(texts)


def wrapped(line: str) -> list[str]:
    """A line; a long call with one argument a line."""
    if len(line) <= WIDTH or not line.endswith(")"):
        return [line]
    depth, cuts = 0, [len(line) - 1]  # the brackets of the call and the commas between, the last one first
    for i, character in reversed([*enumerate(line)]):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character == ","):
            cuts.append(i)
        if depth == 0:
            break
    parts = [line[start + 1 : stop].strip() for start, stop in itertools.pairwise(reversed(cuts))]
    return [line[: cuts[-1] + 1], *(f"    {p}," for p in parts), ")"]


def dispatched(choices: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Runs the statement of the first choice whose conditions hold; tests shared ones once."""
    lines: list[str] = []
    while choices:
        first = choices[0][0]
        if not first:
            return [*lines, choices[0][1]]
        group = [c for c in choices if c[0][:1] == first[:1]]
        columns = zip(*(conditions for conditions, _ in group), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        inner = dispatched([(conditions[shared:], statement) for conditions, statement in group])
        head = [f"if {first[0]}:"] if shared == 1 else conjunction("if ", first[:shared], ":")
        lines += [*head, *indented(inner)]
        choices = [c for c in choices if c[0][:1] != first[:1]]
    return lines


def conjunction(before: str, conditions: Iterable[str], after: str = "") -> list[str]:
    """A statement whose expression is the conjunction of some conditions, one a line."""
    first, *others = [*conditions] or ["True"]
    return [f"{before}(", f"    {first}", *(f"    and {c}" for c in others), f"){after}"]
