"""Adapters whose weights are made by networks that tasks and layers have in common, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.adapter import width
from peftc.forms.adapter_module import ACTIVATION, EPSILON
from peftc.forms.arguments import integer, number
from peftc.forms.hyper import layers_of, nets_of, parts_of, spots_of
from peftc.forms.module import Draw, FormModule, constant, normal
from peftc.forms.registry import Args, Dims

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

SPREAD = 0.01  # deviation of the first values of all projections
NORM_EPSILON = 1e-6  # of the layer norm after the task projector


class HyperNetworks(FormModule):
    """What all tasks and sites have in common: embeddings of layers and positions, the projector, the networks.

    Shapes: layers (n, t); positions (k, t); p1 (m, 3t); p2 (t, m); of the i-th network down_i (r · d_in, t), up_i (d_out · r, t),
    and, where they are made, down_bias_i (r, t) and up_bias_i, scale_i, shift_i (d_out, t).
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        t, m = integer(args, "t"), integer(args, "m")
        self.layers = self.parameter("layers", len(layers_of(dims)), t)
        self.positions = self.parameter("positions", len(parts_of(dims)), t)
        self.p1, self.p1_bias = self.parameter("p1", m, 3 * t), self.parameter("p1_bias", m)
        self.p2, self.p2_bias = self.parameter("p2", t, m), self.parameter("p2_bias", t)
        self.norm_weight, self.norm_bias = self.parameter("norm_weight", t), self.parameter("norm_bias", t)
        for i, (d_in, d_out) in enumerate(nets_of(args, dims).values()):
            r = width(args, d_in, "hyper")
            self.parameter(f"down_{i}", r * d_in, t)
            self.parameter(f"up_{i}", d_out * r, t)
            self.optional(f"down_bias_{i}", args["bias"], r, t)
            self.optional(f"up_bias_{i}", args["bias"], d_out, t)
            self.optional(f"scale_{i}", args["norm"], d_out, t)
            self.optional(f"shift_{i}", args["norm"], d_out, t)

    def embedding(self, task: Tensor, layer: int, position: int) -> Tensor:
        """I (t,)."""
        z = F.linear(torch.cat([task, self.layers[layer], self.positions[position]]), self.p1, self.p1_bias)
        z = F.linear(torch.relu(z), self.p2, self.p2_bias)
        return F.layer_norm(z, z.shape, self.norm_weight, self.norm_bias, NORM_EPSILON)

    def made(self, name: str, net: int, embedding: Tensor) -> Tensor | None:
        """What a network makes: W I."""
        weight = dict(self.named_parameters()).get(f"{name}_{net}")
        return None if weight is None else weight @ embedding

    def draws(self) -> Mapping[str, Draw]:
        drawn: dict[str, Draw] = {name: normal(SPREAD) for name, _ in self.named_parameters()}
        drawn |= dict.fromkeys(("p1_bias", "p2_bias", "norm_bias"), constant(0.0))
        return drawn | {"norm_weight": constant(1.0), "layers": normal(1.0), "positions": normal(1.0)}


class TaskEmbedding(FormModule):
    """The embedding of one task: task (t,). The networks are its `owner_module`."""

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.embedding = self.parameter("embedding", integer(args, "t"))

    def draws(self) -> Mapping[str, Draw]:
        return {"embedding": normal(1.0)}


class Hyper(FormModule):
    """f(x) = γ ⊙ LN(act(x D + b) U + c) + β; D, U, b, c, γ, β = W I each; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); I (t,).
    Source: Karimi Mahabadi et al. 2021, arXiv:2106.04489, Eq. 1-6, and sections 2.4 and 2.5; as in the authors' code, the projector ends
    with a layer norm, and the embeddings begin as N(0, 1), all projections as N(0, 0.01).
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        spot = spots_of(dims)[dims.index]
        self.layer, self.position = layers_of(dims).index(spot.layer), parts_of(dims).index(spot.part)
        self.net = self.position if args["nets"] == "positions" else 0
        self.d_in, self.d_out = spot.d_in, spot.d_out
        self.act, self.p = str(args["act"]), number(args, "dropout")

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return TaskEmbedding(args, dims, dtype, device)

    @classmethod
    def of_all(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return HyperNetworks(args, dims, dtype, device)

    def weights(self) -> dict[str, Tensor | None]:
        """D (r, d_in), U (d_out, r), as `nn.Linear` has them, and the vectors b, c, γ, β, by the names of their networks."""
        task = self.owner_module
        assert isinstance(task, TaskEmbedding)
        networks = task.owner_module
        assert isinstance(networks, HyperNetworks)
        embedding = networks.embedding(task.embedding, self.layer, self.position)
        names = ("down", "up", "down_bias", "up_bias", "scale", "shift")
        made = {name: networks.made(name, self.net, embedding) for name in names}
        down, up = made["down"], made["up"]
        assert down is not None
        assert up is not None
        return made | {"down": down.view(-1, self.d_in), "up": up.view(self.d_out, -1)}

    def forward(self, x: Tensor) -> Tensor:
        made = self.weights()
        down, up = made["down"], made["up"]
        assert down is not None
        assert up is not None
        z = ACTIVATION[self.act](F.linear(x.to(down.dtype), down, made["down_bias"]))
        y = F.linear(F.dropout(z, self.p, self.training), up, made["up_bias"])
        if made["scale"] is not None:
            y = F.layer_norm(y, (self.d_out,), made["scale"], made["shift"], EPSILON)
        return y.to(x.dtype)

    def fold(self, value: Affine) -> Affine:
        made = self.weights()
        down, up = made["down"], made["up"]
        assert down is not None
        assert up is not None
        return value.through(down, made["down_bias"]).through(up, made["up_bias"])
