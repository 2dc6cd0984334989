"""Sample inputs, derived from the model's own forward and configuration."""

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.diagnostics import PeftcError
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.skeleton import sample_inputs
from tests import zoo


@pytest.mark.parametrize("name", zoo.ALL)
def test_ids_for_every_stack_and_no_mask(name: str) -> None:
    fake = fake_copy(zoo.build(name))
    inputs = sample_inputs(fake)
    assert set(inputs) == {"input_ids"} | ({"decoder_input_ids"} if fake.config.is_encoder_decoder else set())
    cache = {"use_cache": True} if name in zoo.GENERATING else {}
    with fake_mode(fake), torch.no_grad():
        out = fake(**inputs, **cache)
    assert (out.get("past_key_values") is not None) == (name in zoo.GENERATING)


def test_a_model_with_unknown_inputs_asks_for_a_sample() -> None:
    with pytest.raises(PeftcError) as excinfo:
        sample_inputs(fake_copy(nn.Linear(2, 2)))
    assert excinfo.value.diagnostics[0].code == "P507"
    assert "sample=" in str(excinfo.value)


def test_a_wrapper_names_the_model_that_has_an_input() -> None:
    model = nn.Sequential(nn.ModuleDict({"model": zoo.build("bert")}), nn.Linear(2, 2))
    with pytest.raises(PeftcError) as excinfo:
        peftc.compile("peft 1  edit q at layer[*].attn.q { h += lora(x, r=2) }", model)
    assert 'compile `model.get_submodule("0.model")`' in str(excinfo.value)


class Convolution(nn.Module):
    """PyTorch has no convolution of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv1d(4, 8, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return self.down(nn.functional.conv1d(self.first(x), more["kernels"][0]).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_sample_has_the_dtype_of_its_model(dtype: torch.dtype) -> None:
    """The analysis runs on a copy that is in at least float32: so is its sample."""
    model = Convolution().to(dtype)
    sample = {"x": torch.ones(3, 4, 5, dtype=dtype), "more": {"kernels": [torch.ones(8, 8, 1, dtype=dtype)]}}
    base = model(**sample)
    peftc.compile('peft 1  edit a at "down" { h += lora(x, r=2) }', model, sample=sample)
    assert torch.equal(model(**sample), base)


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("site", ["layer[*].ffn", "layer[*].ffn.up", '"layers.*.up"'])
def test_a_sample_stays_as_it_is_where_the_model_writes_into_it(site: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([WritesIntoItsInput(), WritesIntoItsInput()])

        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            seen.append(x)
            return x

    x, model = torch.randn(2, 5, 8), Model().eval()
    sample: dict[str, Any] = {"x": x.clone(), "seen": []}
    peftc.sites(model, sample=sample)
    peftc.compile(f"peft 1  edit e at {site} {{ h += lora(x, r=1) }}", model, samples=[sample, sample], seed=0)
    report = peftc.verify(model, sample)
    assert report.ok, str(report)
    assert torch.equal(sample["x"], x)
    assert not sample["seen"]
