"""diffusers: attention and feed-forward parts behind scales and gates of a time embedding (adaLN).

Read: models/transformers/*.py, models/attention.py, models/attention_processor.py. Norms without
parameters are not listed. `h` of a sub-layer is behind its gate, which no module computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, ffn

HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
LATENT: dict[str, Any] = {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
GATED: dict[str, str | None] = {"attn.h": None, "attn.self.h": None, "ffn.h": None}


def model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**arguments)

    return build


def attn(at: str, kind: str = "", norm: str | tuple[str, ...] = "", qk_norm: bool = False) -> Roles:
    norms = {"q_norm": f"{at}.norm_q", "k_norm": f"{at}.norm_k"} if qk_norm else {}
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
    return attention(kind, norm=norm, **{role: f"{at}.{name}" for role, name in names.items()}, **norms)


def context_attn(at: str, qk_norm: bool = False) -> Roles:
    """The projections of the other stream, in the same attention."""
    norms = {"q_norm": f"{at}.norm_added_q", "k_norm": f"{at}.norm_added_k"} if qk_norm else {}
    names = {"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj", "o": "to_add_out"}
    return attention(**{role: f"{at}.{name}" for role, name in names.items()}, **norms)


def ff(at: str, norm: str = "") -> Roles:
    return ffn(f"{at}.net.0.proj", f"{at}.net.2", norm)


def without_o(roles: Roles) -> Roles:
    return {role: names for role, names in roles.items() if role != "attn.o"}


def latents(**others: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Two latent images, a text of five tokens, and steps of time."""
    return lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "timestep": torch.tensor([0.3, 0.5]),
        **{name: value() for name, value in others.items()},
    }


def case(name: str, build: Callable[[], nn.Module], inputs: Any, *stacks: Stack, source: str = "") -> Case:
    return Case(f"diffusers/{name}", "diffusers", build, inputs, stacks, source=source)


T = "transformer_blocks.{i}"
