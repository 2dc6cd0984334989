"""Residual streams that change their layout, or begin anew, inside of a layer: states of sub-layers
are compared with hooks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D, SIDE = 8, 4
SPEC = """peft 1
edit a at layer[*].attn { h += linear(h, bias=false) }
edit f at layer[*].ffn { h += linear(x, bias=false) }
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Block(nn.Module):
    sizes: tuple[int, ...] = 2, D, SIDE, SIDE

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))


class Transposed(Block):
    """DaViT: an image between the layers and its sub-layers, which add to flat tokens."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        y = y + self.attn(self.norm1(y))
        y = y.transpose(1, 2).view(b, c, h, w).flatten(2).transpose(1, 2)
        y = y + self.mlp(self.norm2(y))
        return y.transpose(1, 2).view(b, c, h, w)


class Windows(Block):
    """MaxViT of torchvision: both sub-layers add to windows."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 4, c)
        torch._assert(y.shape[1] % 2 == 0, "an odd number of windows")
        y = y + self.attn(self.norm1(y))
        y = y + self.mlp(self.norm2(y))
        return y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


class Frames(Block):
    """Stable Video Diffusion: both sub-layers are of the frames at one place."""

    sizes = 2 * 3, SIDE, D  # two videos of three frames

    def forward(self, x: Tensor) -> Tensor:
        frames, places, width = x.shape
        y = x[None, :].reshape(frames // 3, 3, places, width).permute(0, 2, 1, 3).reshape(-1, 3, width)
        y = y + self.mlp(self.norm2(y))
        y = y + self.attn(self.norm1(y))
        return y[None, :].reshape(-1, places, 3, width).permute(0, 2, 1, 3).reshape(frames, places, width)


class Strided(Block):
    """The convolutions of MaxViT: attention is added to what replaces the layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.short(x) + self.long(x)).permute(0, 2, 3, 1).flatten(1, 2)
        y = y + self.attn(self.norm1(y))
        y = y + self.mlp(self.norm2(y))
        return y.transpose(1, 2).view(x.shape)


class ProjectedResidual(Block):
    """Hiera: neither operand of the first sum is the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x.flatten(2).transpose(1, 2))
        y = self.short(y) + self.attn(y)
        y = y + self.mlp(self.norm2(y))
        return y.transpose(1, 2).view(x.shape)


class ClassToken(Block):
    """XCiT: the feed-forward part reads one token, and the others are put beside its result."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.attn(self.norm1(y))
        y = self.norm2(y)
        y = y + torch.cat([self.mlp(y[:, :1]), y[:, 1:]], dim=1)
        return y.transpose(1, 2).view(x.shape)


class Unflattened(Block):
    """CoAtNet: the stream is an image, which each sub-layer flattens and transposes for itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x.flatten(2).transpose(1, 2))).transpose(1, 2).view(x.shape)
        return x + self.mlp(self.norm2(x.flatten(2).transpose(1, 2))).transpose(1, 2).view(x.shape)


class ChannelsFirst(Block):
    """Tokens (batch, d, tokens), with a norm and Linears behind a transpose in each sub-layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2) if x.ndim > 3 else x
        y = y + self.attn(self.norm1(y.transpose(1, 2))).transpose(1, 2)
        y = y + self.mlp(self.norm2(y.transpose(1, 2))).transpose(1, 2)
        return y.view(x.shape)


class ChannelsFirstTokens(ChannelsFirst):
    sizes = 2, D, SIDE


class SharedStreams(nn.Module):
    """CogView 4: one feed-forward part for two streams; and a norm of one of them for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.mix = nn.Linear(D, 16), nn.Linear(16, D), nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(self.up(self.norm1(x)).relu())
        y = y + self.down(self.up(self.norm2(y)).relu())
        return x, y + self.mix(self.norm3(x))


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharedStreams() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, y = layer(x, y)
        return x + y


def test_hidden_features_of_two_streams() -> None:
    """`hidden` is what `down` reads, in each of its calls."""
    torch.manual_seed(0)
    model, inputs = TwoStreams().double().eval(), {n: torch.randn(2, 5, D).double() for n in "xy"}
    peftc.compile("peft 1  edit e at layer[*].ffn.hidden { h *= vector(init=1) }", model, seed=0, sample=inputs)
    factors = list(peftc.parameters(model).values())
    for factor in factors:
        nn.init.normal_(factor)
    edited = model(**inputs)
    peftc.remove(model)
    for layer, factor in zip(model.layers, factors, strict=True):
        layer.down.register_forward_pre_hook(lambda _, args, by=factor: (args[0] * by.detach(),))
    torch.testing.assert_close(edited, model(**inputs), rtol=0, atol=1e-10)


def test_a_sum_that_is_returned_has_no_norm_behind_it() -> None:
    """TNT: the norm belongs to what is added to the other stream."""
    inputs = {n: torch.randn(2, 5, D) for n in "xy"}
    sites = {s.path: s.module for s in peftc.sites(TwoStreams(), sample=inputs).sites if s.path.endswith("norm")}
    own = {path.partition("layer[0].")[2]: module for path, module in sites.items() if "layer[0]" in path}
    assert own == {"ffn[0].norm": "layers.0.norm1", "ffn[1].norm": "layers.0.norm2"}


@pytest.mark.parametrize(
    "layer",
    [
        *(ClassToken, Transposed, Windows, Frames, Strided, ProjectedResidual),
        *(Unflattened, ChannelsFirst, ChannelsFirstTokens),
    ],
)
def test_states_are_those_of_modules(layer: type[Block]) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(layer(), layer()).double().eval(), {"x": torch.randn(layer.sizes).double()}
    peftc.compile(SPEC, model, seed=0, sample=inputs)
    parameters = list(peftc.parameters(model).items())
    for _, parameter in parameters:
        nn.init.normal_(parameter, std=0.3)
    edited = model(**inputs)
    peftc.remove(model)
    weights = {name: p.detach() for name, p in parameters}
    for i, block in enumerate(model.layers):
        attn, ffn = (next(w for name, w in weights.items() if f"layer[{i}].{at}" in name) for at in ("attn", "ffn"))
        block.attn.register_forward_hook(lambda _, args, h, w=attn: h + h @ w.T)
        block.mlp.register_forward_hook(lambda _, args, h, w=ffn: h + args[0] @ w.T)
    torch.testing.assert_close(edited, model(**inputs), rtol=0, atol=1e-10)
