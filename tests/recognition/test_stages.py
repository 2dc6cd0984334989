"""Hierarchical models: layers inside lists of stages; and layers on images, whose features are
dimension 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.forms.shapes import Tokens
from tests.layers import Layers, Network

D = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.o(scores.softmax(-1) @ self.v(x))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Layer(nn.Module):
    """`ffns` in a ModuleList do not make it a stage."""

    def __init__(self, ffns: int) -> None:
        super().__init__()
        self.attention, self.ffns = Attention(), nn.ModuleList([Ffn() for _ in range(ffns)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        for ffn in self.ffns:
            x = ffn(x)
        return x


class Stage(nn.Module):
    """Layers after a downsampling: there is no residual sum with the stage's input."""

    def __init__(self, halved: bool) -> None:
        super().__init__()
        self.halve = nn.Linear(2 * D, D) if halved else None
        self.blocks = nn.ModuleList([Layer(2), Layer(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.halve is None else self.halve(x.unflatten(1, (-1, 2)).flatten(2))
        for block in self.blocks:
            x = block(x)
        return x


class Convolutional(nn.Module):
    """A convolutional block with an image as residual stream; without one if `bare`."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.bare = bare
        self.conv, self.norm = nn.Conv2d(D, D, 3, padding=1), nn.BatchNorm2d(D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu()
        return y if self.bare else x + y


class Separable(nn.Module):
    """Spatial mixing, then feature mixing, in one branch; the Linears see channels-last images."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + self.down(self.up(y).relu()).permute(0, 3, 1, 2)


class MovingNorm(nn.LayerNorm):
    """A norm for channels-first images."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = MovingNorm(D), nn.Conv2d(D, D, 3, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


def paths(model: nn.Module, sample: dict[str, Tensor], last: str) -> list[tuple[str, str]]:
    return [(s.path, s.module) for s in peftc.sites(model, sample=sample).sites if s.steps[-1][0] == last]


def test_the_layers_of_a_pyramid_are_in_its_stages() -> None:
    model = Layers(Stage(False), Stage(True))
    layers = paths(model, {"x": torch.randn(2, 4, D)}, "layer")
    blocks = [f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
    assert layers == [(f"encoder.layer[{i}]", name) for i, name in enumerate(blocks)]


def test_a_list_of_feed_forward_networks_is_no_stage() -> None:
    layers = paths(Layers(Layer(2), Layer(2)), {"x": torch.randn(2, 4, D)}, "layer")
    assert [module for _, module in layers] == ["layers.0", "layers.1"]


@pytest.mark.parametrize("bare", [False, True])
def test_convolutional_blocks_are_layers_in_models_without_others(bare: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, D, 3, 5)
    model = Layers(Convolutional(bare), Convolutional(bare)).eval()
    before = model(x)
    peftc.compile("peft 1\nedit e at layer[*] { h *= vector(init=1) }", model, sample={"x": x})
    assert torch.equal(model(x), before)
    scale = torch.rand(D)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.copy_(scale)
    edited = model(x)
    peftc.remove(model)
    for layer in model.layers:
        x = layer(x) * scale.view(1, D, 1, 1)
    assert torch.equal(edited, x)


def test_images_are_edited_as_tokens() -> None:
    """x is (batch, height, width, d), which the Linears read; h is (batch, d, height, width), which
    is added.
    """
    torch.manual_seed(0)
    x = torch.randn(2, D, 3, 5)
    model = Layers(Separable(), Separable()).eval()
    assert [p for p, _ in paths(model, {"x": x}, "ffn")] == [f"encoder.layer[{i}].ffn" for i in (0, 1)]
    assert [p for p, _ in paths(model, {"x": x}, "mixer")] == [f"encoder.layer[{i}].mixer" for i in (0, 1)]
    before = model(x)
    peftc.compile("peft 1\nedit f at layer[0].ffn { h += lora(x, r=2) }", model, sample={"x": x}, seed=0)
    assert torch.equal(model(x), before)
    with torch.no_grad():
        a, b = (p.normal_() for p in peftc.parameters(model).values())
    first, second = (model.get_submodule(f"layers.{i}") for i in (0, 1))
    edited = model(x)
    peftc.remove(model)
    mixed = first.norm(first.mix(x).permute(0, 2, 3, 1))
    added = (mixed @ a.t() @ b.t()).permute(0, 3, 1, 2)
    torch.testing.assert_close(edited, second(first(x) + added), rtol=1e-4, atol=1e-4)


def test_a_norm_of_channels_first_images() -> None:
    table = peftc.sites(Layers(Normed(), Normed()), sample={"x": torch.randn(2, D, 3, 5)})
    states = {
        (s.path, name): state for s in table.sites for name, state in s.states.items() if state.activation is not None
    }
    assert ("encoder.layer[0].mixer", "x") in states
    assert {(state.shape, state.activation.feature_map) for state in states.values() if state.activation} == {
        (Tokens(D), True)
    }


class StageWithAttention(nn.Module):
    """Blocks, followed by an attention of the stage itself in one of two stages."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(1), Layer(1)])
        self.own = Attention() if own else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.own is None else x + self.own(x)


def test_stages_with_their_own_sub_layer_are_layers() -> None:
    """If the blocks were the layers, the stage's attention would have no site."""
    layers = paths(Layers(StageWithAttention(False), StageWithAttention(True)), {"x": torch.randn(2, 4, D)}, "layer")
    assert [module for _, module in layers] == ["layers.0", "layers.1"]
    layers = paths(Layers(StageWithAttention(False), StageWithAttention(False)), {"x": torch.randn(2, 4, D)}, "layer")
    assert [module for _, module in layers] == [f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]


class Pyramids(nn.Module):
    """Two hierarchical models in one."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.ModuleDict({"stages": nn.ModuleList([Stage(False), Stage(True)])}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x, x
        for near, far in zip(self.near["stages"], self.far["stages"], strict=True):
            one, other = near(one), far(other)
        return one + other


def test_two_pyramids_are_two_stacks() -> None:
    layers = paths(Pyramids(), {"x": torch.randn(2, 4, D)}, "layer")
    places = [(f"stages.{i}.blocks.{j}", 2 * i + j) for i in (0, 1) for j in (0, 1)]
    assert layers == [(f"{name}.layer[{at}]", f"{name}.{block}") for name in ("near", "far") for block, at in places]


class Fusing(nn.Module):
    """CrossViT: each stage has a list of layers, and one of layers that compute the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(1), Layer(1)])
        self.fusion = nn.ModuleList([FirstToken(), FirstToken()])

    def forward(self, x: Tensor) -> Tensor:
        for block, fusion in zip(self.blocks, self.fusion, strict=True):
            x = block(x)
            x = torch.cat((fusion(x), x[:, 1:]), 1)
        return x


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1, ...] + self.attn(x)[:, :1, ...]


