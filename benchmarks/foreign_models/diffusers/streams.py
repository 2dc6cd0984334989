"""diffusers: text and image in one attention."""

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
    context_attn,
    ff,
    latents,
    model,
    without_o,
)
from benchmarks.foreign_models.tables import both, ffn

JOINT = both(attn(f"{T}.attn"), context_attn(f"{T}.attn"), ff(f"{T}.ff"), ff(f"{T}.ff_context"))
# The last block drops the text: it has no output projection and no feed-forward part for it.
LAST = both(attn(f"{T}.attn"), without_o(context_attn(f"{T}.attn")), ff(f"{T}.ff"))
JOINT_NORMED = both(
    attn(f"{T}.attn", qk_norm=True), context_attn(f"{T}.attn", qk_norm=True), ff(f"{T}.ff"), ff(f"{T}.ff_context")
)
QWEN = both(
    attn(f"{T}.attn", qk_norm=True), context_attn(f"{T}.attn", qk_norm=True), ff(f"{T}.img_mlp"), ff(f"{T}.txt_mlp")
)
# Side by side; one Linear projects attention and hidden states, concatenated: neither o nor down.
SINGLE = without_o(attn("single_transformer_blocks.{i}.attn", qk_norm=True)) | {
    "ffn.up": "single_transformer_blocks.{i}.proj_mlp.weight"
}

CASES = (
    case(
        "sd3",
        model(
            "SD3Transformer2DModel",
            joint_attention_dim=12,
            caption_projection_dim=16,
            pooled_projection_dim=10,
            out_channels=4,
            pos_embed_max_size=8,
            **LATENT,
        ),
        latents(pooled_projections=lambda: torch.randn(2, 10)),
        Stack((0,), JOINT, GATED),
        Stack((1,), LAST, GATED),
    ),
    case(
        "flux",
        model(
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            joint_attention_dim=12,
            pooled_projection_dim=10,
            axes_dims_rope=(2, 2, 4),
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "pooled_projections": torch.randn(2, 10),
            "timestep": torch.tensor([0.3, 0.5]),
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(5, 3),
        },
        Stack((0, 1), JOINT_NORMED, GATED),
        Stack((0, 1), SINGLE, GATED),
    ),
    case(
        "qwen_image",
        model(
            "QwenImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            axes_dims_rope=(8, 4, 4),
        ),
        lambda: {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "timestep": torch.tensor([0.3, 0.5]),
            "img_shapes": [[(1, 4, 4)]] * 2,
            "encoder_hidden_states_mask": torch.ones(2, 5).long(),
        },
        Stack((0, 1), QWEN, GATED),
    ),
    # Streams apart, then together in blocks whose sum skips the attention: it only enters the norm.
    case(
        "auraflow",
        model(
            "AuraFlowTransformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            joint_attention_dim=12,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
            **HEADS,
        ),
        latents(),
        Stack(
            (0, 1),
            both(
                attn("joint_transformer_blocks.{i}.attn"),
                context_attn("joint_transformer_blocks.{i}.attn"),
                *(
                    ffn(f"{at}.linear_2", f"{at}.out_projection", gate=f"{at}.linear_1")
                    for at in ("joint_transformer_blocks.{i}.ff", "joint_transformer_blocks.{i}.ff_context")
                ),
            ),
            GATED,
        ),
        Stack(
            (0, 1),
            attn("single_transformer_blocks.{i}.attn")
            | ffn(
                "single_transformer_blocks.{i}.ff.linear_2",
                "single_transformer_blocks.{i}.ff.out_projection",
                gate="single_transformer_blocks.{i}.ff.linear_1",
            ),
            GATED,
        ),
    ),
    # One attention and feed-forward part for both streams, concatenated; norms called for each.
    case(
        "cogvideox",
        model(
            "CogVideoXTransformer3DModel",
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=12,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            patch_size=2,
            max_text_seq_length=5,
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "timestep": torch.tensor([3, 5]),
        },
        Stack(
            (0, 1),
            attn(f"{T}.attn1", norm=f"{T}.norm1.norm", qk_norm=True) | ff(f"{T}.ff", f"{T}.norm2.norm"),
            GATED,
        ),
    ),
    # One feed-forward part, called for each stream.
    case(
        "cogview4",
        model(
            "CogView4Transformer2DModel",
            patch_size=2,
            in_channels=4,
            num_layers=2,
            out_channels=4,
            text_embed_dim=12,
            time_embed_dim=8,
            condition_dim=4,
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 16, 12),
            "timestep": torch.tensor([3, 5]),
            "original_size": torch.ones(2, 2) * 64,
            "target_size": torch.ones(2, 2) * 64,
            "crop_coords": torch.zeros(2, 2),
        },
        Stack((0, 1), attn(f"{T}.attn1") | ff(f"{T}.ff"), GATED),
    ),
)
