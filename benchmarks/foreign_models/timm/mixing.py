"""timm: models that mix tokens otherwise, by convolutions or an mlp."""

from __future__ import annotations

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import ffn, image
from benchmarks.foreign_models.timm import block, created, from_class, mlp

# Factorised attention: q (softmax(k)' v), plus a convolution of v times q.
COAT = Case(
    "timm/coat_lite",
    "timm",
    created("coat_lite_tiny", 64, embed_dims=(8, 8, 8, 8), serial_depths=(2, 1, 1, 1)),
    image(64),
    (Stack(("1.0", "1.1", "2.0", "3.0", "4.0"), block("serial_blocks{i}", 8, "factoratt_crpe")),),
)


def _metaformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer

    return MetaFormer(
        num_classes=5,
        depths=(2, 1),
        dims=(8, 16),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-1,
        res_scale_init_values=None,
        use_mlp_head=False,
    )


CASES = (
    COAT,
    # Tokens are mixed by an mlp over positions: a mixer.
    Case(
        "timm/mlp_mixer",
        "timm",
        from_class("mlp_mixer", "MlpMixer", img_size=32, patch_size=16, num_blocks=2, embed_dim=16),
        image(),
        (
            Stack(
                (0, 1),
                ffn("blocks.{i}.mlp_channels.fc1", "blocks.{i}.mlp_channels.fc2", "blocks.{i}.norm2")
                | {"mixer.norm": "blocks.{i}.norm1.weight"},
            ),
        ),
    ),
    Case(
        "timm/convnext",
        "timm",
        from_class("convnext", "ConvNeXt", depths=(2, 1, 1, 1), dims=(8, 8, 16, 16)),
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0", "2.blocks.0", "3.blocks.0"),
                mlp("stages.{i}", "norm"),
                {"ffn.h": None},
            ),
        ),
    ),
    # The same with 1x1 convolutions.
    Case(
        "timm/convnext_conv_mlp",
        "timm",
        from_class("convnext", "ConvNeXt", depths=(2, 1, 1, 1), dims=(8, 8, 16, 16), conv_mlp=True),
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0", "2.blocks.0", "3.blocks.0"),
                mlp("stages.{i}", "norm"),
                {"ffn.h": "stages.{i}.drop_path:nchw"},
            ),
        ),
    ),
    Case(
        "timm/poolformer",
        "timm",
        lambda: _metaformer(),
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0"),
                mlp("stages.{i}") | {"mixer.norm": "stages.{i}.norm1.weight"},
                {"ffn.h": "stages.{i}.layer_scale2:nchw"},
            ),
        ),
    ),
)
