"""diffusers: newer pipelines, whose role tables were written before peftc had seen them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.diffusers import GATED, HEADS, T, attn, case, context_attn, ff, model
from benchmarks.foreign_models.tables import Roles, attention, both, ffn, glu

GATES: dict[str, str | None] = GATED | {"attn.cross.h": None}
MODULATED = attn(f"{T}.attn1", "self") | attn(f"{T}.attn2", "cross")


def z_block(at: str) -> Roles:
    norms = {"q_norm": f"{at}.attention.norm_q", "k_norm": f"{at}.attention.norm_k"}
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
    return attention(
        norm=(f"{at}.attention_norm1", f"{at}.attention_norm2"),
        **{role: f"{at}.attention.{name}" for role, name in names.items()},
        **norms,
    ) | ffn(
        f"{at}.feed_forward.w3",
        f"{at}.feed_forward.w2",
        (f"{at}.ffn_norm1", f"{at}.ffn_norm2"),
        f"{at}.feed_forward.w1",
    )


def audio() -> dict[str, Any]:
    angle = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.1])).repeat(1, 2)
    return {
        "hidden_states": torch.randn(2, 4, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "global_hidden_states": torch.randn(2, 1, 10),
        "rotary_embedding": (angle.cos(), angle.sin()),
    }


B = "blocks.{i}"
P = f"{B}.attention"
CONTEXT = glu(f"{T}.ff_context.net.0.proj", 42, f"{T}.ff_context.net.2")
JOINT = both(attn(f"{T}.attn1", qk_norm=True), context_attn(f"{T}.attn1", qk_norm=True))
MOCHI = glu(f"{T}.ff.net.0.proj", 42, f"{T}.ff.net.2")

CASES = (
    # Layers of space and of time in turn, from two lists.
    case(
        "latte",
        model(
            "LatteTransformer3DModel",
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            cross_attention_dim=16,
            caption_channels=12,
            activation_fn="gelu-approximate",
            norm_type="ada_norm_single",
            num_embeds_ada_norm=10,
            norm_elementwise_affine=False,
            attention_bias=True,
            video_length=3,
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 3, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 5, 12),
        },
        Stack((0, 1), MODULATED | ff(f"{T}.ff"), GATED),
        Stack((0, 1), attn(f"temporal_{T}.attn1") | ff(f"temporal_{T}.ff"), GATED),
    ),
    # Queries of the image; keys and values of image and text; a layer's own modulation.
    case(
        "prx",
        model(
            "PRXTransformer2DModel",
            in_channels=4,
            context_in_dim=12,
            hidden_size=16,
            mlp_ratio=2.0,
            num_heads=2,
            depth=2,
            axes_dim=[4, 4],
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([0.3, 0.5]),
            "encoder_hidden_states": torch.randn(2, 5, 12),
        },
        Stack(
            (0, 1),
            attention(
                q=f"{P}.img_qkv_proj[0:16]",
                k=(f"{P}.img_qkv_proj[16:32]", f"{P}.txt_kv_proj[0:16]"),
                v=(f"{P}.img_qkv_proj[32:48]", f"{P}.txt_kv_proj[16:32]"),
                o=f"{P}.to_out.0",
                q_norm=f"{P}.norm_q",
                k_norm=(f"{P}.norm_k", f"{P}.norm_added_k"),
            )
            | ffn(f"{B}.up_proj", f"{B}.down_proj", "", f"{B}.gate_proj"),
            GATED,
        ),
    ),
    # Lists of images and of texts; refiners of both before the layers of all tokens.
    case(
        "z_image",
        model(
            "ZImageTransformer2DModel",
            in_channels=6,
            dim=16,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=12,
            axes_dims=[4, 2, 2],
            axes_lens=[64, 16, 16],
        ),
        lambda: {
            "x": [torch.randn(6, 1, 8, 8) for _ in range(2)],
            "t": torch.tensor([0.3, 0.5]),
            "cap_feats": [torch.randn(5, 12) for _ in range(2)],
        },
        Stack((0,), z_block("noise_refiner.{i}"), GATED),
        Stack(
            (0,),
            z_block("context_refiner.{i}"),
            {"attn.h": "context_refiner.{i}.attention_norm2", "ffn.h": "context_refiner.{i}.ffn_norm2"},
        ),
        Stack((0, 1), z_block("layers.{i}"), GATED),
    ),
    # Fewer heads of keys and values in the cross attention.
    case(
        "stable_audio",
        model(
            "StableAudioDiTModel",
            sample_size=8,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            out_channels=4,
            cross_attention_dim=8,
            time_proj_dim=16,
            global_states_input_dim=10,
            cross_attention_input_dim=12,
        ),
        audio,
        Stack(
            (0, 1),
            attn(f"{T}.attn1", "self", f"{T}.norm1")
            | attn(f"{T}.attn2", "cross", f"{T}.norm2")
            | glu(f"{T}.ff.net.0.proj", 64, f"{T}.ff.net.2", f"{T}.norm3"),
        ),
    ),
    # The tokens of each text are picked by its mask.
    case(
        "mochi",
        model(
            "MochiTransformer3DModel",
            patch_size=2,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=4,
            text_embed_dim=16,
            time_embed_dim=16,
            max_sequence_length=5,
            **HEADS,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            "timestep": torch.tensor([3, 5]),
            "encoder_attention_mask": torch.ones(2, 5).bool(),
        },
        Stack((0,), both(JOINT, MOCHI, CONTEXT), GATED),
        Stack((1,), {r: n[:1] if r == "attn.o" else n for r, n in both(JOINT, MOCHI).items()}, GATED),
    ),
)
