"""timm: ViT and its variants."""

from __future__ import annotations

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import glu, image, packed
from benchmarks.foreign_models.timm import BLOCKS, VIT, block, created, gated


def _naflex() -> nn.Module:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = NaFlexVitCfg(patch_size=16, embed_dim=16, depth=2, num_heads=2, class_token=False, global_pool="map")
    return NaFlexVit(config, num_classes=5)


CASES = (
    Case("timm/vit", "timm", created("vit_tiny_patch16_224", **VIT), image(), (BLOCKS,)),
    # The pool's attention is no layer: its query is a parameter, and it runs once.
    Case("timm/siglip", "timm", created("vit_base_patch16_siglip_224", **VIT), image(), (BLOCKS,)),
    # Norms behind the sub-layers, before the sums.
    Case(
        "timm/vit_post_norm",
        "timm",
        created("vit_base_patch16_rpn_224", **VIT),
        image(),
        (Stack((0, 1), block("blocks.{i}", 16), gated("blocks.{i}", "norm1", "norm2")),),
    ),
    Case("timm/deit", "timm", created("deit_tiny_distilled_patch16_224", **VIT), image(), (BLOCKS,)),
    Case(
        "timm/deit3",
        "timm",
        created("deit3_small_patch16_224", **VIT),
        image(),
        (Stack((0, 1), block("blocks.{i}", 16), gated("blocks.{i}", "ls1", "ls2")),),
    ),
    # Biases of query and value, concatenated with zeros for the key; gammas are parameters.
    Case(
        "timm/beit",
        "timm",
        created("beit_base_patch16_224", **VIT),
        image(),
        (
            Stack(
                (0, 1),
                block("blocks.{i}", 16),
                {"attn.x": "blocks.{i}.attn", **gated("blocks.{i}", "drop_path1", "drop_path2")},
                biases={"attn.v": "blocks.{i}.attn.v_bias"},
            ),
        ),
        source="`F.linear(x, self.qkv.weight, …)`: the module of q is never called.",
    ),
    # GluMlp with `gate_last=False`: act(first half) * second half. int(16 * 8 / 3) = 42.
    Case(
        "timm/eva02",
        "timm",
        created("eva02_tiny_patch14_224", **VIT),
        image(),
        (
            Stack(
                (0, 1),
                packed("blocks.{i}.attn.qkv", 16, o="blocks.{i}.attn.proj", norm="blocks.{i}.norm1")
                | glu("blocks.{i}.mlp.fc1", 42, "blocks.{i}.mlp.fc2", "blocks.{i}.norm2", gate_first=True),
                {"attn.x": "blocks.{i}.attn"},
                biases={"attn.v": "blocks.{i}.attn.v_bias"},
            ),
        ),
    ),
    Case(
        "timm/pit",
        "timm",
        created("pit_ti_224", patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(2, 1, 1), heads=(1, 1, 1)),
        image(),
        (Stack(("0.blocks.0", "0.blocks.1", "1.blocks.0", "2.blocks.0"), block("transformers.{i}", 8)),),
    ),
    Case(
        "timm/naflexvit",
        "timm",
        lambda: _naflex(),
        image(),
        (BLOCKS,),
    ),
)
