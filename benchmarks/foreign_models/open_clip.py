"""open_clip: MultiheadAttention in residual blocks, in two towers, and in a third that joins them.

Read: open_clip/transformer.py (ResidualAttentionBlock, MultimodalTransformer), model.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, ffn, packed

TEXT: dict[str, Any] = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2}
VISION: dict[str, Any] = {"layers": 2, "width": 64, "head_width": 32, "patch_size": 16, "image_size": 32}


def clip(**vision: Any) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    return CLIP(16, CLIPVisionCfg(**{**VISION, **vision}), CLIPTextCfg(**TEXT))


def clip_custom_text() -> nn.Module:
    """The text tower is a module, not the model's own attributes."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    return CustomTextCLIP(16, CLIPVisionCfg(**VISION), CLIPTextCfg(**TEXT))


def timm_tower() -> nn.Module:
    import timm
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    model = CLIP(16, CLIPVisionCfg(**VISION), CLIPTextCfg(**TEXT))
    model.visual = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=16
    )
    return model


def coca() -> nn.Module:
    from open_clip.coca_model import CLIPTextCfg, CLIPVisionCfg, CoCa, MultimodalCfg

    text = CLIPTextCfg(**TEXT, embed_cls=True, output_tokens=True)
    vision = CLIPVisionCfg(**VISION, attentional_pool=True, attn_pooler_heads=2, output_tokens=True)
    model = CoCa(32, MultimodalCfg(**TEXT), text, vision)
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # it is left empty
    return model


def layer(at: str, width: int, kind: str = "", norms: tuple[str, ...] = ("ln_1",)) -> Roles:
    norm = tuple(f"{at}.{name}" for name in norms)
    table = packed(f"{at}.attn.in_proj_weight!", width, kind=kind, o=f"{at}.attn.out_proj", norm=norm)
    return table | ffn(f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", f"{at}.ln_2")


def stack(at: str, width: int, scaled: bool = False) -> Stack:
    h = f"{at}.ls_1" if scaled else f"{at}.attn"
    ffn_h = {"ffn.h": f"{at}.ls_2"} if scaled else {}
    return Stack((0, 1), layer(at, width), {"attn.x": f"{at}.attn", "attn.h": h, **ffn_h})


def pair() -> dict[str, Any]:
    return {"image": torch.randn(2, 3, 32, 32), "text": torch.randint(1, 50, (2, 8))}


TEXT_STACK = stack("transformer.resblocks.{i}", 32)
VISION_STACK = stack("visual.transformer.resblocks.{i}", 64)
DECODER = "text_decoder.resblocks.{i}"
CROSS = "text_decoder.cross_attn.{i}"


def features(out: Any) -> torch.Tensor:
    """Both towers, in one tensor."""
    return out[0] @ out[1].T


CASES = (
    Case("open_clip/clip", "open_clip_torch", clip, pair, (TEXT_STACK, VISION_STACK), features),
    Case(
        "open_clip/clip_layer_scale",
        "open_clip_torch",
        lambda: clip(ls_init_value=0.1),
        pair,
        (TEXT_STACK, stack("visual.transformer.resblocks.{i}", 64, scaled=True)),
        features,
    ),
    Case(
        "open_clip/clip_custom_text",
        "open_clip_torch",
        clip_custom_text,
        pair,
        (stack("text.transformer.resblocks.{i}", 32), VISION_STACK),
        features,
    ),
    Case(
        "open_clip/timm_tower",
        "open_clip_torch",
        timm_tower,
        pair,
        (
            TEXT_STACK,
            Stack(
                (0, 1),
                packed(
                    "visual.blocks.{i}.attn.qkv", 16, o="visual.blocks.{i}.attn.proj", norm="visual.blocks.{i}.norm1"
                )
                | ffn("visual.blocks.{i}.mlp.fc1", "visual.blocks.{i}.mlp.fc2", "visual.blocks.{i}.norm2"),
            ),
        ),
        features,
    ),
    # The decoder walks two lists side by side: self-attention, and attention to the image.
    Case(
        "open_clip/coca",
        "open_clip_torch",
        coca,
        pair,
        (
            stack("text.transformer.resblocks.{i}", 32),
            VISION_STACK,
            Stack((0, 1), layer(DECODER, 32), {"attn.x": f"{DECODER}.attn", "attn.h": f"{DECODER}.attn"}),
            Stack(
                (0, 1),
                layer(CROSS, 32, "cross", ("ln_1", "ln_1_kv")),
                {"attn.x": f"{CROSS}.attn", "attn.h": f"{CROSS}.attn"},
            ),
        ),
        lambda out: out["logits"],
        source="`k_x` and `v_x` pass `ln_1_kv`, a norm of the image's tokens.",
    ),
)
