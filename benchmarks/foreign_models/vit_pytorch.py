"""vit-pytorch: lists of lists, [attention, feed-forward], that the model's own forward walks.

Read: each module of the package. `to_qkv(x).chunk(3, dim=-1)` is q, k, v; `to_kv(…).chunk(2)` k, v.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import (
    Roles,
    attention,
    both,
    feed_forward,
    image,
    packed,
    split_kv,
)

IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 16, "num_classes": 5, "dim": 16, "depth": 2}
SIZES: dict[str, Any] = {**IMAGE, "heads": 2, "mlp_dim": 32, "dim_head": 8}
VIDEO: dict[str, Any] = {
    "image_size": 32,
    "image_patch_size": 16,
    "frames": 4,
    "frame_patch_size": 2,
    "num_classes": 5,
    "dim": 16,
    "spatial_depth": 2,
    "temporal_depth": 2,
    "heads": 2,
    "mlp_dim": 32,
    "dim_head": 8,
}


def built(module: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(f"vit_pytorch.{module}"), name)(**arguments)


def case(name: str, build: Callable[[], nn.Module], *stacks: Stack, inputs: Any = None, source: str = "") -> Case:
    return Case(f"vit-pytorch/{name}", "vit-pytorch", build, inputs or image(32, "img"), stacks, source=source)


def layer(at: str = "transformer.layers.{i}", out: str = "to_out.0", down: int = 4) -> Roles:
    """[attention with `norm`, `to_qkv` and `to_out`, a Sequential of norm, up, …, down]."""
    attn = packed(f"{at}.0.to_qkv", 16, o=f"{at}.0.{out}", norm=f"{at}.0.norm")
    return attn | feed_forward(f"{at}.1.net", 0, 1, down)


def class_layer(at: str, width: int = 16) -> Roles:
    attn = split_kv(f"{at}.0.fn.to_q", f"{at}.0.fn.to_kv", width, o=f"{at}.0.fn.to_out.0", norm=f"{at}.0.fn.norm")
    return attn | feed_forward(f"{at}.1.fn.net", 0, 1, 4)


def scaled(at: str, ff: int = 1) -> dict[str, str | None]:
    """LayerScale, a module around each sub-layer: its output is h."""
    return {"attn.x": f"{at}.0.fn.to_q", "attn.h": f"{at}.0", "ffn.h": f"{at}.{ff}"}


LAYERS = Stack((0, 1), layer())
SIMPLE = Stack((0, 1), layer(out="to_out", down=3))
FIRST = "transformer.layers.{i}"

PLAIN = (
    case("vit", built("vit", "ViT", **SIZES), LAYERS),
    case("simple_vit", built("simple_vit", "SimpleViT", **SIZES), SIMPLE),
    case(
        "vit_1d",
        built(
            "vit_1d", "ViT", seq_len=32, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32, dim_head=8
        ),
        LAYERS,
        inputs=lambda: {"series": torch.randn(2, 3, 32)},
    ),
    case("flash", built("simple_flash_attn_vit", "SimpleViT", use_flash=True, **SIZES), SIMPLE),
    case("register_tokens", built("simple_vit_with_register_tokens", "SimpleViT", **SIZES), SIMPLE),
    # The diagonal is masked, and the temperature is learned.
    case("small_dataset", built("vit_for_small_dataset", "ViT", **SIZES), LAYERS),
    # Attention is mixed over the heads and normed, behind the softmax.
    case(
        "deepvit",
        built("deepvit", "DeepViT", **SIZES),
        LAYERS,
        source="`reattn_norm` norms attention weights over heads, no state of the layer.",
    ),
    case(
        "patch_merger",
        built("vit_with_patch_merger", "ViT", patch_merge_layer=1, patch_merge_num_tokens=2, **SIZES),
        LAYERS,
    ),
    case(
        "qk_norm",
        built("simple_vit_with_qk_norm", "SimpleViT", **SIZES),
        Stack(
            (0, 1),
            layer(out="to_out", down=3)
            | attention(q_norm=f"{FIRST}.0.q_norm.gamma!", k_norm=f"{FIRST}.0.k_norm.gamma!"),
        ),
    ),
    # The first layer's values are mixed into those of the others.
    case(
        "value_residual",
        built("simple_vit_with_value_residual", "SimpleViT", **SIZES),
        Stack(
            (0, 1),
            packed(f"{FIRST}.0.to_qkv", 16, o=f"{FIRST}.0.to_out", norm=f"{FIRST}.0.norm")
            | feed_forward(f"{FIRST}.1", 0, 1, 3),
        ),
    ),
    # Lists of three with a None; skip connections from the first half of the layers to the second.
    case(
        "simple_uvit",
        built("simple_uvit", "SimpleUViT", **SIZES),
        Stack(
            (0, 1),
            packed(f"{FIRST}.1.to_qkv", 16, o=f"{FIRST}.1.to_out", norm=f"{FIRST}.1.norm")
            | feed_forward(f"{FIRST}.2", 0, 1, 3),
        ),
    ),
)

SCALES = "multi_scale_encoder.layers.{i}"
CROSS_VIT_LAYER = split_kv(
    f"{SCALES}.0.to_q", f"{SCALES}.0.to_kv", 16, o=f"{SCALES}.0.to_out.0", norm=f"{SCALES}.0.norm"
) | feed_forward(f"{SCALES}.1.net", 0, 1, 4)

OTHER = (
    case(
        "cait",
        built("cait", "CaiT", cls_depth=2, **SIZES),
        *(
            Stack((0, 1), class_layer(f"{at}.layers.{{i}}"), scaled(f"{at}.layers.{{i}}"))
            for at in ("patch_transformer", "cls_transformer")
        ),
        source="`context` is the input and, in the class layers, the patches: one norm for the query alone.",
    ),
    case(
        "xcit",
        built("xcit", "XCiT", cls_depth=2, **SIZES),
        Stack(
            (0, 1),
            packed(
                "xcit_transformer.layers.{i}.0.fn.to_qkv",
                16,
                o="xcit_transformer.layers.{i}.0.fn.to_out.0",
                norm="xcit_transformer.layers.{i}.0.fn.norm",
            )
            | {
                "mixer.norm": (
                    "xcit_transformer.layers.{i}.1.fn.net.0.weight",
                    "xcit_transformer.layers.{i}.1.fn.net.3.weight",
                )
            }
            | feed_forward("xcit_transformer.layers.{i}.2.fn.net", 0, 1, 4),
            {"attn.h": "xcit_transformer.layers.{i}.0", "ffn.h": "xcit_transformer.layers.{i}.2"},
        ),
        Stack((0, 1), class_layer("cls_transformer.layers.{i}"), scaled("cls_transformer.layers.{i}")),
    ),
    # Two attentions side by side, then two feed-forward parts side by side.
    case(
        "parallel_vit",
        built("parallel_vit", "ViT", num_parallel_branches=2, **SIZES),
        Stack(
            (0, 1),
            both(
                *(
                    packed(f"{at}.to_qkv", 16, o=f"{at}.to_out.0", norm=f"{at}.norm")
                    for at in (f"{FIRST}.0.fns.0", f"{FIRST}.0.fns.1")
                ),
                *(feed_forward(f"{FIRST}.1.fns.{n}.net", 0, 1, 4) for n in (0, 1)),
            ),
        ),
    ),
    case(
        "cross_vit",
        built(
            "cross_vit",
            "CrossViT",
            image_size=32,
            num_classes=5,
            sm_dim=16,
            lg_dim=16,
            depth=2,
            sm_patch_size=8,
            lg_patch_size=16,
            sm_enc_depth=1,
            sm_enc_heads=2,
            sm_enc_mlp_dim=32,
            sm_enc_dim_head=8,
            lg_enc_depth=2,
            lg_enc_heads=2,
            lg_enc_mlp_dim=32,
            lg_enc_dim_head=8,
            cross_attn_depth=1,
            cross_attn_heads=2,
            cross_attn_dim_head=8,
        ),
        Stack(("0.0.layers.0", "1.0.layers.0"), CROSS_VIT_LAYER),
        Stack(("0.1.layers.0", "0.1.layers.1", "1.1.layers.0", "1.1.layers.1"), CROSS_VIT_LAYER),
        Stack(
            ("0.2.layers.0", "1.2.layers.0"),
            both(
                *(
                    split_kv(
                        f"{SCALES}.{n}.fn.to_q",
                        f"{SCALES}.{n}.fn.to_kv",
                        16,
                        o=f"{SCALES}.{n}.fn.to_out.0",
                        norm=f"{SCALES}.{n}.fn.norm",
                    )
                    for n in (0, 1)
                )
            ),
        ),
        source="Class tokens of one branch look at the patches of the other, `kv_include_self`.",
    ),
    case(
        "vivit",
        built("vivit", "ViViT", **VIDEO),
        *(Stack((0, 1), layer(f"{at}.layers.{{i}}")) for at in ("spatial_transformer", "temporal_transformer")),
        inputs=image(32, "video", frames=4),
    ),
    # Attention in space, attention in time, feed-forward.
    case(
        "vivit_factorized",
        built("vivit", "ViViT", variant="factorized_self_attention", **VIDEO),
        Stack(
            (0, 1),
            both(
                *(
                    packed(f"{at}.to_qkv", 16, o=f"{at}.to_out.0", norm=f"{at}.norm")
                    for at in ("factorized_transformer.layers.{i}.0", "factorized_transformer.layers.{i}.1")
                ),
                feed_forward("factorized_transformer.layers.{i}.2.net", 0, 1, 4),
            ),
        ),
        inputs=image(32, "video", frames=4),
    ),
    # Images: Linears are 1x1 convolutions, the norm is of channels with `g` (1, d, 1, 1).
    case(
        "nest",
        built(
            "nest",
            "NesT",
            image_size=32,
            patch_size=4,
            dim=16,
            heads=2,
            num_hierarchies=2,
            block_repeats=(2, 1),
            num_classes=5,
        ),
        *(
            Stack(
                layers,
                packed(
                    f"{at}.0.to_qkv",
                    width,
                    o=f"{at}.0.to_out.0",
                    norm=f"{at}.0.norm.g!",
                )
                | feed_forward(f"{at}.1.net", "0.g!", 1, 4),
            )
            for layers, width, at in (((0, 1), 16, "layers.0.0.layers.{i}"), ((0,), 32, "layers.1.0.layers.{i}"))
        ),
    ),
    # Weights are normed by a parametrisation; sums are interpolations on a sphere. Queries and keys
    # are normed per head and scaled by a parameter: the code calls that a norm.
    case(
        "normalized_vit",
        built("normalized_vit", "nViT", heads=2, dim_head=8, mlp_dim=32, **IMAGE),
        Stack(
            (0, 1),
            attention(
                **{r: f"layers.{{i}}.0.to_{n}.linear" for r, n in zip("qkvo", ("q", "k", "v", "out"), strict=True)},
                q_norm="layers.{i}.0.q_scale!",
                k_norm="layers.{i}.0.k_scale!",
            )
            | {
                "ffn.up": "layers.{i}.1.to_hidden.linear.weight",
                "ffn.gate": "layers.{i}.1.to_gate.linear.weight",
                "ffn.down": "layers.{i}.1.to_out.linear.weight",
            },
            {"attn.h": None, "ffn.h": None},
        ),
        inputs=image(32, "images"),
    ),
)

CASES = (*PLAIN, *OTHER)
