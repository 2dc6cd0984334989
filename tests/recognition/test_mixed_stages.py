"""Stages whose layers are of several kinds: convolutions before attentions, and parts beside the
lists of layers that attend, too.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Network
from tests.recognition.test_pyramids import Attending, Pooled

D = 8


class Reducing(nn.Module):
    """LeViT: every second token asks for all of them, and a network is added."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(D), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x[:, ::2], x)
        return x + self.mlp(x)


class Reduced(nn.Module):
    def __init__(self, reduces: bool) -> None:
        super().__init__()
        self.downsample = Reducing() if reduces else nn.Identity()
        self.blocks = nn.Sequential(Attending(), Attending())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class Convolving(nn.Module):
    """EfficientViT: the first block of a stage changes the tokens, and adds nothing to them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.pointwise = nn.Conv1d(D, D, 3, 2, 1), nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.mixed(x.transpose(1, 2)).relu()).transpose(1, 2)


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Stages(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)


def modules(model: nn.Module, x: Tensor, role: str) -> set[str]:
    table = peftc.sites(model, sample={"x": x})
    return {site.module for site in table.sites if site.path.endswith(f".{role}")}


def check(model: nn.Module, x: Tensor, place: str, parts: list[str]) -> None:
    """Compares an edit of all sub-layers of a kind with hooks at modules."""
    reference = copy.deepcopy(model)
    for name in parts:
        reference.get_submodule(name).register_forward_hook(lambda module, args, out: 3 * out)
    peftc.compile(f"peft 1\nedit e at layer[*].{place} {{ h *= vector(init=3) }}", model, sample={"x": x})
    assert torch.allclose(model(x), reference(x), rtol=0, atol=1e-10)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_part_beside_the_blocks_of_a_stage_is_a_layer() -> None:
    """The stage was one layer, whose first attention had the network of that part."""
    model, x = Stages(Reduced(False), Reduced(True)).double(), torch.randn(2, 8, D).double()
    blocks = [f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
    layers = {*blocks, "stages.1.downsample"}
    assert {s.module for s in peftc.sites(model, sample={"x": x}).sites if s.steps[-1][0] == "layer"} == layers
    assert modules(model, x, "ffn.up") == {f"{name}.mlp.up" for name in layers}
    check(copy.deepcopy(model), x, "ffn", [f"{name}.mlp" for name in layers])
    check(model, x, "attn", [f"{name}.attn" for name in layers])


def test_a_block_of_another_class_before_the_layers_of_a_stage() -> None:
    """The stage was one layer, with all sub-layers of its blocks."""
    model = Stages(*(Blocks(Convolving(), Attending(), Attending()) for _ in range(2))).double()
    x, blocks = torch.randn(2, 8, D).double(), [f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (1, 2)]
    assert {s.module for s in peftc.sites(model, sample={"x": x}).sites if s.steps[-1][0] == "layer"} >= {*blocks}
    assert modules(model, x, "attn.self.q") == {f"{name}.attn.q" for name in blocks}
    check(model, x, "attn", [f"{name}.attn" for name in blocks])


def test_one_attending_block_behind_convolutional_ones() -> None:
    """Most blocks had no site, in silence: those of the first stage, and those before the last."""
    first, last = Blocks(Pooled(), Pooled()), Blocks(Pooled(), Pooled(), Flat(), Attending())
    model, x = Stages(first, last).double(), torch.randn(2, D, 4, 4).double()
    ups = {f"stages.{i}.blocks.{j}.up" for i in (0, 1) for j in (0, 1)} | {"stages.1.blocks.3.mlp.up"}
    assert modules(model, x, "ffn.up") == ups
    check(model, x, "ffn", [name.replace(".up", ".down") if "mlp" not in name else name[:-3] for name in ups])


class Branches(nn.Module):
    """FastViT: a convolution as a sum of branches, one of which is a norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.identity, self.norm = nn.BatchNorm2d(D), nn.BatchNorm2d(D)
        self.small, self.large = (nn.Conv2d(D, D, k, padding=k // 2, groups=D) for k in (1, 3))
        self.mixed, self.up, self.down = nn.Conv2d(D, D, 1), nn.Conv2d(D, 2 * D, 1), nn.Conv2d(2 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixed(self.small(x) + self.identity(x) + self.large(x))
        x = x + (y - self.norm(x))
        return x + self.down(self.up(x).relu())


def test_a_sum_of_branches_is_no_residual_sum() -> None:
    """The sum of the branches was the stream, and the network behind it had no site."""
    model, x = Stages(Blocks(Branches(), Branches()), Blocks(Branches())).double().eval(), torch.randn(2, D, 4, 4)
    x, blocks = x.double(), ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"]
    assert modules(model, x, "ffn.up") == {f"{name}.up" for name in blocks}
    check(model, x, "ffn", [f"{name}.down" for name in blocks])
