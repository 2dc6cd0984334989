"""litgpt: one class, configured as many language models. Read: litgpt/model.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, ffn, packed, tokens


def gpt(**arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from litgpt.config import Config
        from litgpt.model import GPT

        sizes = {"block_size": 16, "vocab_size": 50, "padded_vocab_size": 50, "n_layer": 2, "n_head": 2, "n_embd": 16}
        return GPT(Config(**sizes, **arguments))

    return build


H = "transformer.h.{i}"
LLAMA: dict[str, Any] = {
    "n_query_groups": 1,
    "norm_class_name": "RMSNorm",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
    "intermediate_size": 32,
}
PYTHIA = packed(f"{H}.attn.qkv", 16, o=f"{H}.attn.proj", norm=f"{H}.norm_1") | ffn(
    f"{H}.mlp.fc", f"{H}.mlp.proj", f"{H}.norm_2"
)
GROUPED = packed(f"{H}.attn.qkv", 16, 8, o=f"{H}.attn.proj", norm=f"{H}.norm_1")
LLAMA_MLP = ffn(f"{H}.mlp.fc_2", f"{H}.mlp.proj", f"{H}.norm_2", gate=f"{H}.mlp.fc_1")
GEMMA = packed(
    f"{H}.attn.qkv",
    16,
    8,
    o=f"{H}.attn.proj",
    norm=(f"{H}.norm_1", f"{H}.post_attention_norm"),
    q_norm=f"{H}.attn.norm_q",
    k_norm=f"{H}.attn.norm_k",
) | ffn(f"{H}.mlp.fc_2", f"{H}.mlp.proj", (f"{H}.norm_2", f"{H}.post_mlp_norm"), gate=f"{H}.mlp.fc_1")
MOE = {
    **GROUPED,
    "ffn.router": f"{H}.mlp.gate.weight",
    "ffn.experts.up": f"{H}.mlp.experts.{{0..3}}.fc_2.weight",
    "ffn.experts.gate": f"{H}.mlp.experts.{{0..3}}.fc_1.weight",
    "ffn.experts.down": f"{H}.mlp.experts.{{0..3}}.proj.weight",
    "ffn.norm": f"{H}.norm_2.weight",
}


def litgpt(name: str, roles: Roles, states: dict[str, str | None] | None = None, **arguments: Any) -> Case:
    stack = Stack((0, 1), roles, states or {})
    return Case(f"litgpt/{name}", "litgpt", gpt(**arguments), tokens("idx"), (stack,))


CASES = (
    litgpt("pythia", PYTHIA),
    litgpt("llama", GROUPED | LLAMA_MLP, mlp_class_name="LLaMAMLP", **LLAMA),
    litgpt(
        "gemma3",
        GEMMA,
        {"attn.h": f"{H}.post_attention_norm", "ffn.h": f"{H}.post_mlp_norm"},
        mlp_class_name="GemmaMLP",
        post_attention_norm=True,
        post_mlp_norm=True,
        sliding_window_size=4,
        sliding_window_indices=[1, 0],
        norm_qk=True,
        **LLAMA,
    ),
    litgpt(
        "moe",
        MOE,
        {"ffn.x": f"{H}.mlp", "ffn.h": f"{H}.mlp"},
        mlp_class_name="LLaMAMoE",
        n_expert=4,
        n_expert_per_token=2,
        moe_intermediate_size=32,
        **LLAMA,
    ),
)
