"""Adapters whose weights are made by networks that tasks and layers have in common, as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.activations_module import ACTIVATION, EPSILON
from peftc.forms.arguments import number
from peftc.forms.hyper import Hyper, net_of, stack_of
from peftc.forms.module import FormModule

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

NORM_EPSILON = 1e-6  # of the layer norm after the task projector
NAMES = ("down", "up", "down_bias", "up_bias", "scale", "shift")  # of what networks make


class HyperNetworks(FormModule):
    """What all tasks and sites have in common: embeddings of layers and positions, projectors, networks.

    Shapes: layers (n, t); of each stack that has its own, with its number behind the name, else once: positions (k, t); p1 (m, 3t);
    p2 (t, m); of the i-th network down_i (r · d_in, t), up_i (d_out · r, t), and, where they are made, down_bias_i (r, t) and up_bias_i,
    scale_i, shift_i (d_out, t); with `offset` the biases of all these, down_offset_i (r · d_in,) and so on.
    """

    definition: Hyper
    layers: nn.Parameter

    def end(self, stack: int) -> str:
        """What follows the names of what a stack has."""
        return f"_{stack}" if self.form_args["nets"] == "stacks" else ""

    def embedding(self, task: Tensor, layer: int, stack: int, position: int) -> Tensor:
        """I (t,)."""
        names = ("positions", "p1", "p1_bias", "p2", "p2_bias", "norm_weight", "norm_bias")
        positions, p1, p1_bias, p2, p2_bias, weight, bias = (getattr(self, name + self.end(stack)) for name in names)
        z = F.linear(torch.cat([task, self.layers[layer], positions[position]]), p1, p1_bias)
        z = F.linear(torch.relu(z), p2, p2_bias)
        return F.layer_norm(z, z.shape, weight, bias, NORM_EPSILON)

    def output(self, name: str, net: int, embedding: Tensor) -> Tensor | None:
        """What a network makes: W I + w."""
        weight, offset = (getattr(self, f"{key}_{net}") for key in (name, f"{name}_offset"))
        if weight is None:
            return None
        return weight @ embedding if offset is None else weight @ embedding + offset


class TaskEmbedding(FormModule):
    """The embedding of one task: task (t,). The networks are its `owner_module`."""

    embedding: nn.Parameter


class HyperModule(FormModule):
    """f(x) = γ ⊙ LN(act(x D + b) U + c) + β; D, U, b, c, γ, β = W I each, or W I + w; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); I (t,).
    Source: Karimi Mahabadi et al. 2021, arXiv:2106.04489, Eq. 1-6, and sections 2.4 and 2.5; as in the authors' code, the projector ends
    with a layer norm, and the embeddings begin as N(0, 1), all projections as N(0, 0.01), w as 0.
    """

    definition: Hyper

    def setup(self) -> None:
        form, args, dims = self.definition, self.form_args, self.form_dims
        spot = form.spots(dims)[dims.index]
        stacks, stack = form.parts(args, dims), stack_of(args, spot)
        self.layer, self.stack = form.layers(dims).index(spot.layer), list(stacks).index(stack)
        self.position, self.net = stacks[stack].index(spot.part), list(form.nets(args, dims)).index(net_of(args, spot))
        self.d_in, self.d_out = spot.d_in, spot.d_out
        self.act, self.p = str(args["act"]), number(args, "dropout")

    def weights(self) -> dict[str, Tensor | None]:
        """D (r, d_in), U (d_out, r), as `nn.Linear` has them, and the vectors b, c, γ, β, by the names of their networks."""
        task = self.owner_module
        assert isinstance(task, TaskEmbedding)
        networks = task.owner_module
        assert isinstance(networks, HyperNetworks)
        embedding = networks.embedding(task.embedding, self.layer, self.stack, self.position)
        values = {name: networks.output(name, self.net, embedding) for name in NAMES}
        down, up = values["down"], values["up"]
        assert down is not None
        assert up is not None
        return values | {"down": down.view(-1, self.d_in), "up": up.view(self.d_out, -1)}

    def forward(self, x: Tensor) -> Tensor:
        values = self.weights()
        down, up = values["down"], values["up"]
        assert down is not None
        assert up is not None
        z = ACTIVATION[self.act](F.linear(x.to(down.dtype), down, values["down_bias"]))
        y = F.linear(F.dropout(z, self.p, self.training), up, values["up_bias"])
        if values["scale"] is not None:
            y = F.layer_norm(y, (self.d_out,), values["scale"], values["shift"], EPSILON)
        return y.to(x.dtype)

    def fold(self, value: Affine) -> Affine:
        values = self.weights()
        down, up = values["down"], values["up"]
        assert down is not None
        assert up is not None
        return value.through(down, values["down_bias"]).through(up, values["up_bias"])
