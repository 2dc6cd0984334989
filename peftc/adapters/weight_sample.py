"""Samples of the base's weights: their digest, and the distance of another base from them."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from peftc.adapters.metadata import BaseTensor, WeightsDigest
from peftc.adapters.weight_access import whole
from peftc.forms.module import has_values

VALUES = 16  # of each parameter, at equal distances from the first to the last
_HALF = 2.0**-7  # the largest relative difference between float16 and bfloat16 of one number

Sample = tuple[float, ...]


class Distance(NamedTuple):
    """The distance of a model's weights from saved samples."""

    changed: tuple[str, ...]  # parameters with other values
    unreadable: tuple[str, ...]  # parameters that cannot be compared, since they are quantised
    compared: int  # the number of parameters that were compared
    relative: float  # ‖here − there‖ / ‖there‖ over all samples
    farthest: tuple[str, float]  # the parameter with the largest relative distance, and this distance


def samples(parameters: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Sample | None]:
    """As many values of each parameter as `counts` says, in row-major order.

    Quantised, fake and integer parameters have None. Values are copied once per device and dtype.
    """
    result: dict[str, Sample | None] = dict.fromkeys(counts)
    pieces: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, count in counts.items():
        parameter = parameters[name]
        values = whole(parameter.detach())
        is_plain = type(values.data) is torch.Tensor and has_values(parameter) and parameter.is_floating_point()
        if is_plain and parameter.element_size() >= 2 and parameter.numel() > 0:
            places = torch.linspace(0, values.numel() - 1, count, dtype=torch.float64).long()
            piece = torch.take(values, places.to(values.device))
            pieces.setdefault((values.device, values.dtype), {})[name] = piece
    for group in pieces.values():
        flat: list[float] = torch.cat(list(group.values())).cpu().double().tolist()
        start = 0
        for name, piece in group.items():
            result[name] = tuple(flat[start : start + piece.numel()])
            start += piece.numel()
    return result


def finite(sample: Sample | None) -> Sample:
    return sample if sample is not None and all(map(math.isfinite, sample)) else ()


def digest_of(tensors: Mapping[str, BaseTensor]) -> WeightsDigest:
    """sha256 over names and samples. It depends on the dtype of the base."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if tensor.sample:
            sha.update(f"{name}\0".encode() + struct.pack(f"<{len(tensor.sample)}d", *tensor.sample))
    return WeightsDigest(values=VALUES, sha256=sha.hexdigest())


def distance(tensors: Mapping[str, BaseTensor], parameters: Mapping[str, Tensor]) -> Distance:
    """Compares samples to parameters, up to a cast to another dtype."""
    counts = {name: len(t.sample) for name, t in tensors.items() if t.sample and name in parameters}
    changed, unreadable = list[str](), list[str]()
    total, norm, farthest = 0.0, 0.0, ("", 0.0)
    for name, here in samples(parameters, counts).items():
        saved = tensors[name]
        if here is None:
            unreadable.append(name)
            continue
        size = math.fsum(value * value for value in saved.sample)
        norm += size
        if not _is_same(saved, here, parameters[name].dtype):
            changed.append(name)
            square = sum((a - b) ** 2 for a, b in zip(here, saved.sample, strict=True))
            total += square
            farthest = max(farthest, (name, _ratio(square, size)), key=lambda pair: pair[1])
    return Distance(tuple(changed), tuple(unreadable), len(counts) - len(unreadable), _ratio(total, norm), farthest)


def _ratio(square: float, norm: float) -> float:
    if not math.isfinite(square) or not norm:
        return math.inf if square else 0.0
    return math.sqrt(square / norm)


def _is_same(saved: BaseTensor, here: Sample, dtype: torch.dtype) -> bool:
    saved_dtype = getattr(torch, saved.dtype, None)
    if here == saved.sample or not isinstance(saved_dtype, torch.dtype) or saved_dtype == dtype:
        return here == saved.sample
    a, b = torch.tensor(saved.sample, dtype=torch.float64), torch.tensor(here, dtype=torch.float64)
    if torch.equal(a.to(dtype).double(), b) or torch.equal(b.to(saved_dtype).double(), a):
        return True
    is_half = {saved_dtype, dtype} == {torch.float16, torch.bfloat16}
    return is_half and torch.allclose(a, b, rtol=_HALF, atol=2.0**-24)
