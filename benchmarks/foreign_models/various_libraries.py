"""Images with convolutions as projections, regions, alignments. Read: the modules named below."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.efficient import built
from benchmarks.foreign_models.tables import Roles, attention, both, feed_forward, ffn, image, packed


def _msa() -> nn.Module:
    from esm.data import Alphabet
    from esm.model.msa_transformer import MSATransformer

    sizes = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2, "max_positions": 64}
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    options = Namespace(**sizes, **none, max_tokens=2**14, embed_positions_msa=True)
    return MSATransformer(options, Alphabet.from_architecture("msa_transformer"))


def _swin_unetr() -> nn.Module:
    from monai.networks.nets.swin_unetr import SwinUNETR

    sizes = {"depths": (2, 1, 1, 1), "num_heads": (1, 2, 2, 4), "window_size": 4, "feature_size": 12}
    return SwinUNETR(in_channels=1, out_channels=2, spatial_dims=2, **sizes)


def crossing(attn: str, ff: str) -> Roles:
    """A 1x1 convolution with q, k, v; norms over the second dimension."""
    table = packed(f"{attn}.to_qkv", 32, o=f"{attn}.to_out", norm=f"{attn}.norm.g!")
    return table | feed_forward(ff, "0.g!", 1, 4)


def convolved(at: str) -> Roles:
    """Depthwise, BatchNorm and 1x1 for q, and for keys with values, 64 of each."""
    roles = {"q": f"{at}.0.to_q.net.2", "k": f"{at}.0.to_kv.net.2[0:64]", "v": f"{at}.0.to_kv.net.2[64:128]"}
    norms = (f"{at}.0.norm.g!", f"{at}.0.to_q.net.1", f"{at}.0.to_kv.net.1")
    return attention(**roles, o=f"{at}.0.to_out.0", norm=norms) | feed_forward(f"{at}.1.net", "0.g!", 1, 4)


def aligned(kind: str) -> Roles:
    at = f"layers.{{i}}.{kind}_self_attention"
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    roles = {role: f"{at}.layer.{name}" for role, name in names.items()}
    return attention(**roles, norm=f"{at}.layer_norm")


def window_layer(width: int) -> Roles:
    at = "swinViT.{i}"
    table = packed(f"{at}.attn.qkv", width, o=f"{at}.attn.proj", norm=f"{at}.norm1")
    return table | ffn(f"{at}.mlp.linear1", f"{at}.mlp.linear2", f"{at}.norm2")


CROSSING = "layers.{i}"

CASES = (
    # Two attentions, near and far, with a feed-forward part each; biases by an mlp of distances.
    Case(
        "vit-pytorch/crossformer",
        "vit-pytorch",
        built(
            "vit_pytorch.crossformer",
            "CrossFormer",
            dim=32,
            depth=1,
            global_window_size=(4, 2, 2, 2),
            local_window_size=(4, 4, 2, 2),
            num_classes=5,
        ),
        image(64),
        (
            Stack(
                tuple(f"{stage}.1.layers.0" for stage in range(4)),
                both(
                    crossing(f"{CROSSING}.0", f"{CROSSING}.1"),
                    crossing(f"{CROSSING}.2", f"{CROSSING}.3"),
                ),
                optional={"attn.norm": tuple(f"{CROSSING}.{n}.dpb.{k}.weight" for n in (0, 2) for k in (1, 4, 7))},
            ),
        ),
    ),
    Case(
        "vit-pytorch/cvt",
        "vit-pytorch",
        built(
            "vit_pytorch.cvt",
            "CvT",
            num_classes=5,
            s1_emb_dim=8,
            s2_emb_dim=8,
            s2_heads=1,
            s2_depth=2,
            s3_emb_dim=16,
            s3_heads=1,
            s3_depth=1,
        ),
        image(64),
        (
            Stack(
                ("0.2.layers.0", "1.2.layers.0", "1.2.layers.1", "2.2.layers.0"),
                convolved("layers.{i}"),
                {"attn.x": "layers.{i}.0"},
            ),
        ),
    ),
    # One attention for tokens of regions, and then for those of windows with their region's.
    Case(
        "vit-pytorch/regionvit",
        "vit-pytorch",
        built("vit_pytorch.regionvit", "RegionViT", dim=16, depth=(2, 1, 1, 1), window_size=2, num_classes=5),
        image(64),
        (
            Stack(
                ("0.2.layers.0", "0.2.layers.1", *(f"{stage}.2.layers.0" for stage in (1, 2, 3))),
                both(
                    *2 * [packed("layers.{i}.0.to_qkv", 128, o="layers.{i}.0.to_out.0", norm="layers.{i}.0.norm")],
                    feed_forward("layers.{i}.1", 0, 1, 4),
                ),
            ),
        ),
    ),
    # Rows of an alignment share one matrix of scores; columns have their own.
    Case(
        "fair-esm/msa",
        "fair-esm",
        _msa,
        lambda: {"tokens": torch.randint(4, 20, (2, 3, 6))},
        (
            Stack(
                (0, 1),
                both(
                    aligned("row"),
                    aligned("column"),
                    ffn(
                        "layers.{i}.feed_forward_layer.layer.fc1",
                        "layers.{i}.feed_forward_layer.layer.fc2",
                        "layers.{i}.feed_forward_layer.layer_norm",
                    ),
                ),
            ),
        ),
        lambda out: out["logits"],
    ),
    # Swin as the encoder of a U-Net.
    Case(
        "monai/swin_unetr",
        "monai",
        _swin_unetr,
        lambda: {"x_in": torch.randn(1, 1, 64, 64)},
        tuple(
            Stack(layers, window_layer(width))
            for layers, width in (
                (("layers1.0.blocks.0", "layers1.0.blocks.1"), 12),
                (("layers2.0.blocks.0",), 24),
                (("layers3.0.blocks.0",), 48),
                (("layers4.0.blocks.0",), 96),
            )
        ),
    ),
)
