"""Changes of a highest rank: what vLLM takes, the nearest by singular values, and conversions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from peftc.cli.main import main
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, edited, in_peft, tensors
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
QV = "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4, alpha=6) }"
HADAMARD = "edit a at layer[*].attn.q { w += hadamard(r=3) }"


def vllm_name(name: str) -> str:
    """The module of a tensor, as `parse_fine_tuned_lora_name` of vLLM 0.33 reads it."""
    parts = name.split(".")
    assert name.startswith("base_model.model.")
    if parts[-2] in ("lora_A", "lora_B") and parts[-1] == "weight":
        return ".".join(parts[2:-2])
    assert parts[-1] in ("weight", "bias")
    assert parts[-2] in ("score", "classifier")
    return parts[-2]


def vllm_scaling(config: dict[str, Any], module: str) -> tuple[int, float]:
    """Rank and scaling of a module, as `PEFTHelper.get_rank_and_scaling` of vLLM 0.33."""

    def match(pattern: dict[str, Any]) -> Any:
        return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), None)

    rank = match(config["rank_pattern"]) or config["r"]
    alpha = match(config["alpha_pattern"]) or config["lora_alpha"]
    return rank, alpha / (rank**0.5 if config["use_rslora"] else rank)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", QV),
        ("gpt2", QV),
        ("llama", QV + "\nedit b at layer[1].ffn.down { h += 2 * lora(x, r=3, rslora=true) }"),
        ("bert-classifier", QV + '\ntrain head = [w, b] at "classifier"'),
    ],
)
def test_vllm_reads_the_names_and_scales(name: str, spec: str, tmp_path: Path) -> None:
    model = edited(name, spec, torch.float32)
    report = peftc.export(model, tmp_path / "out", to="vllm")
    assert report.notes == ("start vLLM with --enable-lora --max-lora-rank 8",)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config.keys() >= {"r", "lora_alpha", "target_modules"}
    assert not config["use_dora"]
    assert config["bias"] == "none"
    own = tensors(tmp_path / "out")
    modules = dict(model.named_modules())
    for key, tensor in own.items():
        module = vllm_name(key)
        assert module in modules or module == "classifier"
        if key.endswith("lora_A.weight"):
            rank, scaling = vllm_scaling(config, module)
            assert rank == len(tensor)
            other = own[key.replace("lora_A", "lora_B")]
            assert other.shape[1] == rank
            assert scaling > 0


def test_what_vllm_does_not_load_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    norms = edited("llama", QV + "\ntrain n = [w] at layer[*].ffn.norm")
    refused("P801", lambda: peftc.export(norms, out, to="vllm"))
    table = edited("llama", "edit a at embed { h += lora(x, r=2) }")
    refused("P801", lambda: peftc.export(table, out, to="vllm"))
    model = edited("llama", QV)
    refused("P805", lambda: peftc.export(model, out, to="vllm", max_rank=3))
    refused("P805", lambda: peftc.export(model, out, to="vllm", max_rank=1))
    refused("P545", lambda: peftc.export(model, out, svd=True))
    assert not out.exists()


def change(model: Any, module: str) -> torch.Tensor:
    """W' − W by folding a copy."""
    before = dict(zoo.build("llama", torch.float64).named_parameters())[f"{module}.weight"].detach()
    peftc.fold(model)
    return model.get_parameter(f"{module}.weight").detach() - before


@pytest.mark.parametrize("spec", [HADAMARD, "edit a at layer[*].attn.q { h *= vector() }", QV])
def test_an_approximation_is_the_nearest_and_says_how_near(spec: str, tmp_path: Path) -> None:
    model = edited("llama", spec)
    report = peftc.export(model, tmp_path / "out", max_rank=2, svd=True)
    module = "model.layers.0.self_attn.q_proj"
    delta = change(model, module)
    values = torch.linalg.svdvals(delta)
    nearest = (values[2:].square().sum() / values.square().sum()).sqrt()
    own = tensors(tmp_path / "out")
    a, b = (own[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "AB")
    assert torch.allclose((delta - b @ a).norm() / delta.norm(), nearest, atol=1e-5)
    (one,) = (one for one in report.modules if one.module == module)
    assert one.error == pytest.approx(float(nearest), abs=1e-5)
    assert "relative error at most" in str(report)


def test_a_full_rank_is_near_enough(tmp_path: Path) -> None:
    model = edited("llama", "edit a at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }")
    report = peftc.export(model, tmp_path / "out", max_rank=32, svd=True)
    assert max(one.error or 0.0 for one in report.modules) < 1e-12
    assert_same_outputs(model, in_peft("llama", tmp_path / "out"), "llama")


def test_a_change_of_the_bias_has_no_near_one(tmp_path: Path) -> None:
    model = edited("bert", "edit a at layer[*].attn.q { h *= vector() }")
    refused("P801", lambda: peftc.export(model, tmp_path / "out", max_rank=4, svd=True))


@pytest.mark.parametrize(("spec", "exact"), [(HADAMARD, False), (QV, True)])
def test_convert_to_lora(spec: str, exact: bool, tmp_path: Path) -> None:
    zoo.build("llama", torch.float32).save_pretrained(tmp_path / "base")
    model = edited("llama", spec, torch.float32)
    peftc.save(model, tmp_path / "adapter")
    result, modules = peftc.convert(tmp_path / "adapter", tmp_path / "lora", rank=9, model=tmp_path / "base")
    assert "lora(x, r=" in result.spec
    assert all(one.exact == exact for one in modules)
    again = peftc.load(tmp_path / "lora", zoo.build("llama", torch.float32))
    inputs = zoo.inputs("llama", model)
    assert torch.allclose(again(**inputs).logits, model(**inputs).logits, atol=1e-4)
    command = ["convert", str(tmp_path / "adapter"), "--to", "lora", "--rank", "2", "-o", str(tmp_path / "two")]
    assert main([*command, "--model", str(tmp_path / "base")]) == 0
    refused("P545", lambda: peftc.convert(tmp_path / "adapter", tmp_path / "no", rank=0))
