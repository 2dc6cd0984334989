"""Blocks of an attention and a feed-forward part, and what calls several of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.styles.attentions import D, functional

Parts = tuple[nn.Module, nn.Module]  # an attention and a network


class Block(nn.Module):
    """`attn` and `ffn`: the names of both parts in the block."""

    attn_name, ffn_name = "attn", "ffn"

    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attn, self.ffn, self.norm1, self.norm2 = attn, ffn, nn.LayerNorm(D), nn.RMSNorm(D)


class PreNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class InPlaceSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.norm1(x))
        y += x
        return self.ffn(self.norm2(y)).add_(y)


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x * 1.5 + self.attn(x))
        return self.norm2(x * 1.5 + self.ffn(x))


class SandwichNorm(Block):
    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(attn, ffn)
        self.post1, self.post2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post1(self.attn(self.norm1(x)))
        return x + self.post2(self.ffn(self.norm2(x)))


class ParallelParts(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y) + self.ffn(y)


class LayerScale(Block):
    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(attn, ffn)
        self.scale1, self.scale2 = (nn.Parameter(torch.rand(D) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x))
        return torch.addcmul(x, self.scale2, self.ffn(self.norm2(x)))


class Highway(Block):
    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(attn, ffn)
        self.gate1, self.gate2 = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate1(x))
        x = gate * x + (1 - gate) * self.attn(self.norm1(x))
        gate = torch.sigmoid(self.gate2(x))
        return x * gate + self.ffn(self.norm2(x)) * (1 - gate)


class AdaptiveNorm(Block):
    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(attn, ffn)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(x.mean(1, keepdim=True)).chunk(6, -1)
        x = x + c * self.attn(self.norm1(x) * (1 + a) + b)
        return x + f * self.ffn(self.norm2(x) * (1 + d) + e)


class Closures(Block):
    def forward(self, x: Tensor) -> Tensor:
        def step(part: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
            return x + part(norm(x))

        for function in (partial(step, self.attn, self.norm1), lambda y: y + self.ffn(self.norm2(y))):
            x = function(x)
        return x


class Lerp(Block):
    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(attn, ffn)
        self.step = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.attn(self.norm1(x))) / 2**0.5
        return x.lerp(self.ffn(self.norm2(x)), self.step)


class WindowAttention(Block):
    """Three tokens attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, d = x.shape
        padded = functional.pad(self.norm1(x), (0, 0, 0, -tokens % 3))
        y = self.attn(padded.reshape(-1, 3, d)).view(batch, -1, d)[:, :tokens]
        x = x + y
        return x + self.ffn(self.norm2(x))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x)) + x


class ResidualSequence(nn.Sequential):
    attn_name, ffn_name = "0.fn", "1.fn"

    def __init__(self, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__(Residual(attn), Residual(ffn))


class Model(nn.Module):
    """`names`: those of the parts of layer `{i}`; `layers`: what `{i}` stands for."""

    names: tuple[str, str]
    layers: tuple[str | int, ...]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, D), nn.LayerNorm(D), nn.Linear(D, 5)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.first(x))))


class Loop(Model):
    def __init__(self, parts: list[Parts], block: type[nn.Module]) -> None:
        super().__init__()
        self.names = f"blocks.{{i}}.{block.attn_name}", f"blocks.{{i}}.{block.ffn_name}"
        self.layers = tuple(range(len(parts)))
        self.blocks: nn.ModuleList | nn.Sequential = nn.ModuleList(block(*pair) for pair in parts)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


class InSequence(Loop):
    def __init__(self, parts: list[Parts], block: type[nn.Module]) -> None:
        super().__init__(parts, block)
        self.blocks = nn.Sequential(*self.blocks)

    def body(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Groups(Model):
    def __init__(self, parts: list[Parts], block: type[nn.Module]) -> None:
        super().__init__()
        self.names = f"groups.{{i}}.{block.attn_name}", f"groups.{{i}}.{block.ffn_name}"
        self.layers = tuple(f"{i // 2}.{i % 2}" for i in range(len(parts)))
        blocks = [block(*pair) for pair in parts]
        self.groups = nn.ModuleList(nn.ModuleList(blocks[i : i + 2]) for i in range(0, len(blocks), 2))

    def body(self, x: Tensor) -> Tensor:
        for group in self.groups:
            for block in group:
                x = block(x)
        return x


class Pairs(Model):
    """The model's own forward adds what the parts of each pair compute."""

    def __init__(self, parts: list[Parts], block: type[nn.Module]) -> None:
        super().__init__()
        self.names, self.layers = ("pairs.{i}.0", "pairs.{i}.2"), tuple(range(len(parts)))
        pairs = ([attn, nn.LayerNorm(D), ffn, nn.LayerNorm(D)] for attn, ffn in parts)
        self.pairs = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def body(self, x: Tensor) -> Tensor:
        for attn, norm1, ffn, norm2 in self.pairs:
            x = attn(norm1(x)) + x
            x = ffn(norm2(x)) + x
        return x


class Lists(Model):
    def __init__(self, parts: list[Parts], block: type[nn.Module]) -> None:
        super().__init__()
        self.names, self.layers = ("attentions.{i}", "networks.{i}"), tuple(range(len(parts)))
        self.attentions, self.networks = map(nn.ModuleList, zip(*parts, strict=True))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2 * len(parts)))

    def body(self, x: Tensor) -> Tensor:
        for i, (attn, ffn) in enumerate(zip(self.attentions, self.networks, strict=True)):
            x = x + attn(self.norms[2 * i](x))
            x = x + ffn(self.norms[2 * i + 1](x))
        return x


_BLOCKS = (
    PreNorm,
    InPlaceSum,
    PostNorm,
    SandwichNorm,
    ParallelParts,
    LayerScale,
    Highway,
    AdaptiveNorm,
    Closures,
    Lerp,
    WindowAttention,
)
BLOCKS: tuple[type[nn.Module], ...] = (*_BLOCKS, ResidualSequence)
MODELS: tuple[Callable[..., Model], ...] = (Loop, Loop, InSequence, Groups, Pairs, Lists)
