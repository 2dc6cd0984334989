"""Tensors of which each process has a part: DTensors, as those of FSDP2, and those of ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError


def is_sharded(tensor: object) -> bool:
    return hasattr(tensor, "full_tensor")


def is_partitioned(tensor: Any) -> bool:
    """Whether DeepSpeed's ZeRO-3 has taken the entries of a parameter, which has size 0 now."""
    return tensor.numel() == 0 and len(getattr(tensor, "ds_shape", ())) > 0


def require_gathered(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P450 for a parameter that DeepSpeed's ZeRO-3 has partitioned."""
    if names := [name for name, tensor in tensors if tensor.numel() == 0 and is_partitioned(tensor)]:
        message = f"ZeRO-3 of DeepSpeed has partitioned {len(names)} of the parameters, such as `{names[0]}`"
        help_ = "do this inside `with deepspeed.zero.GatheredParameters(list(model.parameters())):`, on every rank"
        raise PeftcError(Diagnostic("P450", message, help=help_))


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor. A collective call: every process makes it, in the same order."""
    dtensor: Any = tensor
    return dtensor.full_tensor() if is_sharded(tensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    dtensor: Any = tensor
    return dtensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def entries_at(tensor: Tensor, places: Tensor) -> Tensor:
    """The entries at places of the flat tensor, which is not gathered. A collective call, too.

    Each entry comes from one process, whose bits are added to zeros.
    """
    part = local_part(tensor)
    if not is_sharded(tensor):
        return torch.take(part, places.to(part.device))
    dtensor: Any = tensor
    mesh, (chunk,) = dtensor.device_mesh, dtensor.__create_chunk_list__()
    indices = torch.unravel_index(places, tensor.shape)
    own = torch.ones_like(places, dtype=torch.bool)
    for index, offset, size in zip(indices, chunk.offsets, chunk.sizes, strict=True):
        own &= (index >= offset) & (index < offset + size)
    copies = (d for d, placement in enumerate(dtensor.placements) if placement.is_replicate())
    if any(mesh.get_local_rank(d) for d in copies):
        own[:] = False
    here = tuple((index - offset)[own].to(part.device) for index, offset in zip(indices, chunk.offsets, strict=True))
    values = torch.zeros(len(places), dtype=torch.float64, device=part.device)
    values[own.to(part.device)] = part[here].double()
    bits = values.view(torch.int64)
    for d in range(mesh.ndim):
        dist.all_reduce(bits, group=mesh.get_group(d))
    return values.to(part.dtype)


def distributed_like(value: Tensor, tensor: Tensor) -> Tensor:
    """A value that each rank has whole, in the parts of a sharded tensor."""
    if not is_sharded(tensor) or is_sharded(value):
        return value
    distributed, own = import_module("torch.distributed.tensor"), cast(Any, tensor)  # slow to import
    value = value.to(own.device, own.dtype)
    return distributed.distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
