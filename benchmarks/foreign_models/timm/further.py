"""timm: queries of the whole image, pooled keys, positions beside scores, focal modulation."""

from __future__ import annotations

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, ffn, image, packed
from benchmarks.foreign_models.timm import block, created, from_class, mlp


def _gcvit() -> nn.Module:
    from timm.models.gcvit import GlobalContextVit

    return GlobalContextVit(
        img_size=64, window_size=(4, 4), embed_dim=8, depths=(2, 2), num_heads=(1, 2), layer_scale=0.1, num_classes=5
    )


def _mvitv2() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    config = MultiScaleVitCfg(depths=(1, 2), embed_dim=(8, 16), num_heads=(1, 2), stride_q=((1, 1), (2, 2)))
    return MultiScaleVit(config, img_size=64, num_classes=5)


def _mobilevit() -> nn.Module:
    from timm.models.byobnet import ByobNet, ByoModelCfg
    from timm.models.mobilevit import _inverted_residual_block, _mobilevit_block

    blocks = (
        _inverted_residual_block(d=1, c=8, s=2),
        _mobilevit_block(d=1, c=8, s=2, transformer_dim=16, transformer_depth=2, patch_size=2, br=2.0),
    )
    sizes = {"stem_chs": 8, "stem_type": "3x3", "stem_pool": "", "downsample": "", "num_features": 16}
    return ByobNet(ByoModelCfg(blocks=blocks, act_layer="silu", **sizes), num_classes=5)


def _tiny_vit() -> nn.Module:
    from timm.models.tiny_vit import TinyVit

    return TinyVit(
        embed_dims=(8, 8, 16, 16),
        depths=(1, 2, 1, 1),
        num_heads=(1, 1, 2, 2),
        window_sizes=(4, 4, 4, 2),
        drop_path_rate=0.0,
        num_classes=5,
    )


def _inception_next() -> nn.Module:
    from timm.models.inception_next import MetaNeXt

    return MetaNeXt(depths=(2, 1), dims=(16, 16), mlp_ratios=(2, 2), ls_init_value=0.1, num_classes=5)


GLOBAL_STATES: dict[str, str | None] = {
    "attn.x": "stages.{i}.attn",
    "attn.h": "stages.{i}.ls1",
    "ffn.h": "stages.{i}.ls2",
}


def global_layer(width: int) -> Roles:
    """The query is a pooled image; the Linear has keys, then values."""
    at = "stages.{i}"
    table = attention(
        k=f"{at}.attn.qkv[0:{width}]",
        v=f"{at}.attn.qkv[{width}:{2 * width}]",
        o=f"{at}.attn.proj",
        norm=f"{at}.norm1",
    )
    return table | mlp(at)


def pooled_layer(width: int) -> Roles:
    """A depthwise convolution and a norm behind q, k and v, of each head."""
    at = "stages.{i}.attn"
    norms = ("stages.{i}.norm1", f"{at}.norm_v")
    table = packed(f"{at}.qkv", width, o=f"{at}.proj", norm=norms, q_norm=f"{at}.norm_q", k_norm=f"{at}.norm_k")
    return table | mlp("stages.{i}")


def tiny_layer(heads: int) -> Roles:
    """Rows of each head: q, k, v, 8 of each; the norms are in the modules of attention and mlp."""
    at = "stages.{i}"
    rows = {
        role: ", ".join(f"{24 * head + start}:{24 * head + start + 8}" for head in range(heads))
        for role, start in (("q", 0), ("k", 8), ("v", 16))
    }
    table = attention(
        **{role: f"{at}.attn.qkv[{text}]" for role, text in rows.items()}, o=f"{at}.attn.proj", norm=f"{at}.attn.norm"
    )
    return table | ffn(f"{at}.mlp.fc1", f"{at}.mlp.fc2", f"{at}.mlp.norm")


POSITIONAL = attention(
    q="blocks.{i}.attn.qk[0:16]",
    k="blocks.{i}.attn.qk[16:32]",
    v="blocks.{i}.attn.v",
    o="blocks.{i}.attn.proj",
    norm="blocks.{i}.norm1",
)

CASES = (
    Case(
        "timm/gcvit",
        "timm",
        _gcvit,
        image(64),
        tuple(
            Stack((f"{stage}.blocks.{number}",), roles, GLOBAL_STATES)
            for stage, width in ((0, 8), (1, 16))
            for number, roles in enumerate((block("stages.{i}", width), global_layer(width)))
        ),
    ),
    # The second stage widens the stream by a Linear of the normed input, which is no sub-layer.
    Case(
        "timm/mvitv2",
        "timm",
        _mvitv2,
        image(64),
        tuple(
            Stack(layers, pooled_layer(width))
            for layers, width in ((("0.blocks.0",), 8), (("1.blocks.0", "1.blocks.1"), 16))
        ),
    ),
    # A second softmax, of positions, is mixed with that of the scores; the last block has none.
    Case(
        "timm/convit",
        "timm",
        created("convit_tiny", embed_dim=8, depth=3, num_heads=2, local_up_to_layer=2),
        image(),
        (Stack((0, 1), POSITIONAL | mlp("blocks.{i}")), Stack((2,), block("blocks.{i}", 16))),
    ),
    # Transformers of patches inside a convolutional stage.
    Case(
        "timm/mobilevit",
        "timm",
        _mobilevit,
        image(),
        (Stack((0, 1), block("stages.1.1.transformer.{i}", 16)),),
    ),
    Case(
        "timm/focalnet",
        "timm",
        from_class("focalnet", "FocalNet", embed_dim=8, depths=(2, 1), layerscale_value=0.1, drop_path_rate=0.0),
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0"),
                mlp("layers.{i}") | {"mixer.norm": "layers.{i}.norm1.weight"},
                {"ffn.h": "layers.{i}.ls2:nchw"},
            ),
        ),
    ),
    # A convolution between attention and mlp replaces the stream. Those of the first stage are
    # mixers, or feed-forward parts with a depthwise convolution.
    Case(
        "timm/tiny_vit",
        "timm",
        _tiny_vit,
        image(64),
        (
            Stack(("1.blocks.0", "1.blocks.1"), tiny_layer(1)),
            Stack(("2.blocks.0", "3.blocks.0"), tiny_layer(2)),
            Stack(
                ("0.blocks.0",),
                {},
                optional={
                    "mixer.norm": tuple(f"stages.{{i}}.conv{n}.bn.weight" for n in (1, 2, 3)),
                    "ffn.norm": tuple(f"stages.{{i}}.conv{n}.bn.weight" for n in (1, 2, 3)),
                    "ffn.up": "stages.{i}.conv1.conv.weight",
                    "ffn.down": "stages.{i}.conv3.conv.weight",
                },
            ),
        ),
    ),
    # Some channels are convolved, the others stay, and all go to one mlp before the sum.
    Case(
        "timm/inception_next",
        "timm",
        _inception_next,
        image(64),
        (
            Stack(
                ("0.blocks.0", "0.blocks.1", "1.blocks.0"),
                ffn("stages.{i}.mlp.fc1", "stages.{i}.mlp.fc2", "stages.{i}.norm"),
                {"ffn.h": None},
            ),
        ),
    ),
)
