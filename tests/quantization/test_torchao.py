"""Edits of bases that torchao has quantised as transformers loads them, and `Trainer`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise
from tests.quantization.bases import add_folders, needs_libraries, quantised, whole

CONFIGS: dict[str, dict[str, Any]] = {
    "Int8WeightOnlyConfig": {},
    "Int8DynamicActivationInt8WeightConfig": {},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": torch.int4},
}
TEXT = """peft 2
edit q at layer[*].attn.{q, v} { h += lora(x, r=2) }
edit a at layer[*].ffn { h += adapter(h, r=2) }
edit w at layer[*].attn.o { w = magnitude(w + lowrank(r=2)) }
"""
pytestmark = [pytest.mark.filterwarnings("ignore"), needs_libraries]


@pytest.fixture(name="libraries", autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    add_folders(monkeypatch)
    pytest.importorskip("torchao")


def base(folder: Path, name: str) -> Any:
    from transformers import TorchAoConfig

    return quantised(
        folder / "whole", TorchAoConfig(getattr(import_module("torchao.quantization"), name)(**CONFIGS[name]))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_edits_of_a_quantised_base(name: str, tmp_path: Path) -> None:
    model = base(tmp_path, name)
    inputs, classes = zoo.inputs("llama", model), Before.of(model).classes
    with torch.no_grad():
        want = model(**inputs)[0]
        assert peftc.plan(TEXT, model).model.parameters == peftc.plan(TEXT, whole(tmp_path / "whole")).model.parameters
        peftc.compile(TEXT, model, seed=0)
        randomise(peftc.parameters(model))
        out = model(**inputs)[0]
    assert not peftc.verify(model).findings
    model(**inputs)[0].pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in peftc.parameters(model).values())
    peftc.save(model, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(peftc.load(tmp_path / "adapter", base(tmp_path, name))(**inputs)[0], out)
        assert torch.equal(peftc.remove(model)(**inputs)[0], want)
    assert {name: type(module) for name, module in model.named_modules()} == classes


def test_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"input_ids": row, "labels": row} for row in torch.randint(5, 50, (4, 6))]
    arguments = TrainingArguments(str(tmp_path / "out"), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    model = base(tmp_path, "Int8WeightOnlyConfig")
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model, arguments, train_dataset=rows)
    peftc.compile(TEXT, model, seed=0)
    before = {name: p.detach().clone() for name, p in peftc.parameters(model).items()}
    Trainer(model, arguments, train_dataset=rows).train()
    assert not all(torch.equal(p, before[name]) for name, p in peftc.parameters(model).items())
