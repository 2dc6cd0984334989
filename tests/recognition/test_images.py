"""Layers over images, whose features may be in the second dimension: their sub-layers, and edits
in them that are compared with a hook.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D, SIDE = 8, 8  # equal, so that no shape tells where the features are


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class PermutedConvolutions(nn.Module):
    """ConvNeXt: modules that only permute, around a norm and Linears over the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        mixing = nn.Conv2d(D, D, 3, padding=1, groups=D)
        inner = nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D)
        self.block = nn.Sequential(mixing, Permute(0, 2, 3, 1), *inner, Permute(0, 3, 1, 2))
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x)) + x


class Pooling(nn.Module):
    """PoolFormer: tokens are mixed without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, D), nn.GroupNorm(1, D)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1)
        self.up, self.down = nn.Conv2d(D, 16, 1), nn.Conv2d(16, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + (self.pool(y) - y)
        return x + self.down(self.up(self.norm2(x)).relu())


class Flattened(nn.Module):
    """RT-DETR's AIFI: an image comes in and goes out, tokens are inside, and nothing convolves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.proj((q @ k.transpose(1, 2)).softmax(-1) @ v)
        x = x + self.down(self.up(x).relu())
        return x.transpose(1, 2).view(shape)


class FlatMixer(nn.Module):
    """MLP-Mixer over an image, which each sub-layer flattens: over tokens, then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.tokens = nn.Sequential(nn.Linear(SIDE * SIDE, 16), nn.GELU(), nn.Linear(16, SIDE * SIDE))
        self.features = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x.flatten(2).transpose(1, 2)).transpose(1, 2)).view(x.shape)
        return x + self.features(self.norm2(x.flatten(2).transpose(1, 2))).transpose(1, 2).view(x.shape)


def image() -> dict[str, Tensor]:
    return {"x": torch.randn(2, D, SIDE, SIDE)}


def test_modules_that_only_permute_tell_where_features_are() -> None:
    model, inputs = Layers(PermutedConvolutions(), PermutedConvolutions()).eval(), image()
    spec = "peft 1  edit e at layer[*].ffn { h += linear(x, bias=false) }"
    peftc.compile(spec, model, seed=0, sample=inputs)
    weights = list(peftc.parameters(model).values())
    for weight in weights:
        nn.init.normal_(weight)
    edited = model(**inputs)
    peftc.remove(model)
    for layer, weight in zip(model.layers, weights, strict=True):
        add_linear(layer, weight)
    torch.testing.assert_close(edited, model(**inputs))


def add_linear(layer: nn.Module, weight: Tensor) -> None:
    seen: list[Tensor] = []
    layer.block[3].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer.last.register_forward_hook(lambda _, args, h: h + (seen[-1] @ weight.T).permute(0, 3, 1, 2))


@pytest.mark.parametrize("state", ["x", "h"])
def test_a_layer_that_reads_and_returns_an_image_of_tokens(state: str) -> None:
    """An edit at the layer itself is over the features of the image, not over its width."""
    model, inputs = Layers(Flattened(), Flattened()).double().eval(), {"x": torch.randn(2, D, SIDE, 4).double()}
    spec = f"peft 1  edit e at layer[*] {{ h += linear({state}, bias=false) }}"
    peftc.compile(spec, model, seed=0, sample=inputs)
    weights = [nn.init.normal_(weight) for weight in peftc.parameters(model).values()]
    edited = model(**inputs)
    peftc.remove(model)
    for layer, weight in zip(model.layers, weights, strict=True):
        layer.register_forward_hook(
            lambda _, args, h, w=weight: h + torch.einsum("bchw, dc -> bdhw", args[0] if state == "x" else h, w)
        )
    torch.testing.assert_close(edited, model(**inputs))


def test_pooling_is_a_mixer() -> None:
    table = peftc.sites(Layers(Pooling(), Pooling()), sample=image())
    paths = {site.path.partition(".layer[0].")[2]: site.module for site in table.sites if "layer[0]." in site.path}
    assert paths["mixer.norm"] == "layers.0.norm1"
    assert paths["ffn.norm"] == "layers.0.norm2"
    assert {path for path in paths if "." not in path} == {"mixer", "ffn"}


def test_what_mixes_the_places_of_a_flattened_image_is_a_mixer() -> None:
    table = peftc.sites(Layers(FlatMixer(), FlatMixer()), sample=image())
    paths = {site.path.partition(".layer[0].")[2]: site.module for site in table.sites if "layer[0]." in site.path}
    roles = {"mixer.norm": "norm1", "ffn.up": "features.0", "ffn.down": "features.2", "ffn.norm": "norm2"}
    assert {path: paths.get(path) for path in roles} == {path: f"layers.0.{name}" for path, name in roles.items()}


class SpatialMlp(nn.Module):
    """Swin MLP: places of a window are mixed in groups of features, also over the border."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.spatial, self.up, self.down = nn.Conv1d(8, 8, 1, groups=2), nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        y = self.norm1(x).view(b, 4, 4, d)
        y = nn.functional.pad(y, [0, 0, 1, 1, 1, 1]) if self.shift else y
        side = y.shape[1]
        windows = y.view(b, side // 2, 2, side // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2, d // 2)
        mixed = self.spatial(windows.transpose(1, 2).reshape(-1, 8, d // 2)).view(-1, 2, 4, d // 2)
        y = mixed.transpose(1, 2).reshape(b, side // 2, side // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, side, side, d)
        y = y[:, 1:-1, 1:-1] if self.shift else y
        x = x + y.reshape(b, n, d)
        return x + self.down(self.up(self.norm2(x)).relu())


def test_a_convolution_in_groups_over_the_places_of_windows_is_a_mixer() -> None:
    model = nn.Sequential(SpatialMlp(0), SpatialMlp(1))
    paths = {s.path.partition("].")[2] for s in peftc.sites(model, sample={"input": torch.randn(2, 16, D)}).sites}
    assert {path for path in paths if "." not in path} == {"", "mixer", "ffn"}


class Sliced(nn.Module):
    """Guided diffusion: code calls a slice of a Sequential, and takes views of projections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.GroupNorm(1, D), nn.SiLU(), nn.Conv1d(D, D, 3, padding=1))
        self.norm, self.qkv, self.o = nn.GroupNorm(1, D), nn.Conv1d(D, 3 * D, 1), nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.layers[0], self.layers[1:]
        x = x + rest(first(x))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (part.reshape(2 * x.shape[0], D // 2, x.shape[2]) for part in (q, k, v))
        out = torch.einsum("bqk,bck->bcq", torch.einsum("bcq,bck->bqk", q, k).softmax(-1), v)
        return x + self.o(out.reshape(x.shape))


class ViewOfProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv1d(D, D, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2 * x.shape[0], D // 2, x.shape[2]) for f in (self.q, self.k, self.v))
        out = torch.einsum("bqk,bck->bcq", torch.einsum("bcq,bck->bqk", q, k).softmax(-1), v)
        return x + self.o(out.reshape(x.shape))


class Doubling(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class SlicedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(D), Doubling(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn[1:](self.ffn[:1](self.norm(x)))


def test_a_slice_runs_the_code_of_its_class() -> None:
    model, x = Layers(SlicedTwice(), SlicedTwice()), torch.randn(2, 5, D)
    base = model(x)
    peftc.compile("peft 1  edit e at layer[*].ffn { h += lora(res, r=2) }", model, seed=0, sample={"x": x})
    assert torch.equal(model(x), base)


@pytest.mark.parametrize("layer", [Sliced, ViewOfProjection])
def test_projections_that_are_convolutions_keep_their_layout(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Layers(layer(), layer()).double(), torch.randn(2, D, 5, dtype=torch.float64)
    peftc.compile("peft 1  edit e at layer[*].attn.{q, v} { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    out = model(x)
    peftc.fold(model)
    torch.testing.assert_close(model(x), out, rtol=0, atol=1e-10)
