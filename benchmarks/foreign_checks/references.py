"""References of a role table (benchmarks/foreign_models/case.py) as entries of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

_REFERENCE = re.compile(
    r"(?P<name>[\w.]+?)(?P<before>\.T)?(?:@(?P<index>\d+))?(?P<after>\.T)?(?:\((?P<layout>[^)]*)\))?(?:\[(?P<rows>[^]]*)\])?"
)


@dataclass(frozen=True)
class Reference:
    """A parameter, or a part of it, read as (out, in).

    Attributes:
        name: of the parameter in the model.
        index: which of several stacked matrices; None for the whole parameter.
        layout: "d h k -> h k | d": rows before `|`, columns behind it; empty as it is stored.
        rows: blocks of rows; empty for all.
    """

    name: str
    index: int | None = None
    layout: str = ""
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    def matrix(self, model: nn.Module) -> Tensor:
        """The flat position of each entry in its parameter: (out, in); of a vector (out, 1)."""
        shape = tensor_of(model, self.name).shape
        positions = torch.arange(shape.numel()).view(shape)
        if self.index is not None:
            positions = positions[self.index]
        return _with_rows(_in_layout(positions, self.layout), self.rows)


def parse(text: str, model: nn.Module) -> Reference:
    """The reference that a text states. Raises ValueError where the model has no such entries."""
    match = _REFERENCE.fullmatch(text)
    if not match:
        raise ValueError(f"not a reference: {text}")
    blocks = [block.split(":") for block in (match["rows"] or "").split(",") if block]
    rows = tuple((int(start), int(stop)) for start, stop in blocks)
    layout = "a b -> b | a" if match["before"] or match["after"] else match["layout"] or ""
    index = int(match["index"]) if match["index"] else None
    reference = Reference(match["name"], index, layout, rows)
    try:
        expected = sum(stop - start for start, stop in rows)
        matrix = reference.matrix(model)
    except (AttributeError, IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"the model has no {text}: {error}") from None
    if rows and matrix.shape[0] != expected:
        raise ValueError(f"{text}: there are no such rows")
    return reference


def expanded(text: str | tuple[str, ...], layer: str | int) -> Iterator[str]:
    """The references for one layer: `{i}` is the layer, `{0..3}` is four references."""
    for one in (text,) if isinstance(text, str) else text:
        yield from _ranges(one.replace("{i}", str(layer)))


def _ranges(text: str) -> Iterator[str]:
    match = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if not match:
        yield text
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from _ranges(text[: match.start()] + str(number) + text[match.end() :])


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter, or the tensor that a parametrisation computes in its place."""
    tensor = attrgetter(name)(model)
    if not isinstance(tensor, Tensor):
        raise AttributeError(f"{name} is no tensor")
    return tensor


def effective_name(name: str) -> str:
    """The tensor that the code reads, of the name of a parameter: a parametrised `weight` is stored
    as `parametrizations.weight.original0`, by the old `weight_norm` as `weight_g` and `weight_v`.
    """
    return re.sub(r"parametrizations\.(\w+)\.original\d*$|(weight)_(orig|v)$", r"\1\2", name)


def _in_layout(positions: Tensor, layout: str) -> Tensor:
    if not layout:
        return positions.reshape(positions.shape[0], -1)
    stored, _, wanted = layout.partition("->")
    axes = stored.split()
    rows, _, columns = (part.split() for part in wanted.partition("|"))
    if sorted(axes) != sorted(rows + columns) or len(axes) != positions.ndim:
        raise ValueError(f"the layout {layout} does not fit {tuple(positions.shape)}")
    moved = positions.permute([axes.index(axis) for axis in rows + columns])
    return moved.reshape(moved.shape[: len(rows)].numel(), -1)


def _with_rows(matrix: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([matrix[start:stop] for start, stop in rows]) if rows else matrix
