"""The processes over which the weights of a model are sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.sharded_tensors import is_sharded
from peftc.modules.walk import modules_in


@dataclass(frozen=True, eq=False)
class Meshes:
    """Meshes of torch.distributed.

    Attributes:
        parallel: of tensor parallelism, which computes with the parts of a weight.
        data: of FSDP2, which gathers a weight before it computes; None where edits are not yet in
            the model when FSDP2 takes its parameters: then these are among them.
        joint: both.
    """

    parallel: Any = None
    data: Any = None
    joint: Any = None

    def placements(self, parallel: Any) -> list[Any]:
        """Those on `joint` of a parameter with one on `parallel`: each part of the data has all."""
        replicate = import_module("torch.distributed.tensor").Replicate()
        return [replicate] * (0 if self.data is None else self.data.ndim) + [parallel] * (self.parallel is not None)

    @classmethod
    def of(cls, model: nn.Module) -> Meshes | None:
        """Those of the weights of a model; None if no weight is sharded. Raises: P449."""
        weights = list(sharded_weights(model))
        if not weights:
            return None
        widest = max(weights, key=lambda weight: weight.device_mesh.ndim)
        mesh, names = widest.device_mesh, widest.device_mesh.mesh_dim_names
        if not is_fully_sharded(model):
            return cls(mesh, None, mesh) if mesh.ndim == 1 else _refuse(mesh)
        if mesh.ndim == 1 or (mesh.ndim == 2 and widest.placements[0].is_replicate()):  # the second is HSDP
            return cls(None, mesh, mesh)
        return cls(mesh[names[1]], mesh[names[0]], mesh) if mesh.ndim == 2 and names else _refuse(mesh)


def sharded_weights(model: nn.Module) -> Iterator[Any]:
    """The sharded weights of Linears."""
    for module in modules_in(model):
        weight: Any = vars(module)["_parameters"].get("weight")
        if isinstance(module, nn.Linear) and is_sharded(weight):
            yield weight


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has some parameters of a model."""
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, cls) for module in modules_in(model))


def _refuse(mesh: Any) -> Any:
    message = f"the weights are sharded over {mesh.ndim} dimensions of processes, {mesh}"
    raise PeftcError(Diagnostic("P449", message, help="compile the model before `fully_shard`"))


def form_value(parameter: Any, meshes: Meshes, placement: Any) -> Any:
    """A parameter of an edit that FSDP2 does not have, as the equations read it: sharded over
    `parallel`, if there are such processes. Its gradient is the mean over those of `data`.
    """
    torch_tensor = import_module("torch.distributed.tensor")
    placements = meshes.placements(placement)
    if not is_sharded(parameter):
        parameter = torch_tensor.DTensor.from_local(parameter, meshes.data, placements, run_check=False)
    partial = [torch_tensor.Partial()] * meshes.data.ndim + placements[meshes.data.ndim :]
    local = parameter.redistribute(placements=placements).to_local(grad_placements=partial)
    if local.requires_grad:
        local.register_hook(lambda gradient: cast(Tensor, gradient) / meshes.data.size())
    if meshes.parallel is None:
        return local
    return torch_tensor.DTensor.from_local(local, meshes.parallel, [placement], run_check=False)
