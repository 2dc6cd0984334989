"""Models of published shapes, to be compiled on the meta device: no memory for weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.common import ALPHA, MODULES, ROLES, R, llama


@dataclass(frozen=True)
class Target:
    """A model of some shape, and LoRA on its Linears by peftc's roles and by PEFT's names."""

    model_class: Any
    config: Callable[[int | None], Any]  # by the number of layers; None: that of the shape
    roles: tuple[str, ...]
    modules: list[str]

    @property
    def spec(self) -> str:
        sites = " | ".join(f"layer[*].{role}" for role in self.roles)
        return f"peft 1\n\nedit all at {sites} {{ h += lora(x, r={R}, alpha={ALPHA}) }}\n"

    def skeleton(self, layers: int | None = None) -> nn.Module:
        with torch.device("meta"):
            return self.model_class(self.config(layers))


ATTENTION, FFN = ("attn.q", "attn.k", "attn.v", "attn.o"), ("ffn.up", "ffn.down")


def _llama(hidden: int, ffn: int, depth: int, heads: int, vocabulary: int) -> Target:
    def config(layers: int | None) -> Any:
        return llama(hidden, ffn, layers or depth, heads, 8, vocabulary)

    return Target(transformers.LlamaForCausalLM, config, ROLES, MODULES)


def _bart(layers: int | None) -> Any:
    return transformers.BartConfig(encoder_layers=layers or 12, decoder_layers=layers or 12)


def _t5(layers: int | None) -> Any:
    return transformers.T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=layers or 24, num_heads=16)


def _vit(layers: int | None) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return transformers.ViTConfig(**sizes, num_hidden_layers=layers or 24)


def _mixtral(layers: int | None) -> Any:
    return transformers.MixtralConfig(num_hidden_layers=layers or 32)


COMPILED = {
    "LLaMA 70B": _llama(8192, 28672, 80, 64, 32000),
    "BART-large": Target(
        transformers.BartForConditionalGeneration,
        _bart,
        (*ATTENTION, *FFN),
        ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    ),
    "T5-large": Target(
        transformers.T5ForConditionalGeneration, _t5, (*ATTENTION, *FFN), ["q", "k", "v", "o", "wi", "wo"]
    ),
    "ViT-L": Target(
        transformers.ViTForImageClassification,
        _vit,
        (*ATTENTION, *FFN),
        ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    ),
    "LLaMA 1B": _llama(2048, 8192, 16, 32, 128256),
    # PEFT's LoRA does not take stacked experts by default, so the attention alone.
    "Mixtral 8x7B": Target(
        transformers.MixtralForCausalLM, _mixtral, ATTENTION, ["q_proj", "k_proj", "v_proj", "o_proj"]
    ),
}
DEEP = _llama(16384, 53248, 126, 128, 128256)  # LLaMA 405B


def _deepseek(layers: int | None) -> Any:
    return transformers.DeepseekV3Config(num_hidden_layers=layers or 61)


def _kimi(layers: int | None) -> Any:
    return transformers.DeepseekV3Config(
        vocab_size=163840,
        num_hidden_layers=layers or 61,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )


PLANNED: dict[str, Callable[[int | None], Any]] = {"Kimi-K2": _kimi, "DeepSeek-V3": _deepseek}
PLANNED_SPEC = f"""\
peft 1

edit attention at layer[*].attn.o {{ h += lora(x, r={R}, alpha={ALPHA}) }}
edit experts at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down {{ w += lowrank(r={R}) }}
"""
