"""diffusers: one stream, with scales and gates of a time embedding; and without (UNet, prior)."""

from __future__ import annotations

import torch

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.diffusers import (
    GATED,
    HEADS,
    LATENT,
    T,
    attn,
    case,
    ff,
    latents,
    model,
)
from benchmarks.foreign_models.tables import Roles, ffn, glu

MODULATED = attn(f"{T}.attn1", "self") | attn(f"{T}.attn2", "cross")


def unet_layer(at: str, width: int) -> Roles:
    table = attn(f"{at}.attn1", "self", f"{at}.norm1") | attn(f"{at}.attn2", "cross", f"{at}.norm2")
    return table | glu(f"{at}.ff.net.0.proj", 4 * width, f"{at}.ff.net.2", f"{at}.norm3")


CASES = (
    case(
        "dit",
        model("DiTTransformer2DModel", num_embeds_ada_norm=10, norm_num_groups=4, **LATENT),
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
        Stack((0, 1), attn(f"{T}.attn1") | ff(f"{T}.ff"), GATED),
    ),
    case(
        "pixart",
        model(
            "PixArtTransformer2DModel",
            out_channels=8,
            cross_attention_dim=16,
            caption_channels=12,
            use_additional_conditions=False,
            norm_num_groups=4,
            **LATENT,
        ),
        latents(added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None}),
        Stack((0, 1), MODULATED | ff(f"{T}.ff"), GATED),
    ),
    case(
        "ltx",
        model(
            "LTXVideoTransformer3DModel",
            in_channels=4,
            out_channels=4,
            cross_attention_dim=16,
            num_layers=2,
            caption_channels=12,
            qk_norm="rms_norm_across_heads",
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "timestep": torch.tensor([3, 5]),
            "encoder_attention_mask": torch.ones(2, 5).bool(),
            "num_frames": 1,
            "height": 4,
            "width": 4,
        },
        Stack(
            (0, 1),
            attn(f"{T}.attn1", "self", qk_norm=True) | attn(f"{T}.attn2", "cross", qk_norm=True) | ff(f"{T}.ff"),
            GATED,
        ),
    ),
    case(
        "wan",
        model(
            "WanTransformer3DModel",
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=12,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 5, 12),
        },
        Stack(
            (0, 1),
            attn("blocks.{i}.attn1", "self", qk_norm=True)
            | attn("blocks.{i}.attn2", "cross", norm="blocks.{i}.norm2", qk_norm=True)
            | ff("blocks.{i}.ffn"),
            GATED,
        ),
    ),
    # Linear attention; convolutions, cut in value and gate behind the depthwise one.
    case(
        "sana",
        model(
            "SanaTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=12,
            mlp_ratio=2.0,
            sample_size=8,
            patch_size=1,
            **HEADS,
        ),
        latents(),
        Stack((0, 1), MODULATED | glu(f"{T}.ff.conv_inverted", 32, f"{T}.ff.conv_point"), GATED),
    ),
    # Norms before, and behind under the gate. Two refiners, one without modulation.
    case(
        "lumina2",
        model(
            "Lumina2Transformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(32, 32, 32),
            cap_feat_dim=12,
        ),
        latents(encoder_attention_mask=lambda: torch.ones(2, 5).bool()),
        *(
            Stack(
                (0, 1),
                attn(f"{at}.{{i}}.attn", norm=(f"{at}.{{i}}.{norm}", f"{at}.{{i}}.norm2"), qk_norm=True)
                | ffn(
                    f"{at}.{{i}}.feed_forward.linear_3",
                    f"{at}.{{i}}.feed_forward.linear_2",
                    (f"{at}.{{i}}.ffn_norm1", f"{at}.{{i}}.ffn_norm2"),
                    gate=f"{at}.{{i}}.feed_forward.linear_1",
                ),
                states,
            )
            for at, norm, states in (
                ("noise_refiner", "norm1.norm", GATED),
                (
                    "context_refiner",
                    "norm1",
                    {"attn.h": "context_refiner.{i}.norm2", "ffn.h": "context_refiner.{i}.ffn_norm2"},
                ),
                ("layers", "norm1.norm", GATED),
            )
        ),
    ),
    # Transformers of one layer among ResNet blocks, down, in the middle and up.
    case(
        "unet2d_condition",
        model(
            "UNet2DConditionModel",
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=8,
            norm_num_groups=4,
        ),
        lambda: {
            "sample": torch.randn(2, 4, 8, 8),
            "timestep": 3,
            "encoder_hidden_states": torch.randn(2, 5, 12),
        },
        *(
            Stack((layer,), unet_layer("{i}.transformer_blocks.0", width))
            for layer, width in (
                ("down_blocks.0.attentions.0", 16),
                ("mid_block.attentions.0", 32),
                ("up_blocks.1.attentions.0", 16),
                ("up_blocks.1.attentions.1", 16),
            )
        ),
    ),
    case(
        "prior",
        model("PriorTransformer", num_layers=2, embedding_dim=16, num_embeddings=5, additional_embeddings=4, **HEADS),
        lambda: {
            "hidden_states": torch.randn(2, 16),
            "timestep": 3,
            "proj_embedding": torch.randn(2, 16),
            "encoder_hidden_states": torch.randn(2, 5, 16),
        },
        Stack((0, 1), attn(f"{T}.attn1", norm=f"{T}.norm1") | ff(f"{T}.ff", f"{T}.norm3")),
    ),
)
