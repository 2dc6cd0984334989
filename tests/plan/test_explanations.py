"""The examples of explanations that need a model: what is wrong has the code, what is right has no
diagnostic.
"""

from __future__ import annotations

import re
import textwrap
from functools import cache

import pytest
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from peftc.compiler import flat_spec, plan_edits
from peftc.diagnostics import PeftcError
from peftc.diagnostics.codes import CODES, RIGHT, WRONG

TOKENS = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
MODELS = {
    "llama": lambda: LlamaConfig(
        hidden_size=768,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1024,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        **TOKENS,
    ),
    "bart": lambda: BartConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        architectures=["BartForConditionalGeneration"],
        **TOKENS,
    ),
    "gpt2": lambda: GPT2Config(n_embd=60, n_layer=3, n_head=4, architectures=["GPT2LMHeadModel"], **TOKENS),
    "bert": lambda: BertConfig(
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        architectures=["BertForMaskedLM"],
        **TOKENS,
    ),
}
CONDITIONS = {
    "every model": MODELS,
    "a model of three layers": ("llama", "gpt2", "bert"),
    "a model of width 768": ("llama",),
    "a model of 2,048 positions": ("llama",),
    "a model with an encoder and a decoder": ("bart",),
    "a model with an encoder of two layers and a decoder of three": ("bart",),
    "a model whose ffn is wider than its layers": MODELS,
    "a model that computes q, k and v by one Linear": ("gpt2",),
    "a model without cross-attention": ("llama", "gpt2", "bert"),
}
EXAMPLE = re.compile(rf"^{WRONG[:-1]}, on (.+):\n\n((?: +.*\n|\n)+){RIGHT}\n\n((?: +.*(?:\n|$)|\n)+)", re.MULTILINE)
EXAMPLES = [(code, *parts) for code, info in CODES.items() for parts in EXAMPLE.findall(info.explanation)]


@cache
def config(name: str) -> PreTrainedConfig:
    return MODELS[name]()


def codes(text: str, model: str) -> set[str]:
    """Of errors, of warnings and of expectations that fail."""
    try:
        planned = plan_edits(flat_spec(textwrap.dedent(text)), config(model))
    except PeftcError as error:
        return {diagnostic.code for diagnostic in error.diagnostics}
    return {diagnostic.code for diagnostic in (*planned.warnings, *planned.failed_expectations)}


def test_every_example_is_here() -> None:
    headings = [line for info in CODES.values() for line in info.explanation.splitlines() if line.startswith("Wrong, ")]
    assert len(EXAMPLES) == len(headings) > 20


@pytest.mark.parametrize(("code", "condition", "wrong", "right"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
def test_examples_give_their_codes(code: str, condition: str, wrong: str, right: str) -> None:
    for model in CONDITIONS[condition]:
        assert codes(wrong, model) == {code}, model
        assert codes(right, model) == set(), model
