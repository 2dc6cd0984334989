"""Edits of experts that lie in one parameter compute in PEFT, as `target_parameters`, what they
compute here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import peftc
from tests.exchange.adapters import assert_same_outputs, edited, in_peft, tensors
from tests.laws.harness import close, randomise
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),  # which PEFT uses for parameters
]
DOWN = "edit d at layer[*].ffn.experts[*].down { w += lowrank(r=2, alpha=6) }\n"
SOME = "edit u at layer[*].ffn.experts[1..2].up { w += 2 * lowrank(r=3) }\n"
BOTH = "edit g at layer[*].ffn.experts[*].gate | layer[*].ffn.experts[*].up { w += lowrank(r=2) }\n"
SPECS = {
    "down": DOWN,
    "some experts, half of a parameter": SOME,
    "a gate and what it multiplies": BOTH,
    "two parameters of a module": DOWN + SOME,
    "beside a Linear": DOWN + "edit q at layer[*].attn.q { h += lora(x, r=4) }\n",
    "other scales": DOWN + "edit e at layer[*].ffn.experts[0].down { w += 5 * lowrank(r=1) }\n",
}


@pytest.mark.parametrize("case", SPECS)
def test_peft_computes_the_same(case: str, tmp_path: Path) -> None:
    model = edited("mixtral", SPECS[case])
    report = peftc.export(model, tmp_path / "out")
    theirs = in_peft("mixtral", tmp_path / "out")
    assert_same_outputs(model, theirs, "mixtral")
    assert all(one.exact for one in report.modules) == (case != "other scales")
    parameters = sum("experts" in one.module for one in report.modules)
    wrappers = [m for m in theirs.modules() if type(m).__name__ == "ParamWrapper"]
    assert len(wrappers) == parameters > 0


def test_tensors_have_the_bits_of_the_parameters(tmp_path: Path) -> None:
    model = edited("mixtral", DOWN, torch.float32)
    peftc.export(model, tmp_path / "out")
    exported, own = tensors(tmp_path / "out"), peftc.parameters(model)
    prefix = "base_model.model.model.layers.1.mlp.experts."
    a, b = (exported[f"{prefix}lora_{name}.weight"] for name in "AB")
    experts = a.shape[0] // 2
    for e in range(experts):
        site = f"d/decoder.layer[1].ffn.experts[{e}].down/lowrank."
        assert torch.equal(a.unflatten(0, (experts, 2))[e], own[f"{site}A"])
        assert torch.equal(b.unflatten(1, (2, experts))[:, :, e], own[f"{site}B"])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == []
    assert config["target_parameters"][1] == "model.layers.1.mlp.experts.down_proj"


def gpt_oss() -> Any:
    """Experts stored (in, out), with gates and ups in turns."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "vocab_size": 50,
    }
    config = GptOssConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")  # others have no float64
    return model


@pytest.mark.parametrize("spec", [DOWN, BOTH], ids=["down", "both"])
def test_experts_stored_in_out(spec: str, tmp_path: Path) -> None:
    model = peftc.compile(f"peft 2\n{spec}", gpt_oss(), seed=0)
    randomise(peftc.parameters(model))
    peftc.export(model, tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(gpt_oss(), str(tmp_path / "out")).eval()
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        close(theirs(ids).logits, model(ids).logits, "gpt_oss")


def test_a_parameter_is_nothing_for_vllm(tmp_path: Path) -> None:
    assert (
        "experts" in refused("P801", lambda: peftc.export(edited("mixtral", DOWN), tmp_path / "out", to="vllm")).message
    )


def test_a_rank_above_the_most_is_refused(tmp_path: Path) -> None:
    assert (
        "down_proj"
        in refused("P805", lambda: peftc.export(edited("mixtral", DOWN), tmp_path / "x", max_rank=1)).message
    )


def test_a_change_of_full_rank_is_refused(tmp_path: Path) -> None:
    model = edited("mixtral", "edit d at layer[*].ffn.experts[*].down { w = magnitude(w + lowrank(r=2)) }")
    refused("P801", lambda: peftc.export(model, tmp_path / "out"))
