"""A sample of the values of the base: what is written down of it, its digest, and how far another base is from it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peftc.adapters.metadata import BaseTensor, WeightsDigest
from peftc.adapters.sharded import whole
from peftc.forms.module import has_values

VALUES = 16  # of each parameter that are written down, at equal distances from the first to the last
_HALF = 2.0**-7  # what float16 and bfloat16 of one number differ by at most, relatively

Sample = tuple[float, ...]


@dataclass(frozen=True)
class Distance:
    """How far the weights of a model are from those that were written down.

    `changed`, `unreadable`: parameters whose values are others, and those that have no plain values here (quantised). `compared`:
    how many could be compared. `relative`: ‖here − there‖ / ‖there‖ over the samples of all, `farthest` the parameter where that is
    largest, with its own.
    """

    changed: tuple[str, ...]
    unreadable: tuple[str, ...]
    compared: int
    relative: float
    farthest: tuple[str, float]


def samples(parameters: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Sample | None]:
    """So many values of each parameter, in its order of storage as text has it; None of those that are quantised, fake or no
    floats. One copy for each device and dtype.
    """
    found: dict[str, Sample | None] = dict.fromkeys(counts)
    pieces: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, count in counts.items():
        values = whole(parameters[name].detach())
        if _is_plain(parameters[name], values):
            places = torch.linspace(0, values.numel() - 1, count, dtype=torch.float64).long()
            piece = torch.take(values, places.to(values.device))
            pieces.setdefault((values.device, values.dtype), {})[name] = piece
    for group in pieces.values():
        flat: list[float] = torch.cat(list(group.values())).cpu().double().tolist()
        start = 0
        for name, piece in group.items():
            found[name] = tuple(flat[start : start + piece.numel()])
            start += piece.numel()
    return found


def _is_plain(parameter: Tensor, values: Tensor) -> bool:
    plain = type(values.data) is torch.Tensor and has_values(parameter) and parameter.is_floating_point()
    return plain and parameter.element_size() >= 2 and parameter.numel() > 0


def finite(sample: Sample | None) -> Sample:
    """A sample as it is written down: nothing where a value says nothing."""
    return sample if sample is not None and all(map(math.isfinite, sample)) else ()


def digest_of(tensors: Mapping[str, BaseTensor]) -> WeightsDigest:
    """sha256 over names and samples: one for one base in one dtype."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if tensor.sample:
            sha.update(f"{name}\0".encode() + struct.pack(f"<{len(tensor.sample)}d", *tensor.sample))
    return WeightsDigest(values=VALUES, sha256=sha.hexdigest())


def distance(tensors: Mapping[str, BaseTensor], parameters: Mapping[str, Tensor]) -> Distance:
    """Compares what was written down with what is here, allowing for a cast to another dtype."""
    counts = {name: len(t.sample) for name, t in tensors.items() if t.sample and name in parameters}
    changed, unreadable = list[str](), list[str]()
    apart, norm, farthest = 0.0, 0.0, ("", 0.0)
    for name, here in samples(parameters, counts).items():
        there = tensors[name]
        if here is None:
            unreadable.append(name)
            continue
        size = math.fsum(value * value for value in there.sample)
        norm += size
        if not _same(there, here, parameters[name].dtype):
            changed.append(name)
            square = sum((a - b) ** 2 for a, b in zip(here, there.sample, strict=True))
            apart += square
            farthest = max(farthest, (name, _ratio(square, size)), key=lambda pair: pair[1])
    return Distance(tuple(changed), tuple(unreadable), len(counts) - len(unreadable), _ratio(apart, norm), farthest)


def _ratio(square: float, norm: float) -> float:
    """√(square / norm); infinite where there is nothing to divide by, or values are not finite."""
    if not math.isfinite(square) or not norm:
        return math.inf if square else 0.0
    return math.sqrt(square / norm)


def _same(there: BaseTensor, here: Sample, now: torch.dtype) -> bool:
    """Equal, or one of the two rounded to the other's dtype."""
    then = getattr(torch, there.dtype, None)
    if here == there.sample or not isinstance(then, torch.dtype) or then == now:
        return here == there.sample
    one, two = torch.tensor(there.sample, dtype=torch.float64), torch.tensor(here, dtype=torch.float64)
    if torch.equal(one.to(now).double(), two) or torch.equal(two.to(then).double(), one):
        return True
    return {then, now} == {torch.float16, torch.bfloat16} and torch.allclose(one, two, rtol=_HALF, atol=2.0**-24)
