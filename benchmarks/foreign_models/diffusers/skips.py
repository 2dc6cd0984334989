"""diffusers: later layers read the result of an earlier one beside the stream."""

from __future__ import annotations

import torch

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.diffusers import HEADS, attn, case, ff, model

HUNYUAN = (
    attn("blocks.{i}.attn1", "self", "blocks.{i}.norm1.norm", qk_norm=True)
    | attn("blocks.{i}.attn2", "cross", "blocks.{i}.norm2", qk_norm=True)
    | ff("blocks.{i}.ff", "blocks.{i}.norm3")
)

CASES = (
    # The last layer joins the stream with the first layer's, behind a norm and a Linear.
    case(
        "hunyuan_dit",
        model(
            "HunyuanDiT2DModel",
            in_channels=4,
            patch_size=2,
            sample_size=8,
            hidden_size=16,
            num_layers=4,
            cross_attention_dim=12,
            cross_attention_dim_t5=16,
            pooled_projection_dim=8,
            text_len=4,
            text_len_t5=5,
            use_style_cond_and_image_meta_size=False,
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([0.3, 0.5]),
            "encoder_hidden_states": torch.randn(2, 4, 12),
            "text_embedding_mask": torch.ones(2, 4),
            "encoder_hidden_states_t5": torch.randn(2, 5, 16),
            "text_embedding_mask_t5": torch.ones(2, 5),
        },
        Stack((0, 1, 2), HUNYUAN),
        Stack((3,), HUNYUAN, optional={"attn.self.norm": "blocks.{i}.skip_norm.weight"}),
    ),
)
