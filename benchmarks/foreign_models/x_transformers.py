"""x-transformers: one list of sub-layers, [norms, attention or feed-forward, residual].

Read: x_transformers.py (AttentionLayers, Attention, FeedForward, GLU). In `GLU` the first half of
the rows is the value, the second half the gate. `{i}` counts sub-layers: attention, feed-forward, …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, ffn, glu, image, sequence, tokens

SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}


def language_model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import x_transformers

        layers = getattr(x_transformers, name)(**SIZES, **arguments)
        return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)

    return build


def vision_model() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(image_size=32, patch_size=16, num_classes=5, attn_layers=Encoder(**SIZES))


def continuous_model() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(dim_in=16, dim_out=16, max_seq_len=16, attn_layers=Encoder(**SIZES))


def encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    sides = {"num_tokens": 50, "depth": 2, "heads": 2, "max_seq_len": 16, "attn_dim_head": 8}
    return XTransformer(dim=16, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in sides.items()})


def attn(at: str, norms: tuple[str, ...] = ("0.0.gamma",), kind: str = "self") -> Roles:
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out"}
    norm = tuple(f"{at}.{name}!" for name in norms)
    return attention(kind, norm=norm, **{role: f"{at}.1.{name}" for role, name in names.items()})


def ff(at: str, norms: tuple[str, ...] = ("0.0.gamma",)) -> Roles:
    return ffn(f"{at}.1.ff.0.0", f"{at}.1.ff.2", tuple(f"{at}.{name}!" for name in norms))


def pair(at: str = "attn_layers.layers.{i}", norms: tuple[str, ...] = ("0.0.gamma",), **states: str) -> Any:
    """Two attentions and two feed-forward parts, in turn."""
    h = {name.replace("_", "."): text.replace("{at}", at) for name, text in states.items()}
    attn_h, ffn_h = ({name: text for name, text in h.items() if name.startswith(kind)} for kind in ("attn", "ffn"))
    return Stack((0, 2), attn(at, norms), attn_h), Stack((1, 3), ff(at, norms), ffn_h)


DECODER = "decoder.net.attn_layers.layers.{i}"


def case(name: str, build: Callable[[], nn.Module], stacks: Any, inputs: Any = None) -> Case:
    return Case(f"x-transformers/{name}", "x-transformers", build, inputs or tokens(), tuple(stacks))


CASES = (
    case("decoder", language_model("Decoder"), pair()),
    case(
        "llama_style",
        language_model(
            "Decoder",
            rotary_pos_emb=True,
            ff_glu=True,
            ff_swish=True,
            use_rmsnorm=True,
            ff_no_bias=True,
            attn_kv_heads=1,
            attn_flash=True,
        ),
        (
            Stack((0, 2), attn("attn_layers.layers.{i}", ("0.0.g",))),
            Stack(
                (1, 3),
                glu("attn_layers.layers.{i}.1.ff.0.proj", 64, "attn_layers.layers.{i}.1.ff.2")
                | {"ffn.norm": "attn_layers.layers.{i}.0.0.g"},
            ),
        ),
    ),
    # A norm before each branch, and one behind it.
    case(
        "sandwich_norm",
        language_model("Encoder", alibi_pos_bias=True, sandwich_norm=True),
        pair(norms=("0.0.gamma", "0.1.gamma"), attn_h="{at}.0.1", ffn_h="{at}.0.1"),
    ),
    case(
        "post_norm",
        language_model("Encoder", pre_norm=False, rel_pos_bias=True),
        pair(norms=("0.2.gamma",)),
    ),
    case("vit", vision_model, pair(), image(32, "img")),
    case("continuous", continuous_model, pair(), sequence()),
    # Attention, attention to the encoder, feed-forward, in turn. The output is the loss.
    case(
        "encoder_decoder",
        encoder_decoder,
        (
            *pair("encoder.attn_layers.layers.{i}"),
            Stack((0, 3), attn(DECODER)),
            Stack((1, 4), attn(DECODER, kind="cross")),
            Stack((2, 5), ff(DECODER)),
        ),
        lambda: {"src": torch.randint(1, 50, (2, 8)), "tgt": torch.randint(1, 50, (2, 6))},
    ),
)
