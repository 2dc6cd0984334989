"""Forms that are Python classes outside of the package, as a user writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms import (
    Args,
    Argument,
    Dims,
    Form,
    FormModule,
    Parameter,
    PlacementError,
    Scope,
    SelectiveModule,
)
from peftc.forms.affine_module import Affine
from peftc.forms.arguments import SEED
from peftc.forms.shapes import Shape, Weight, entries

R = Argument("r", "int", "rank", required=True, low=1)


class LowRankModule(FormModule):
    A: nn.Parameter
    B: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x.to(self.A.dtype), self.A), self.B).to(x.dtype)

    def fold(self, value: Affine) -> Affine:
        return value.through(self.A).through(self.B)


class LowRank(Form):
    """LoRA without a scale: beside the built-in one, everything must be the same."""

    name = "low_rank"
    equation = "f(x) = B A x"
    paper = "Hu et al. 2021"
    arguments = (R,)
    module = "tests.forms.python_forms:LowRankModule"

    def shape(self, args: Args, dims: Dims) -> Shape:
        self.read_features(dims), self.written_features(dims)
        return dims.target

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        r: Any = args["r"]
        yield Parameter("A", (r, self.read_features(dims)), "kaiming")
        yield Parameter("B", (self.written_features(dims), r))

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None

    def rank(self, args: Args, dims: Dims) -> int | None:
        r: Any = args["r"]
        return r


class FailingModule(FormModule):
    def setup(self) -> None:
        raise KeyError("nothing")


class SignsModule(FormModule):
    """f(h) = g ⊙ s ⊙ h, s drawn from the seed."""

    g: nn.Parameter

    def forward(self, h: Tensor) -> Tensor:
        return (self.g * self.get_buffer("s") * h.to(self.g.dtype)).to(h.dtype)


class DriftModule(FormModule):
    """f(h) = g ⊙ (h − m): m follows h while training; `steps` counts calls of `peftc.step`."""

    g: nn.Parameter

    def setup(self) -> None:
        self.state("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, h: Tensor) -> Tensor:
        z, m = h.to(self.g.dtype), self.get_buffer("m")
        if self.training:
            with torch.no_grad():
                m.lerp_(z.flatten(0, -2).mean(0), 0.5)
        return (self.g * (z - m)).to(h.dtype)

    def fold(self, value: Affine) -> Affine:
        return value.shifted(-self.get_buffer("m").to(value.dtype)).scaled(self.g.detach().to(value.dtype))

    def after_step(self, generator: torch.Generator) -> None:
        self.get_buffer("steps").add_(1)

    def penalties(self) -> Mapping[str, Tensor]:
        return {"size": self.g.square().sum()}


class Drift(LowRank):
    name = "drift"
    equation = "f(h) = g ⊙ (h − m), m a running mean"
    inputs = ("h",)
    arguments = ()
    module = DriftModule

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d = self.read_features(dims)
        if d != self.written_features(dims):
            raise PlacementError("P301", f"`drift` reads {dims.input}, but writes {dims.target}", "input")
        yield Parameter("g", (d,))
        yield Parameter("m", (d,), role="state")

    def shape(self, args: Args, dims: Dims) -> Shape:
        list(self.parameters(args, dims))
        return dims.target

    def shifts(self, args: Args, dims: Dims) -> bool:
        return True

    def rank(self, args: Args, dims: Dims) -> int | None:
        return None


class Signs(Drift):
    name = "signs"
    equation = "f(h) = g ⊙ s ⊙ h"
    arguments = (SEED,)
    module = SignsModule

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        yield Parameter("g", (self.read_features(dims),))
        yield Parameter("s", (self.read_features(dims),), ("normal", 1.0), role="fixed")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it has no fold"


class MixedModule(FormModule):
    g: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        common: Any = self.owner_module
        return (self.g * F.linear(x.to(self.g.dtype), common.whole)).to(x.dtype)


class CommonModule(FormModule):
    whole: nn.Parameter


class Mixed(Form):
    """A matrix that all sites of the edit have in common, and a vector of each."""

    name = "mixed"
    module = MixedModule
    common_module = CommonModule

    def shape(self, args: Args, dims: Dims) -> Shape:
        self.read_features(dims)
        return dims.target

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d_in, d_out = self.read_features(dims), self.written_features(dims)
        yield Parameter("g", (d_out,))
        yield Parameter("whole", (d_out, d_in), ("normal", 0.1), scope="common")

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it has no fold"

    def common(self, args: Args) -> Scope | None:
        return "edit"


class MaskModule(SelectiveModule):
    """f = D at the entries that `peftc.calibrate` chooses, zero elsewhere."""

    values: nn.Parameter

    def setup(self) -> None:
        self.state("mask", torch.zeros(self.values.shape, dtype=torch.bool))

    @property
    def unit_count(self) -> int:
        count: Any = self.form_args["count"]
        return count

    def choose(self, places: Tensor) -> None:
        mask = self.get_buffer("mask").zero_()
        mask.view(-1)[places] = True

    def forward(self, like: Tensor) -> Tensor:
        return (self.values * self.get_buffer("mask")).to(like.dtype)


class Mask(Form):
    name = "mask"
    inputs = ()
    arguments = (
        Argument("count", "int", "entries", required=True, low=1),
        Argument("select", "choice", "by what", "fisher", choices=("fisher", "magnitude")),
    )
    module = "tests.forms.python_forms:MaskModule"

    def shape(self, args: Args, dims: Dims) -> Shape:
        if not isinstance(dims.target, Weight) or entries(dims.target) < self.unit_count(args):
            raise PlacementError("P310", f"`mask` is a change of a larger weight, here {dims.target}", "count")
        return dims.target

    def unit_count(self, args: Args) -> int:
        count: Any = args["count"]
        return count

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        assert isinstance(dims.target, Weight)
        yield Parameter("values", (dims.target.d_out, dims.target.d_in))

    def initial(self, args: Args, dims: Dims) -> float | None:
        return 0.0

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return None

    def changed_entries(self, args: Args, dims: Dims) -> int | None:
        return self.unit_count(args)
