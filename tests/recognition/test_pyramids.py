"""Pyramids: stages whose blocks have convolutions alone, keys of patches, and networks behind an
attention that one sum adds.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers, Network

D, T = 8, 16


class Pooled(nn.Module):
    """EfficientFormer: tokens are pooled, and the network has convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.up, self.down = nn.AvgPool2d(3, 1, 1), nn.Conv2d(D, 2 * D, 1), nn.Conv2d(2 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pool(x)
        return x + self.down(self.up(x).relu())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = Attention(D), Network(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, block: type[nn.Module], flat: bool) -> None:
        super().__init__()
        self.flat, self.blocks = flat, nn.Sequential(block(), block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.flatten(2).transpose(1, 2) if self.flat else x)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(Pooled, False), Stage(Attending, True))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)


class Split(nn.Module):
    """YOLOv12: a loop over Sequentials of convolutional blocks, whose results are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleList([nn.Sequential(Pooled(), Pooled()), nn.Sequential(Pooled(), Pooled())])
        self.last = nn.Conv2d(3 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = [x]
        y.extend(m(y[-1]) for m in self.m)
        return x + self.last(torch.cat(y, 1))


class Inside(nn.Module):
    """EdgeNeXt: an attention is added to a value that a convolution computes, and a network of the
    sum is added to the layer's input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attn, self.mlp = nn.Conv1d(D, D, 3, padding=1, groups=D), Attention(D), Network(D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        y = y + self.attn(self.norm1(y))
        return x + self.mlp(self.norm2(y))


class Patches(nn.Module):
    """ScalableViT: keys and values are strided convolutions of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o = nn.BatchNorm2d(D), nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 1)
        self.k, self.v = nn.Conv2d(D, D, 2, 2), nn.Conv2d(D, D, 2, 2)
        self.up, self.down = nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).flatten(2) for p in (self.q, self.k, self.v))
        weights = (q.transpose(1, 2) @ k).softmax(-1)
        x = x + self.o((v @ weights.transpose(1, 2)).view(x.shape))
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    """LocalViT: a norm over rows of an image, and a Linear behind a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.depth = nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.middle, self.down = nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        image = self.norm2(x.transpose(1, 2).unflatten(2, (D, D)))
        y = self.down(self.middle(self.depth(self.up(image).relu())).relu())
        return x + y.flatten(2).transpose(1, 2)


def modules(model: nn.Module, x: Tensor, role: str) -> list[str]:
    table = peftc.sites(model, sample={"x": x})
    return [site.module for site in table.sites if site.path.endswith(f".{role}")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_stages_of_convolutions_are_layers() -> None:
    x = torch.randn(2, D, 4, 4)
    ups = [f"stages.0.blocks.{i}.up" for i in range(2)] + [f"stages.1.blocks.{i}.mlp.up" for i in range(2)]
    assert modules(Pyramid(), x, "ffn.up") == ups


def test_the_elements_of_sequentials_in_a_loop_are_layers() -> None:
    """Each Sequential was one layer, with all sub-layers of its blocks."""
    sites = peftc.sites(Split(), sample={"x": torch.randn(2, D, 4, 4)}).sites
    assert [s.module for s in sites if s.steps[-1][0] == "layer"] == [f"m.{i}.{j}" for i in (0, 1) for j in (0, 1)]


def test_a_network_behind_an_attention_that_no_stream_carries() -> None:
    model, x = Layers(Inside(), Inside()).double(), torch.randn(2, T, D).double()
    assert modules(model, x, "ffn.norm") == ["layers.0.norm2", "layers.1.norm2"]
    assert modules(model, x, "attn.self.norm") == ["layers.0.norm1", "layers.1.norm1"]
    assert modules(model, x, "ffn.up") == ["layers.0.mlp.up", "layers.1.mlp.up"]
    for part in ("attn", "mlp"):
        reference, edited = copy.deepcopy(model), copy.deepcopy(model)
        for layer in reference.layers:
            layer.get_submodule(part).register_forward_hook(lambda module, args, out: 3 * out)
        place = "attn" if part == "attn" else "ffn"
        peftc.compile(f"peft 1\nedit e at layer[*].{place} {{ h *= vector(init=3) }}", edited, sample={"x": x})
        assert torch.allclose(edited(x=x), reference(x=x), rtol=0, atol=1e-12)


def test_keys_of_patches_are_convolutions() -> None:
    model, x = Layers(Patches(), Patches()).double().eval(), torch.randn(2, D, 4, 4).double()
    assert modules(model, x, "attn.self.k") == ["layers.0.k", "layers.1.k"]
    assert modules(model, x, "attn.self.norm") == ["layers.0.norm", "layers.1.norm"]  # not of keys alone
    reference = copy.deepcopy(model)
    edits = [f"edit {role} at layer[*].attn.{role} {{ h *= vector(init=3) }}" for role in "kv"]
    peftc.compile("\n".join(["peft 1", *edits]), model, sample={"x": x})
    for layer in reference.layers:
        for conv in (layer.k, layer.v):
            conv.register_forward_hook(lambda module, args, out: 3 * out)
    assert torch.allclose(model(x=x), reference(x=x), rtol=0, atol=1e-12)


def test_a_network_reads_the_stream_where_its_first_linear_does() -> None:
    """`x` has its features where `up` reads them, not where the norm before it has its own."""
    model, x = Layers(Deep(), Deep()).double(), torch.randn(2, D * D, D).double()
    assert modules(model, x, "ffn.up") == ["layers.0.up", "layers.1.up"]
    assert modules(model, x, "ffn.down") == ["layers.0.down", "layers.1.down"]
    reference = copy.deepcopy(model)
    peftc.compile("peft 1\nedit e at layer[*].ffn { h += lora(x, r=2) }", model, sample={"x": x}, seed=0)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    parameters = iter(peftc.parameters(model).values())
    for layer, pair in zip(reference.layers, zip(parameters, parameters, strict=True), strict=True):
        down, up = sorted(pair, key=len)  # (r, d) and (d, r)
        read: list[Tensor] = []
        layer.up.register_forward_hook(lambda module, args, out, read=read: read.append(args[0].movedim(1, -1)))
        layer.down.register_forward_hook(
            lambda module, args, out, read=read, down=down, up=up: out + (read[-1] @ down.T @ up.T).movedim(-1, 1)
        )
    assert torch.allclose(model(x=x), reference(x=x), rtol=0, atol=1e-10)
