"""Modes in which the model itself raises are reported as checks that were not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import peftc
from peftc.verification import Verification
from tests.verification.test_faults import codes

SPEC = "peft 1\nedit e at layer[*].ffn { h += adapter(x, r=2) }\n"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """`fault` gets each result; it may raise or change it."""

    def __init__(self, fault: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.fault = nn.ModuleList(Layer() for _ in range(2)), fault

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.fault(self, x)


def no_training(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        raise RuntimeError("this model is not trained\nnever")
    return x


def no_inference(model: nn.Module, x: Tensor) -> Tensor:
    if torch.is_inference_mode_enabled():
        raise ValueError("no inference")
    return x


def written_in_place(model: nn.Module, x: Tensor) -> Tensor:
    y = x.exp()
    z = y * y
    y += 1
    return z + y


def no_gradients(model: nn.Module, x: Tensor) -> Tensor:
    return x.detach()


def verified(fault: Callable[[nn.Module, Tensor], Tensor], spec: str = SPEC) -> Verification:
    torch.manual_seed(0)
    model = Model(fault).double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return peftc.verify(peftc.compile(spec, model, seed=0, sample={"x": x}))


def outcomes(report: Verification) -> dict[str, str]:
    return {check.name: f"{check.outcome}: {check.detail}" for check in report.checks}


@pytest.mark.parametrize(
    ("fault", "check", "why"),
    [
        (no_training, "train, dropout 0: outputs", "RuntimeError: this model is not trained"),
        (no_inference, "inference_mode: outputs", "ValueError: no inference"),
        (written_in_place, "eval, with gradients: gradients", "RuntimeError: one of the variables needed for gradient"),
    ],
)
def test_a_call_pattern_that_the_model_does_not_support(fault: Any, check: str, why: str) -> None:
    report = verified(fault)
    assert report.ok, str(report)
    outcome = outcomes(report)
    assert outcome[check].startswith("not checked")
    assert why in outcome[check]
    assert outcome["outputs equal the equations, parameters moved"].startswith("holds")
    assert outcome["each edit alone moves the output, and nothing before it"].startswith("holds")


def test_results_without_gradients_are_compared() -> None:
    report = verified(no_gradients)
    assert "P602" not in codes(report)


def test_an_error_of_the_compiled_model_only_is_a_finding() -> None:
    compiled: list[bool] = []

    def no_edits(model: nn.Module, x: Tensor) -> Tensor:
        if compiled and any("peftc" in name for name, _ in model.named_parameters()):
            raise RuntimeError("what is edited does not run")
        return x

    model, x = Model(no_edits).double().eval(), torch.randn(2, 3, 8, dtype=torch.float64)
    peftc.compile(SPEC, model, seed=0, sample={"x": x})
    compiled.append(True)
    report = peftc.verify(model)
    assert codes(report) == {"P602", "P607"}
    assert "the compiled model raises RuntimeError: what is edited does not run" in str(report.diagnostics)


def test_entries_that_cannot_be_selected() -> None:
    with pytest.raises(peftc.PeftcError, match="P509"):
        verified(written_in_place, "peft 1\nedit e at layer[*].ffn.up { w += sparse(density=0.1, select=fisher) }\n")


def test_a_model_of_two_towers() -> None:
    """It has no embedding of its own; its text model's are used."""
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    ids: dict[str, Any] = {
        "vocab_size": 61,
        "max_position_embeddings": 32,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    config = transformers.CLIPConfig(
        text_config={**size, **ids}, vision_config={**size, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    model = transformers.CLIPModel(config).eval()
    spec = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2, alpha=4) }\n"
    report = peftc.verify(peftc.compile(spec, model, seed=0, verify=True))
    assert report.ok, str(report)
    assert report.witnessed == report.sites == 4


def test_values_that_the_backward_pass_overwrites() -> None:
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    spec = "peft 1\nedit t at input.embed { h = concat(prompt(len=3), h) }\n"
    report = peftc.verify(peftc.compile(spec, transformers.RwkvForCausalLM(config).eval(), seed=0))
    outcome = outcomes(report)
    assert outcome["eval, with gradients: gradients"].startswith("not checked: RuntimeError: one of the variables")
    assert outcome["outputs equal the equations, parameters moved"].startswith("holds")


def test_a_base_whose_cache_changes_the_result() -> None:
    """With two rows, transformers' RWKV computes something else with a cache; prompts are compared
    with one row.
    """
    torch.manual_seed(0)
    config: Any = transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    model = transformers.RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    peftc.compile("peft 1\nedit p at embed { h = concat(prompt(len=3), h) }\n", model, seed=0)
    ids, name = torch.tensor([[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]), "decoding with a cache equals decoding without"
    outcomes_of = [outcomes(peftc.verify(model, {"input_ids": rows}))[name] for rows in (ids, ids[:1])]
    assert outcomes_of[0].endswith("the model without its edits computes something else with a cache")
    assert outcomes_of[1].startswith("holds")