def test_two_lists_of_each_stage_are_two_stacks() -> None:
    """With one name, each path named two layers."""
    layers = paths(Layers(Fusing(), Fusing()), {"x": torch.randn(2, 4, D)}, "layer")
    names = [(f"{part}.layer[{2 * i + j}]", f"layers.{i}.{part}.{j}") for i in (0, 1) for j in (0, 1) for part in PARTS]
    assert sorted(layers) == sorted(names)


PARTS = ("blocks", "fusion")


class NoSum(nn.Module):
    """A block without residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_blocks_without_a_residual_stream_are_no_layers() -> None:
    sample = {"x": torch.randn(2, 4, D)}
    assert paths(Layers(NoSum(), NoSum()), sample, "layer") == []
    assert [module for _, module in paths(Layers(Stage(False), NoSum(), NoSum()), sample, "layer")] == [
        "layers.0.blocks.0",
        "layers.0.blocks.1",
    ]


class ConvolutionalStage(nn.Module):
    """GCViT: a mixer of the stage itself, before its blocks, in one of two stages."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1) if mixes else None
        self.blocks = nn.ModuleList([Layer(1), Layer(1)])

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.conv is None else x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("first", [False, True])
def test_a_mixer_beside_listed_layers_leaves_a_stage(first: bool) -> None:
    """Layers of a stage would be one layer, with several attentions."""
    model = Layers(ConvolutionalStage(first), ConvolutionalStage(True))
    layers = paths(model, {"x": torch.randn(2, 4, D)}, "layer")
    assert [module for _, module in layers] == [f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]


class Regions(nn.Module):
    """RegionViT: each layer of a list in the stage calls its attention twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([Attention(), Network(D)]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            attention, network = part.children()
            x = x + attention(x)
            x = x + attention(x)
            x = x + network(x)
        return x


def test_a_stage_whose_loop_calls_a_part_twice_is_no_layer() -> None:
    """The iterations of its loop are: each has a site for each of the calls."""
    table = peftc.sites(Layers(Regions()), sample={"x": torch.randn(2, 4, D)})
    layers = [site.module for site in table.sites if site.steps[-1][0] == "layer"]
    assert layers == ["layers.0.parts.0", "layers.0.parts.1"]
    calls = Counter(site.module for site in table.sites if site.steps[-1][0] == "self")
    assert list(calls.values()) == [2, 2]
    assert not table.untraced


class Partial(nn.Module):
    """FasterNet, InceptionNeXt: some channels are convolved, then comes a network of all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(D // 2, D // 2, 3, padding=1), nn.BatchNorm2d(D)
        self.up, self.down = nn.Conv2d(D, 2 * D, 1), nn.Conv2d(2 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = x.chunk(2, 1)
        y = torch.cat((self.conv(first), rest), 1)
        return x + self.down(self.up(self.norm(y)).relu())


class Gated(nn.Module):
    """MambaOut: one sum, of a convolution of some of the hidden features and of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.conv, self.fc2 = nn.Linear(D, 3 * D), nn.Conv2d(D, D, 3, padding=1, groups=D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, y, z = self.fc1(x).chunk(3, -1)
        z = self.conv(z.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.fc2(gate.relu() * (y + z))


class Halved(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], images: bool, halves: bool) -> None:
        super().__init__()
        self.halve, self.images = nn.Conv2d(D, D, 2, stride=2) if halves else nn.Identity(), images
        self.blocks = nn.Sequential(block(), block(), block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.halve(x)
        return self.blocks(x) if self.images else self.blocks(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pyramid(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(Halved(block, block is Partial, halves) for halves in (False, True)))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)


@pytest.mark.parametrize(("block", "kinds"), [(Partial, {"mixer", "ffn"}), (Gated, {"mixer"})])
def test_equal_blocks_of_a_stage_are_layers_of_one_kind(block: type[nn.Module], kinds: set[str]) -> None:
    """The last of a stage's mixers was its feed-forward part."""
    model, sample = Pyramid(block), {"x": torch.randn(2, D, 16, 16)}
    names = [f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1, 2)]
    assert [module for _, module in paths(model, sample, "layer")] == names
    for kind in ("mixer", "ffn"):
        assert len(paths(model, sample, kind)) == (6 if kind in kinds else 0)
