"""timm: models with attention of class tokens, or with branches."""

from __future__ import annotations

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, both, ffn, image
from benchmarks.foreign_models.timm import VIT, block, class_attention, created, gated, mlp

CASES = (
    # Talking heads: 1x1 Linears over the heads, before and behind the softmax.
    Case(
        "timm/cait",
        "timm",
        created("cait_xxs24_224", **VIT),
        image(),
        (
            Stack((0, 1), block("blocks.{i}", 16), {"attn.h": None, "ffn.h": None}),
            Stack(
                (0, 1),
                class_attention("blocks_token_only.{i}") | mlp("blocks_token_only.{i}"),
                {"attn.x": "blocks_token_only.{i}.attn", "attn.h": None, "ffn.h": None},
            ),
        ),
        source="One `drop_path` behind both gammas: no module has h of one sub-layer.",
    ),
    # XCA: attention of channels with channels; a convolution between attention and mlp.
    Case(
        "timm/xcit",
        "timm",
        created("xcit_nano_12_p16_224", **VIT),
        image(),
        (
            Stack(
                (0, 1),
                block("blocks.{i}", 16) | {"mixer.norm": ("blocks.{i}.norm3.weight", "blocks.{i}.local_mp.bn.weight")},
                gated("blocks.{i}", "drop_path1", "drop_path2"),
            ),
            Stack(
                (0, 1),
                class_attention("cls_attn_blocks.{i}") | mlp("cls_attn_blocks.{i}"),
                {"attn.x": None, "attn.h": None, "ffn.h": None},
            ),
        ),
        source="Class attention: the normed patches are concatenated to its result, and gamma1 scales both.",
    ),
    # Two branches, then attention of each branch's class token to the other's patches.
    Case(
        "timm/crossvit",
        "timm",
        created(
            "crossvit_tiny_240",
            embed_dim=(16, 32),
            num_heads=(2, 2),
            depth=((1, 2, 0), (1, 1, 0)),
            mlp_ratio=(2.0, 2.0, 1.0),
            patch_size=(8, 16),
            img_scale=(1.0, 1.0),
        ),
        image(),
        (
            Stack(("0.blocks.0.0", "1.blocks.0.0"), block("blocks.{i}", 16)),
            Stack(("0.blocks.1.0", "0.blocks.1.1", "1.blocks.1.0"), block("blocks.{i}", 32)),
            *(
                Stack(
                    (0, 1),
                    attention(
                        q=f"{at}.attn.wq", k=f"{at}.attn.wk", v=f"{at}.attn.wv", o=f"{at}.attn.proj", norm=f"{at}.norm1"
                    ),
                    {"attn.x": f"{at}.attn"},
                )
                for at in ("blocks.{i}.fusion.0", "blocks.{i}.fusion.1")
            ),
        ),
    ),
    # Pixels inside patches, patches outside: two attentions and two mlps a block; qk and v apart.
    Case(
        "timm/tnt",
        "timm",
        created("tnt_s_patch16_224", embed_dim=16, inner_dim=8, depth=2, num_heads_inner=2, num_heads_outer=2),
        image(),
        (
            Stack(
                (0, 1),
                both(
                    *(
                        attention(
                            q=f"{at}.qk[0:{width}]",
                            k=f"{at}.qk[{width}:{2 * width}]",
                            v=f"{at}.v",
                            o=f"{at}.proj",
                            norm=f"blocks.{{i}}.{norm}",
                        )
                        for at, width, norm in (
                            ("blocks.{i}.attn_in", 8, "norm_in"),
                            ("blocks.{i}.attn_out", 16, "norm_out"),
                        )
                    ),
                    ffn("blocks.{i}.mlp_in.fc1", "blocks.{i}.mlp_in.fc2", "blocks.{i}.norm_mlp_in"),
                    ffn("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc2", "blocks.{i}.norm_mlp"),
                ),
            ),
        ),
    ),
)
