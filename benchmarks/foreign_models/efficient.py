"""Small packages with one idea about attention each. Read: the module of the package's own name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, both, ffn, glu, packed, sequence, split_kv, tokens


def built(module: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(module), name)(**arguments)


def case(name: str, build: Callable[[], nn.Module], inputs: Any, *stacks: Stack, source: str = "") -> Case:
    return Case(f"{name}/model", name, build, inputs, stacks, source=source)


LANGUAGE: dict[str, Any] = {"num_tokens": 50, "dim": 16, "depth": 2, "heads": 2}


def four(at: str, norm: str, out: str = "to_out") -> Roles:
    return attention(q=f"{at}.to_q", k=f"{at}.to_k", v=f"{at}.to_v", o=f"{at}.{out}", norm=norm)


def prenorm_pair(at: str) -> Roles:
    """[PreNorm(attention), PreNorm(Chunk(w1, w2))]."""
    return four(f"{at}.0.fn", f"{at}.0.norm") | ffn(f"{at}.1.fn.fn.w1", f"{at}.1.fn.fn.w2", f"{at}.1.norm")


# Half-step feed-forward parts before and behind; a convolution between; a norm behind the last sum.
CONFORMER = Stack(
    (0, 1),
    both(
        split_kv(
            "layers.{i}.attn.fn.to_q",
            "layers.{i}.attn.fn.to_kv",
            16,
            o="layers.{i}.attn.fn.to_out",
            norm="layers.{i}.attn.norm",
        ),
        *(
            ffn(f"layers.{{i}}.{at}.fn.fn.net.0", f"layers.{{i}}.{at}.fn.fn.net.3", f"layers.{{i}}.{at}.fn.norm")
            for at in ("ff1", "ff2")
        ),
        {
            "ffn.norm": "layers.{i}.post_norm.weight",
            "mixer.norm": ("layers.{i}.conv.net.0.weight", "layers.{i}.conv.net.5.weight"),
        },
    ),
    {"ffn.h": None},
)

PERCEIVER = (
    Stack(
        (0, 1),
        split_kv(
            "layers.{i}.cross_attn.fn.to_q",
            "layers.{i}.cross_attn.fn.to_kv",
            8,
            kind="cross",
            o="layers.{i}.cross_attn.fn.to_out",
            norm=("layers.{i}.cross_attn.norm", "layers.{i}.cross_attn.norm_context"),
        )
        | glu("layers.{i}.cross_ff.fn.net.0", 64, "layers.{i}.cross_ff.fn.net.2", "layers.{i}.cross_ff.norm"),
    ),
    Stack(
        ("0.self_attns.0", "1.self_attns.0"),
        split_kv(
            "layers.{i}.0.fn.to_q",
            "layers.{i}.0.fn.to_kv",
            16,
            kind="self",
            o="layers.{i}.0.fn.to_out",
            norm="layers.{i}.0.norm",
        )
        | glu("layers.{i}.1.fn.net.0", 64, "layers.{i}.1.fn.net.2", "layers.{i}.1.norm"),
    ),
)

CASES = (
    case(
        "conformer",
        built(
            "conformer",
            "Conformer",
            dim=16,
            depth=2,
            dim_head=8,
            heads=2,
            ff_mult=2,
            conv_expansion_factor=2,
            conv_kernel_size=3,
        ),
        sequence(),
        CONFORMER,
        source="`Scale(0.5, …)` calls what it wraps: no module has h of a feed-forward part.",
    ),
    case(
        "perceiver-pytorch",
        built(
            "perceiver_pytorch",
            "Perceiver",
            num_freq_bands=2,
            depth=2,
            max_freq=4.0,
            input_channels=3,
            input_axis=2,
            num_latents=4,
            latent_dim=16,
            cross_heads=1,
            latent_heads=2,
            cross_dim_head=8,
            latent_dim_head=8,
            num_classes=5,
            self_per_cross_attn=1,
            weight_tie_layers=False,
        ),
        lambda: {"data": torch.randn(2, 8, 8, 3)},
        *PERCEIVER,
    ),
    # Keys and values pass an einsum with a parameter (tokens, k) that shortens them.
    case(
        "linformer",
        built("linformer", "LinformerLM", seq_len=8, k=4, dim_head=8, **LANGUAGE),
        tokens(),
        Stack(
            (0, 1),
            four("linformer.net.layers.{i}.0.fn", "linformer.net.layers.{i}.0.norm")
            | ffn(
                "linformer.net.layers.{i}.1.fn.w1",
                "linformer.net.layers.{i}.1.fn.w2",
                "linformer.net.layers.{i}.1.norm",
            ),
        ),
    ),
    case(
        "mambapy",
        lambda: _mamba(),
        sequence(),
        Stack((0, 1), {"mixer.norm": "layers.{i}.norm.weight"}),
        source="No attention and no feed-forward part.",
    ),
    case(
        "local-attention",
        built(
            "local_attention",
            "LocalTransformer",
            causal=True,
            local_attn_window_size=4,
            max_seq_len=16,
            dim_head=8,
            num_residual_streams=1,
            **LANGUAGE,
        ),
        tokens(),
        Stack(
            (0, 1),
            packed("layers.{i}.0.branch.to_qkv", 16, o="layers.{i}.0.branch.to_out", norm="layers.{i}.0.branch.norm")
            | glu("layers.{i}.1.branch.1", 42, "layers.{i}.1.branch.4", "layers.{i}.1.branch.0"),
        ),
    ),
    # softmax(q)' features of keys, in an einsum: attention without a matrix of weights.
    case(
        "performer-pytorch",
        built("performer_pytorch", "PerformerLM", max_seq_len=16, dim_head=8, nb_features=8, **LANGUAGE),
        tokens(),
        Stack((0, 1), prenorm_pair("performer.net.layers.{i}")),
    ),
    # Query and key are one Linear; the blocks are reversible, with a backward written by hand.
    case(
        "reformer-pytorch",
        built(
            "reformer_pytorch", "ReformerLM", max_seq_len=16, bucket_size=4, n_hashes=1, full_attn_thres=64, **LANGUAGE
        ),
        tokens(),
        Stack(
            (0, 1),
            attention(
                q="reformer.layers.blocks.{i}.f.net.fn.toqk",
                k="reformer.layers.blocks.{i}.f.net.fn.toqk",
                v="reformer.layers.blocks.{i}.f.net.fn.tov",
                o="reformer.layers.blocks.{i}.f.net.fn.to_out",
                norm="reformer.layers.blocks.{i}.f.net.norm",
            )
            | ffn(
                "reformer.layers.blocks.{i}.g.net.fn.fn.w1",
                "reformer.layers.blocks.{i}.g.net.fn.fn.w2",
                "reformer.layers.blocks.{i}.g.net.norm",
            ),
        ),
    ),
    # Attention along one axis, then the other; then 3x3 convolutions as feed-forward parts, twice.
    case(
        "axial-attention",
        built("axial_attention", "AxialImageTransformer", dim=16, depth=2, heads=2, dim_heads=8, reversible=False),
        lambda: {"x": torch.randn(2, 16, 8, 8)},
        *(
            Stack(
                (0, 2),
                split_kv(
                    f"layers.blocks.{{i}}.{n}.fn.fn.to_q",
                    f"layers.blocks.{{i}}.{n}.fn.fn.to_kv",
                    16,
                    o=f"layers.blocks.{{i}}.{n}.fn.fn.to_out",
                    norm=f"layers.blocks.{{i}}.{n}.fn.norm",
                ),
            )
            for n in (0, 1)
        ),
        *(
            Stack(
                (1, 3),
                ffn(f"layers.blocks.{{i}}.{n}.1", f"layers.blocks.{{i}}.{n}.3", f"layers.blocks.{{i}}.{n}.0.g!"),
            )
            for n in (0, 1)
        ),
    ),
    # Landmarks, a pseudo-inverse in a loop, and a convolution of the values.
    case(
        "nystrom-attention",
        built(
            "nystrom_attention",
            "Nystromformer",
            dim=16,
            dim_head=8,
            heads=2,
            depth=2,
            num_landmarks=4,
            pinv_iterations=3,
        ),
        sequence(),
        Stack(
            (0, 1),
            packed("layers.{i}.0.fn.to_qkv", 16, o="layers.{i}.0.fn.to_out.0", norm="layers.{i}.0.norm")
            | ffn("layers.{i}.1.fn.net.0", "layers.{i}.1.fn.net.3", "layers.{i}.1.norm"),
        ),
    ),
    # softmax over features for q, over tokens for k; no matrix of weights.
    case(
        "linear-attention-transformer",
        built("linear_attention_transformer", "LinearAttentionTransformerLM", max_seq_len=8, **LANGUAGE),
        tokens(),
        Stack((0, 1), prenorm_pair("transformer.layers.layers.{i}")),
    ),
)


def _mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2))
