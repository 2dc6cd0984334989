"""`peftc inspect`: the numbers of an adapter against dense matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftc
from peftc.cli.main import main

SPEC = """peft 2
edit qv at layer[*].attn.q | layer[*].attn.v { h += 4 * lora(x, r=4, alpha=8) }
edit ffn at layer[*].ffn { h += adapter(x, r=8, act=relu) }
edit scale at layer[1].attn.o { h *= vector() }
train head = [w] at head
"""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and an adapter of it."""
    result = tmp_path_factory.mktemp("inspection")
    llama().save_pretrained(result / "base")
    model = peftc.compile(SPEC, LlamaForCausalLM.from_pretrained(result / "base"), seed=3)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    peftc.save(model, result / "adapter")
    return result


def test_changes_are_those_of_the_weights(folder: Path) -> None:
    result = peftc.inspect(folder / "adapter")
    model = peftc.load(folder / "adapter", llama())
    before = {name: value.double() for name, value in llama().state_dict().items()}
    parameters = {name: value.detach() for name, value in peftc.parameters(model).items()}
    edits = {edit.name: {layer.layer: layer for layer in edit.layers} for edit in result.edits}
    assert list(edits) == ["qv", "ffn", "scale", "head"]
    for i in range(2):
        spectra = list[torch.Tensor]()
        for name in ("q", "v"):
            site = f"qv/decoder.layer[{i}].attn.self.{name}/lora"
            change = 4 * 2 * parameters[f"{site}.B"].double() @ parameters[f"{site}.A"].double()
            assert change.shape == before[f"model.layers.{i}.self_attn.{name}_proj.weight"].shape
            spectra.append(torch.linalg.svdvals(change))
        layer = edits["qv"][f"decoder.layer[{i}]"]
        assert layer.change == pytest.approx(float(torch.cat(spectra).square().sum().sqrt()), rel=1e-5)
        p = [values[:4] / values[:4].sum() for values in spectra]
        assert layer.effective_rank == pytest.approx(sum(float((-(q * q.log()).sum()).exp()) for q in p) / 2, rel=1e-5)
        assert layer.rank == 4
        own = [value for name, value in parameters.items() if name.startswith(f"qv/decoder.layer[{i}].")]
        assert layer.parameters == sum(value.numel() for value in own)
        assert layer.norm == pytest.approx(float(sum(value.double().square().sum() for value in own)) ** 0.5, rel=1e-5)
        assert edits["ffn"][f"decoder.layer[{i}]"].change is None
    assert sum(layer.parameters for edit in result.edits for layer in edit.layers) == result.totals.stored
    assert edits["head"]["head"].parameters == 50 * 32
    assert (result.seed, result.dtypes, result.base) == (3, ("float32",), str(folder / "base"))


def test_a_change_of_zero_has_no_rank(tmp_path: Path) -> None:
    peftc.save(peftc.compile(SPEC, llama(), seed=0), tmp_path / "adapter")
    edit = peftc.inspect(tmp_path / "adapter", model=llama()).edits[0]
    assert [(layer.change, layer.effective_rank) for layer in edit.layers] == [(0.0, 0.0)] * 2


def test_without_the_base_the_parameters_are_there(folder: Path, tmp_path: Path) -> None:
    model = peftc.load(folder / "adapter", llama())
    model.config._name_or_path = "nobody/nothing"
    peftc.save(model, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter.json"
    data = json.loads(path.read_text())
    data["base"]["id"] = "nobody/nothing"
    path.write_text(json.dumps(data))
    result = peftc.inspect(tmp_path / "adapter")
    assert any("changes are not measured" in note for note in result.notes)
    full = peftc.inspect(folder / "adapter")
    for one, other in zip(result.edits, full.edits, strict=True):
        assert [(layer.layer, layer.parameters) for layer in one.layers] == [
            (layer.layer, layer.parameters) for layer in other.layers
        ]
        assert all(layer.change is None for layer in one.layers)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "adapter"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(peftc.inspect(str(folder / "adapter")).model_dump_json())
    assert main(["inspect", str(folder / "adapter")]) == 0
    text = capsys.readouterr().out
    assert all(f"    {line}".rstrip() in text.splitlines() for line in data["spec"].splitlines())
    assert "ffn does not fold: " in text
    assert main(["inspect", str(folder / "base")]) == 1
    assert "error[P520]" in capsys.readouterr().err
