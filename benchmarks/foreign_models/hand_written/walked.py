"""Layers in lists that the model's own forward walks, and layers called in odd ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def heads_of(x: Tensor, heads: int) -> Tensor:
    b, n, d = x.shape
    return x.view(b, n, heads, d // heads).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        context = x if context is None else context
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (heads_of(t, self.heads) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(x.shape))


def FeedForward(dim: int, mult: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(dim), nn.Linear(dim, dim * mult), nn.GELU(), nn.Dropout(0.0), nn.Linear(dim * mult, dim)
    )


def attn_roles(at: str, kind: str = "self") -> dict[str, str]:
    return {
        f"attn.{kind}.q": f"{at}.to_q.weight",
        f"attn.{kind}.k": f"{at}.to_kv.weight[0:16]",
        f"attn.{kind}.v": f"{at}.to_kv.weight[16:32]",
        f"attn.{kind}.o": f"{at}.to_out.weight",
        f"attn.{kind}.norm": f"{at}.norm.weight",
    }


def ffn_roles(at: str, norm: int | str = 0, up: int | str = 1, down: int | str = 4) -> dict[str, str]:
    return {
        "ffn.up": f"{at}.{up}.weight",
        "ffn.down": f"{at}.{down}.weight",
        "ffn.norm": f"{at}.{norm}.weight",
    }


# ModuleList([ModuleList([attn, ff]), …]), walked by the model.
class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(2):
            self.layers.append(nn.ModuleList([Attention(16), FeedForward(16)]))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


# The same with a cross attention, and None where a layer has none.
class Triples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([])
        for n in range(4):
            cross = Attention(16) if n % 2 else None
            self.layers.append(nn.ModuleList([Attention(16), cross, FeedForward(16)]))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for attn, cross, ff in self.layers:
            x = x + attn(x)
            if cross is not None:
                x = x + cross(x, context=context)
            x = x + ff(x)
        return x


# Lists side by side, zipped.
class SideBySide(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(16) for _ in range(depth))
        self.feed_forwards = nn.ModuleList(FeedForward(16) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed_forward in zip(self.attentions, self.feed_forwards):
            x = x + attention(x)
            x = x + feed_forward(x)
        return x


# Lists side by side by number, norms too; layers whose code is in the model.
class Numbered(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.depth = depth
        self.qkv = nn.ModuleList([nn.Linear(16, 48) for _ in range(depth)])
        self.proj = nn.ModuleList([nn.Linear(16, 16) for _ in range(depth)])
        self.fc1 = nn.ModuleList([nn.Linear(16, 40) for _ in range(depth)])
        self.fc2 = nn.ModuleList([nn.Linear(40, 16) for _ in range(depth)])
        self.norm1 = nn.ModuleList([nn.LayerNorm(16) for _ in range(depth)])
        self.norm2 = nn.ModuleList([nn.LayerNorm(16) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            h = self.norm1[i](x)
            b, n, d = h.shape
            q, k, v = self.qkv[i](h).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
            a = (q @ k.transpose(-1, -2) * (d // 2) ** -0.5).softmax(-1) @ v
            x = x + self.proj[i](a.transpose(1, 2).reshape(b, n, d))
            x = x + self.fc2[i](F.silu(self.fc1[i](self.norm2[i](x))))
        return x


NUMBERED = {
    "attn.q": "qkv.{i}.weight[0:16]",
    "attn.k": "qkv.{i}.weight[16:32]",
    "attn.v": "qkv.{i}.weight[32:48]",
    "attn.o": "proj.{i}.weight",
    "attn.norm": "norm1.{i}.weight",
    "ffn.up": "fc1.{i}.weight",
    "ffn.down": "fc2.{i}.weight",
    "ffn.norm": "norm2.{i}.weight",
}


# Blocks in chunks; padding before a chunk is nn.Identity (dinov2).
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(16)
        self.mlp = FeedForward(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Chunk(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Chunked(nn.Module):
    def __init__(self, chunks: int = 2, size: int = 2) -> None:
        super().__init__()
        lists = [[nn.Identity()] * (n * size) + [Block() for _ in range(size)] for n in range(chunks)]
        self.blocks = nn.ModuleList([Chunk(one) for one in lists])

    def forward(self, x: Tensor) -> Tensor:
        for chunk in self.blocks:
            x = chunk(x)
        return x


# An nn.Sequential with named children (torchvision's vision transformer).
class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for i in range(2):
            self.layers.add_module(f"encoder_layer_{i}", Block())
        self.ln = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(x))


# Layers that are attributes with numbers, called by `.forward`, and through a lambda.
class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()
        self.block2 = Block()
        self.block3 = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1.forward(x)
        run = lambda module, value: module(value)  # noqa: E731
        x = run(self.block2, x)
        return getattr(self, f"block{3}")(x)


# A ModuleDict, walked by items, with None in a list beside it and a reduce at the end.
class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({name: Block() for name in ("early", "middle", "late")})
        self.downsample = nn.ModuleList([None, nn.Linear(16, 16), None])

    def forward(self, x: Tensor) -> Tensor:
        for (_, stage), down in zip(self.stages.items(), self.downsample):
            if down is not None:
                x = down(x)
            x = stage(x)
        return x


# PreNorm and Residual wrappers, functions for layers.
class PreNorm(nn.Module):
    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.fn(self.norm(x), **kwargs)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.fn(x, **kwargs) + x


class Multi(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(lambda t: heads_of(t, 2), self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        feed_forward = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))  # noqa: E731
        layers = []
        for _ in range(2):
            layers += [Residual(PreNorm(16, Multi(16))), Residual(PreNorm(16, feed_forward()))]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# Here the layers are of one sub-layer each, and alternate.
WRAPPED = (
    Stack(
        (0, 2),
        {
            "attn.q": "net.{i}.fn.fn.to_qkv.weight[0:16]",
            "attn.k": "net.{i}.fn.fn.to_qkv.weight[16:32]",
            "attn.v": "net.{i}.fn.fn.to_qkv.weight[32:48]",
            "attn.o": "net.{i}.fn.fn.to_out.0.weight",
            "attn.norm": "net.{i}.fn.norm.weight",
        },
    ),
    Stack((1, 3), ffn_roles("net.{i}.fn", norm="norm", up="fn.0", down="fn.2")),
)


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def with_context() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16), "context": torch.randn(2, 7, 16)}


def blocks(at: str, layers: tuple[str | int, ...]) -> Stack:
    return Stack(layers, attn_roles(f"{at}.attn") | ffn_roles(f"{at}.mlp"))


def case(name: str, build: Any, inputs: Any, *stacks: Stack) -> Case:
    return Case(f"hand-written/{name}", "hand-written", build, inputs, stacks)


PAIRS = Stack((0, 1), attn_roles("layers.{i}.0") | ffn_roles("layers.{i}.1"))
TRIPLES = (
    Stack((0, 2), attn_roles("layers.{i}.0") | ffn_roles("layers.{i}.2")),
    Stack((1, 3), attn_roles("layers.{i}.0") | attn_roles("layers.{i}.1", "cross") | ffn_roles("layers.{i}.2")),
)
CASES = (
    case("pairs", Pairs, tokens, PAIRS),
    case("triples_with_none", Triples, with_context, *TRIPLES),
    case(
        "lists_side_by_side",
        SideBySide,
        tokens,
        Stack((0, 1, 2), attn_roles("attentions.{i}") | ffn_roles("feed_forwards.{i}")),
    ),
    case("lists_by_number", Numbered, tokens, Stack((0, 1), NUMBERED)),
    case("chunked", Chunked, tokens, blocks("blocks.{i}", ("0.0", "0.1", "1.2", "1.3"))),
    case("named_children", Named, tokens, blocks("layers.encoder_layer_{i}", (0, 1))),
    case("attributes", Attributes, tokens, blocks("block{i}", (1, 2, 3))),
    case("module_dict", Keyed, tokens, blocks("stages.{i}", ("early", "middle", "late"))),
    case("prenorm_wrappers", Wrapped, tokens, *WRAPPED),
)
