"""timm: pyramids, whose stages have widths of their own."""

from __future__ import annotations

from typing import Any

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, both, ffn, image, packed, split_kv
from benchmarks.foreign_models.timm import block, created, from_class, mlp, stages


def reduced(at: str, width: int) -> Roles:
    """Keys and values of a smaller image, which a convolution and a norm compute."""
    table = split_kv(f"{at}.attn.q", f"{at}.attn.kv", width, o=f"{at}.attn.proj")
    return table | attention(norm=(f"{at}.norm1", f"{at}.attn.norm")) | mlp(at)


def volo_class(at: str, width: int) -> Roles:
    return split_kv(f"{at}.attn.q", f"{at}.attn.kv", width, o=f"{at}.attn.proj", norm=f"{at}.norm1") | mlp(at)


def interleaved(at: str) -> Roles:
    """One block of rows a head: q, k and v of 32 rows each."""
    rows = {role: ", ".join(f"{a}:{a + 32}" for a in (32 * n, 96 + 32 * n)) for n, role in enumerate("qkv")}
    table = attention(**{role: f"{at}.attn.qkv[{text}]" for role, text in rows.items()}, o=f"{at}.attn.proj")
    return table | attention(norm=f"{at}.norm1") | mlp(at)


WINDOWS: dict[str, Any] = {"patch_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
PYRAMID = {"0.blocks.0": 8, "0.blocks.1": 8, "1.blocks.0": 16, "1.blocks.1": 16}


def channels(at: str, width: int) -> Roles:
    """DaViT's attention over channels: its packed rows are the values, the queries, the keys."""
    roles = block(at, width)
    return roles | {"attn.q": roles["attn.k"], "attn.k": roles["attn.v"], "attn.v": roles["attn.q"]}


CASES = (
    Case(
        "timm/swin",
        "timm",
        created("swin_tiny_patch4_window7_224", **WINDOWS),
        image(),
        stages(block, "layers.{i}", PYRAMID),
    ),
    # Norms behind the sub-layers; cosine attention; biases of positions from a small mlp.
    Case(
        "timm/swinv2",
        "timm",
        created("swinv2_tiny_window8_256", **WINDOWS),
        image(),
        stages(
            block,
            "layers.{i}",
            PYRAMID,
            v_bias="attn.v_bias",
            attn_x="{at}.attn",
            attn_h="{at}.norm1",
            ffn_h="{at}.norm2",
        ),
    ),
    Case(
        "timm/davit",
        "timm",
        created("davit_tiny", None, depths=(1, 1), embed_dims=(8, 16), num_heads=(2, 2), window_size=4),
        image(64),
        (
            *stages(block, "stages.{i}", {"0.blocks.0.0": 8, "1.blocks.0.0": 16}),
            *stages(channels, "stages.{i}", {"0.blocks.0.1": 8, "1.blocks.0.1": 16}),
        ),
        source="Each block is a Sequential of attention over windows and attention over channels, two layers. The "
        "latter is softmax(k' v) q': the operands that are compared are called k and v, and what is mixed q.",
    ),
    Case(
        "timm/nest",
        "timm",
        from_class(
            "nest",
            "Nest",
            img_size=32,
            patch_size=4,
            num_levels=2,
            embed_dims=(8, 8),
            num_heads=(2, 2),
            depths=(2, 1),
        ),
        image(),
        (
            Stack(
                ("0.transformer_encoder.0", "0.transformer_encoder.1", "1.transformer_encoder.0"),
                block("levels.{i}", 8),
            ),
        ),
    ),
    Case(
        "timm/twins_pcpvt",
        "timm",
        created("twins_pcpvt_small", 64, embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 2, 2), depths=(2, 1, 1, 1)),
        image(64),
        (
            Stack(("0.0", "0.1", "1.0", "2.0"), reduced("blocks.{i}", 8)),
            Stack(
                ("3.0",),
                split_kv(
                    "blocks.3.0.attn.q", "blocks.3.0.attn.kv", 8, o="blocks.3.0.attn.proj", norm="blocks.3.0.norm1"
                )
                | mlp("blocks.3.0"),
            ),
        ),
    ),
    # Attention in windows and attention to a smaller image, in turn.
    Case(
        "timm/twins_svt",
        "timm",
        created(
            "twins_svt_small",
            64,
            embed_dims=(8, 8, 8, 8),
            num_heads=(1, 1, 2, 2),
            depths=(2, 1, 1, 1),
            wss=(2, 2, 2, 2),
        ),
        image(64),
        (
            Stack(("0.0", "1.0", "2.0", "3.0"), block("blocks.{i}", 8)),
            Stack(("0.1",), reduced("blocks.{i}", 8)),
        ),
    ),
    # A depthwise convolution between up and down.
    Case(
        "timm/pvt_v2",
        "timm",
        created("pvt_v2_b0", None, depths=(2, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 2, 2)),
        image(64),
        (
            Stack(("0.blocks.0", "0.blocks.1", "1.blocks.0", "2.blocks.0"), reduced("stages.{i}", 8)),
            Stack(
                ("3.blocks.0",),
                split_kv(
                    "stages.{i}.attn.q", "stages.{i}.attn.kv", 8, o="stages.{i}.attn.proj", norm="stages.{i}.norm1"
                )
                | mlp("stages.{i}"),
            ),
        ),
    ),
    # Attention over images: qkv, proj and the mlp are 1x1 convolutions, the norms are BatchNorms.
    Case(
        "timm/visformer",
        "timm",
        created("visformer_tiny", 64, init_channels=8, embed_dim=32, depth=(0, 2, 1), num_heads=2, spatial_conv="011"),
        image(64),
        tuple(
            Stack(
                layers,
                packed(f"stage{n}.{{i}}.attn.qkv", width, o=f"stage{n}.{{i}}.attn.proj", norm=f"stage{n}.{{i}}.norm1")
                | ffn(f"stage{n}.{{i}}.mlp.conv1", f"stage{n}.{{i}}.mlp.conv3", f"stage{n}.{{i}}.norm2"),
            )
            for n, width, layers in ((2, 32, (0, 1)), (3, 64, (0,)))
        ),
    ),
    # Where the width doubles, a Linear of the normed input is the residual, and queries are pooled.
    Case(
        "timm/hiera",
        "timm",
        created("hiera_tiny_224", 64, embed_dim=8, stages=(2, 1, 1, 1), num_heads=1),
        image(64),
        stages(block, "blocks.{i}", {"0": 8, "1": 8, "2": 16, "3": 32, "4": 64}),
    ),
    # Rows of q, k and v a head; partitions of windows, then of grids; both in one block.
    Case(
        "timm/maxvit",
        "timm",
        created("maxvit_rmlp_pico_rw_256", 64, embed_dim=(64, 64), depths=(2, 1), stem_width=16),
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0"),
                both(interleaved("stages.{i}.attn_block"), interleaved("stages.{i}.attn_grid")),
                # The norms of the MBConv, which begins each block.
                optional={"mixer.norm": tuple(f"stages.{{i}}.conv.{n}.weight" for n in ("pre_norm", "norm1", "norm2"))},
            ),
        ),
    ),
    # Attention, then class attention.
    Case(
        "timm/volo",
        "timm",
        from_class(
            "volo",
            "VOLO",
            layers=(0, 2),
            img_size=32,
            patch_size=8,
            stem_hidden_dim=8,
            embed_dims=(16, 16),
            num_heads=(2, 2),
            downsamples=(False, False),
            outlook_attention=(False, False),
            mlp_ratio=2.0,
            post_layers=("ca", "ca"),
            use_aux_head=False,
        ),
        image(),
        (
            Stack((0, 1), block("network.1.{i}", 16)),
            Stack((0, 1), volo_class("post_network.{i}", 16), {"attn.x": "post_network.{i}.attn"}),
        ),
    ),
)
