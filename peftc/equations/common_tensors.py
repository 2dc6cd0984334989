"""The tensors that sites have in common: of `param A[…] per n` one for all sites with the same
number n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from peftc.equations.analysis import Place
from peftc.forms.form import Argument, Dims, PlacementError
from peftc.syntax import ast
from peftc.syntax.walk import names_in

Tensors = Mapping[str, tuple[Place, str]]  # by their names: a place that defines it, and its name in the text


class CommonTensors(NamedTuple):
    """The tensors that several sites have in common.

    Attributes:
        tensors: those of all sites, in the order of lines and of numbers.
        conflict: the line of one of which sites need different sizes, and a message.
    """

    tensors: dict[str, tuple[Place, str]]
    conflict: tuple[ast.Parameter, str] | None = None


def common_tensors(lines: Sequence[ast.Parameter], places: Sequence[Place]) -> CommonTensors:
    """The tensors of lines that have a scope, at the places of all sites with common ones."""
    tensors: dict[str, tuple[Place, str]] = {}
    for name in dict.fromkeys(line.name for line in lines):
        present = [place for place in places if name in place.sizes]
        first: dict[str, Place] = {}
        for place in present:
            tensor = place.tensor(name)
            before, here = first.setdefault(tensor, place).sizes[name], place.sizes[name]
            if before != here:
                message = f"sites have `{tensor}` in common, {list(before)} at one and {list(here)} at another"
                return CommonTensors(tensors, (place.parameters[name], message))
        tensors |= {tensor: (first[tensor], name) for tensor in sorted(first, key=_number)}
    return CommonTensors(tensors)


def size_refusal(
    form: ast.Form,
    line: ast.Parameter,
    message: str,
    arguments: Iterable[Argument | None],
    fits: Callable[[Mapping[str, str]], bool],
) -> PlacementError:
    """P305 for a tensor of two sizes, with a word by which sites have tensors of their own.

    Args: `fits`: whether there is one size with another word for an argument.
    """
    lets = [let for let in form.body if isinstance(let, ast.Let) and let.name == line.scope]
    names = {name for let in lets if let.condition for name in names_in(let.condition.left)}
    known = [argument for argument in arguments if argument is not None and argument.name in names]
    words = ((argument.name, word) for argument in known for word in argument.choices)
    help_ = next((f"write `{n}={w}`" for n, w in words if fits({n: w})), "write an edit for each size")
    return PlacementError("P305", message, known[0].name if known else None, help=help_)


def dims_at(dims: Dims, index: int) -> Dims:
    """Another one of the sites that have parameters in common."""
    shapes = dims.spots[index].shapes
    target, source, second = shapes or (dims.target, dims.input, dims.second)
    assert target is not None
    return replace(dims, index=index, target=target, input=source, second=second)


def _number(tensor: str) -> int:
    """What a numbered tensor ends with."""
    end = tensor.rpartition("_")[2]
    return int(end) if end.isdecimal() else 0
