"""torchvision: blocks in Sequentials with names, packed projections, norms and mlps by number.

Read: torchvision/models/{vision_transformer,swin_transformer,maxvit,convnext}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, both, ffn, image, packed


def case(name: str, build: Callable[[], nn.Module], *stacks: Stack, inputs: Any = None, source: str = "") -> Case:
    return Case(f"torchvision/{name}", "torchvision", build, inputs or image(), stacks, source=source)


def from_class(module: str, name: str, *arguments: Any, **named: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(f"torchvision.models.{module}"), name)(*arguments, num_classes=5, **named)


def swin_layer(at: str, width: int) -> Roles:
    table = packed(f"{at}.attn.qkv", width, o=f"{at}.attn.proj", norm=f"{at}.norm1")
    return table | ffn(f"{at}.mlp.0", f"{at}.mlp.3", f"{at}.norm2")


def swin(first: int, behind: bool = False) -> tuple[Stack, ...]:
    """Two stages, 8 and 16 wide, with a merge between them; norms before or behind. `attn` passes
    the weights of `qkv` and `proj` to a function: neither module is called.
    """
    states = {"attn.x": "features.{i}.attn", "attn.h": "features.{i}.attn"}
    if behind:
        states |= {"attn.h": "features.{i}.norm1", "ffn.h": "features.{i}.norm2"}
    return tuple(
        Stack((f"{stage}.0", f"{stage}.1"), swin_layer("features.{i}", width), states)
        for stage, width in ((first, 8), (first + 2, 16))
    )


def swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    blocks = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return SwinTransformer([4, 4], 8, [2, 2], [1, 2], [4, 4], num_classes=5, **blocks)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], num_classes=5)


VIT_LAYER = packed(
    "encoder.layers.{i}.self_attention.in_proj_weight!",
    16,
    o="encoder.layers.{i}.self_attention.out_proj",
    norm="encoder.layers.{i}.ln_1",
) | ffn("encoder.layers.{i}.mlp.0", "encoder.layers.{i}.mlp.3", "encoder.layers.{i}.ln_2")

# MaxViT: attention in windows, then in a grid, each with a mlp; to_qkv is cut in three.
MAXVIT = both(
    *(
        packed(f"{at}.attn_layer.1.to_qkv", 16, o=f"{at}.attn_layer.1.merge", norm=f"{at}.attn_layer.0")
        | ffn(f"{at}.mlp_layer.1", f"{at}.mlp_layer.3", f"{at}.mlp_layer.0")
        for at in (
            "blocks.{i}.layers.window_attention",
            "blocks.{i}.layers.grid_attention",
        )
    )
)

# The convolutions before them are one more sum with the stream, or before the stream where they are
# strided: a mixer, or no sub-layer.
MBCONV_NORMS: Roles = {
    "mixer.norm": tuple(f"blocks.{{i}}.layers.MBconv.layers.{n}.weight" for n in ("pre_norm", "conv_a.1", "conv_b.1"))
}

CASES = (
    # MultiheadAttention in a Sequential whose children have names: encoder_layer_0, …
    case(
        "vit",
        from_class("vision_transformer", "VisionTransformer", 32, 16, 2, 2, 16, 32),
        Stack(
            ("encoder_layer_0", "encoder_layer_1"),
            VIT_LAYER,
            {
                "attn.x": "encoder.layers.{i}.self_attention",
                "attn.h": "encoder.layers.{i}.self_attention",
            },
        ),
    ),
    # Windows, biases of positions and attention are one function with fifteen arguments.
    case(
        "swin",
        from_class("swin_transformer", "SwinTransformer", [4, 4], 8, [2, 2], [1, 2], [4, 4]),
        *swin(1),
    ),
    case("swin_v2", swin_v2, *swin(1, behind=True)),
    case(
        "swin3d",
        from_class("video.swin_transformer", "SwinTransformer3d", [2, 4, 4], 8, [2, 2], [1, 2], [2, 4, 4]),
        *swin(0),
        inputs=image(32, frames=4),
    ),
    # A Permute module before the norm and behind down; a scale behind the block.
    case(
        "convnext",
        convnext,
        Stack(
            ("1.0", "1.1", "3.0"),
            ffn("features.{i}.block.3", "features.{i}.block.5", "features.{i}.block.2"),
            {"ffn.h": "features.{i}.stochastic_depth:nchw"},
        ),
    ),
    case(
        "maxvit",
        from_class("maxvit", "MaxVit", (32, 32), 8, 4, [16, 16], [2, 1], 8, 0.0),
        Stack(("0.layers.0", "0.layers.1", "1.layers.0"), MAXVIT, optional=MBCONV_NORMS),
    ),
)
