"""Inferred roles against two external tables: PEFT's default targets for LoRA, and transformers'
tensor-parallel plans.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT

import peftc
from benchmarks.families import Pair, build, pairs
from benchmarks.families.roles import plan_disagreements, table_disagreements

PREFERRED = ("seq2seq", "causal-lm", "masked-lm", "image-text-to-text")
# Types of PEFT's table that transformers itself does not have (their code comes with the
# checkpoint).
FOREIGN = {"chatglm", "RefinedWebModel", "RefinedWeb", "btlm", "rwkv7"}
# Where PEFT's targets are not exactly q and v: type -> (end of the module's name, why).
EXPLAINED: dict[str, dict[str, str]] = {
    "phi": {"mlp.fc1": "the table names the ffn as well", "mlp.fc2": "the table names the ffn as well"},
    "nemotron_h": {"k_proj": "the table names all of the attention", "o_proj": "the table names all of the attention"},
    "blip-2": dict.fromkeys(
        ("attention.query", "attention.value", "self_attn.qkv"),
        "the table names those of the language model alone, not those of the Q-Former and of the images",
    ),
    "rwkv": dict.fromkeys(
        (
            "attention.key",
            "attention.value",
            "attention.receptance",
            "attention.output",
            "feed_forward.key",
            "feed_forward.value",
            "feed_forward.receptance",
        ),
        "a recurrence without a softmax: it has neither q nor v",
    ),
}


def _types() -> list[Pair]:
    types = {}
    for pair in sorted(pairs(), key=lambda p: PREFERRED.index(p.mapping) if p.mapping in PREFERRED else 9):
        types.setdefault(pair.type, pair)
    return [types[t] for t in PEFT if t in types]


@pytest.mark.parametrize("pair", _types(), ids=lambda pair: pair.type)
def test_q_and_v_are_the_default_targets_of_peft(pair: Pair) -> None:
    model, table = _sites(pair)
    explained = EXPLAINED.get(pair.type, {})
    disagreements = table_disagreements(model, table, PEFT[pair.type])
    assert [line for line in disagreements if not line.split(" ")[0].endswith(tuple(explained) or ("\0",))] == []
    for end in explained:
        assert any(line.split(" ")[0].endswith(end) for line in disagreements), f"{end} needs no explanation any more"


def test_only_foreign_types_of_the_table_are_left_out() -> None:
    assert set(PEFT) - {p.type for p in pairs()} == FOREIGN


PLANNED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
    "olmo2",
    "cohere",
    "gpt_neox",
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "llama4_text",
    "gpt_oss",
    "jamba",
    "granite",
    "starcoder2",
    "smollm3",
)


@pytest.mark.parametrize("model_type", PLANNED)
def test_roles_are_those_of_the_tensor_parallel_plan(model_type: str) -> None:
    model, table = _sites(Pair("causal-lm", model_type, ""))
    assert plan_disagreements(model, table) == []


def _sites(pair: Pair) -> tuple[torch.nn.Module, peftc.addressing.sites.SiteTable]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = build(pair.mapping, pair.type)
        return model, peftc.sites(model)
