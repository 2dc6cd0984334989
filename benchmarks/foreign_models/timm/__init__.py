"""timm: models of its registry and of its classes, and the roles that many of its blocks have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import Roles, attention, ffn, packed


def created(name: str, size: int | None = 32, **arguments: Any) -> Callable[[], nn.Module]:
    """A model of the registry with other arguments."""

    def build() -> nn.Module:
        import timm

        known = {} if size is None else {"img_size": size}
        return timm.create_model(name, pretrained=False, num_classes=5, **known, **arguments)

    return build


def from_class(module: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    """A model of a class whose registry entries fix its sizes."""

    def build() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"timm.models.{module}"), name)(num_classes=5, **arguments)

    return build


def mlp(at: str, norm: str = "norm2") -> Roles:
    return ffn(f"{at}.mlp.fc1", f"{at}.mlp.fc2", f"{at}.{norm}")


def block(at: str, width: int, attn: str = "attn", norms: tuple[str, str] = ("norm1", "norm2")) -> Roles:
    """`norm1`, `attn.qkv` with q, k, v in this order, `attn.proj`, `norm2` and `mlp`."""
    first, second = (f"{at}.{norm}" for norm in norms)
    table = packed(f"{at}.{attn}.qkv", width, o=f"{at}.{attn}.proj", norm=first)
    return table | ffn(f"{at}.mlp.fc1", f"{at}.mlp.fc2", second)


def gated(at: str, attn: str, mlp: str) -> dict[str, str | None]:
    """The modules behind a scale (LayerScale, gamma), whose outputs enter the sums."""
    return {"attn.h": f"{at}.{attn}", "ffn.h": f"{at}.{mlp}"}


def class_attention(at: str, norm: str = "norm1") -> Roles:
    """A query of the class token, keys and values of all."""
    return attention(
        norm=f"{at}.{norm}", **{r: f"{at}.attn.{n}" for r, n in zip("qkvo", ("q", "k", "v", "proj"), strict=True)}
    )


def stages(
    roles: Callable[[str, int], Roles], at: str, widths: dict[str, int], v_bias: str = "", **states: str
) -> tuple[Stack, ...]:
    """Stages whose widths differ: one table each."""
    named = {name.replace("_", "."): text for name, text in states.items()}
    return tuple(
        Stack(
            (layer,),
            roles(at.replace("{i}", layer), width),
            {name: text.replace("{at}", at) for name, text in named.items()},
            biases={"attn.v": f"{at}.{v_bias}"} if v_bias else {},
        )
        for layer, width in widths.items()
    )


VIT: dict[str, Any] = {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}
BLOCKS = Stack((0, 1), block("blocks.{i}", 16))
