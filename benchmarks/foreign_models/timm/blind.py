"""timm: families whose role tables were written before peftc had seen them."""

from __future__ import annotations

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, image, packed
from benchmarks.foreign_models.timm import BLOCKS, block, created, from_class, gated, mlp


def _caformer() -> nn.Module:
    from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv

    return MetaFormer(
        num_classes=5,
        depths=(1, 1, 2, 1),
        dims=(8, 8, 32, 32),
        token_mixers=[SepConv, SepConv, Attention, Attention],
        norm_layers=[LayerNorm2dNoBias, LayerNorm2dNoBias, LayerNormNoBias, LayerNormNoBias],
    )


EDGE = "stages.{i}"
# Heads of 32 queries, 32 keys and 128 values each.
EFFICIENT = {"q": (0, 32), "k": (32, 64), "v": (64, 192)}


CASES = (
    Case(
        "timm/caformer",
        "timm",
        _caformer,
        image(64),
        (
            Stack(
                ("2.blocks.0", "2.blocks.1", "3.blocks.0"),
                packed("stages.{i}.token_mixer.qkv", 32, o="stages.{i}.token_mixer.proj", norm="stages.{i}.norm1")
                | mlp("stages.{i}"),
            ),
            # Separable convolutions: a mixer, or a feed-forward part.
            Stack(
                ("0.blocks.0", "1.blocks.0"),
                mlp("stages.{i}"),
                optional={
                    "mixer.norm": "stages.{i}.norm1.weight",
                    "ffn.norm": "stages.{i}.norm1.weight",
                    "ffn.up": "stages.{i}.token_mixer.pwconv1.weight",
                    "ffn.down": "stages.{i}.token_mixer.pwconv2.weight",
                },
            ),
        ),
    ),
    # softmax(q k') over channels; its residual is inside of the branch that ends in the mlp.
    Case(
        "timm/edgenext",
        "timm",
        from_class(
            "edgenext",
            "EdgeNeXt",
            dims=(8, 8, 16, 16),
            depths=(1, 1, 2, 1),
            global_block_counts=(0, 0, 1, 1),
            kernel_sizes=(3, 3, 3, 3),
            heads=(2, 2, 2, 2),
            d2_scales=(2, 2, 2, 3),
            use_pos_emb=(False, False, True, False),
            ls_init_value=0.5,
        ),
        image(64),
        (
            Stack(("0.blocks.0", "1.blocks.0", "2.blocks.0"), mlp(EDGE, "norm"), {"ffn.h": None}),
            Stack(
                ("2.blocks.1", "3.blocks.0"),
                packed(f"{EDGE}.xca.qkv", 16, o=f"{EDGE}.xca.proj", norm=f"{EDGE}.norm_xca") | mlp(EDGE, "norm"),
                {"attn.h": None, "ffn.h": None},
            ),
        ),
    ),
    # Convolutional stages, then attention whose rows are those of each head.
    Case(
        "timm/efficientformer",
        "timm",
        from_class(
            "efficientformer",
            "EfficientFormer",
            depths=(1, 1, 1, 3),
            embed_dims=(8, 8, 16, 16),
            num_vit=2,
            layer_scale_init_value=0.1,
        ),
        image(224),
        (
            Stack(
                ("3.blocks.2", "3.blocks.3"),
                attention(
                    **{
                        role: "stages.{i}.token_mixer.qkv["
                        + ", ".join(f"{192 * head + a}:{192 * head + b}" for head in range(8))
                        + "]"
                        for role, (a, b) in EFFICIENT.items()
                    },
                    o="stages.{i}.token_mixer.proj",
                    norm="stages.{i}.norm1",
                )
                | mlp("stages.{i}"),
                gated("stages.{i}", "ls1", "ls2"),
            ),
            Stack(
                ("0.blocks.0", "1.blocks.0", "2.blocks.0", "3.blocks.0"),
                ffn("stages.{i}.mlp.fc1", "stages.{i}.mlp.fc2", ("stages.{i}.mlp.norm1", "stages.{i}.mlp.norm2")),
                {"ffn.h": "stages.{i}.ls2:nchw"},
            ),
        ),
    ),
    # One bias of positions from a small mlp, for all layers.
    Case(
        "timm/relpos",
        "timm",
        created("vit_relpos_small_patch16_224", embed_dim=16, depth=2, num_heads=2, init_values=0.1),
        image(),
        (Stack((0, 1), block("blocks.{i}", 16), gated("blocks.{i}", "ls1", "ls2")),),
    ),
    Case(
        "timm/relpos_norm_behind",
        "timm",
        created("vit_relpos_base_patch32_plus_rpn_256", 64, embed_dim=16, depth=2, num_heads=2),
        image(64),
        (Stack((0, 1), block("blocks.{i}", 16), gated("blocks.{i}", "norm1", "norm2")),),
    ),
    Case(
        "timm/samvit",
        "timm",
        from_class(
            "vision_transformer_sam",
            "VisionTransformerSAM",
            img_size=48,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            window_size=4,
            global_attn_indexes=(1,),
            use_rel_pos=True,
            neck_chans=8,
        ),
        image(48),
        (BLOCKS,),
    ),
    Case(
        "timm/swinv2_cr",
        "timm",
        created("swinv2_cr_tiny_224", 32, patch_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4),
        image(),
        tuple(
            Stack(
                layers,
                block("stages.{i}", width),
                {"attn.h": "stages.{i}.norm1", "ffn.h": "stages.{i}.norm2"},
                # The last block has a norm of the stream behind its sum.
                optional={"ffn.norm": "stages.{i}.norm3.weight"} if layers == ("1.blocks.1",) else {},
            )
            for layers, width in ((("0.blocks.0", "0.blocks.1"), 8), (("1.blocks.0",), 16), (("1.blocks.1",), 16))
        ),
    ),
)
