"""Edits of bases that bitsandbytes has quantised, in memory: QLoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise
from tests.merging.checkpoints import same_bits
from tests.quantization.bases import add_folders, needs_libraries, quantised, whole

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
LORA = "edit q at layer[*].attn.{q, v} { h += lora(x, r=2) }"
MAGNITUDE = "edit w at layer[*].attn.{q, o} { w = magnitude(w + lowrank(r=2)) }"
EDITS = {
    "lora": LORA,
    "vectors": "edit k at layer[*].attn.{k, v} { h *= vector(init=1) }",
    "others": """
        edit a at layer[*].ffn { h += adapter(h, r=2) }
        edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }""",
    "magnitude": MAGNITUDE,
}
pytestmark = [pytest.mark.filterwarnings("ignore"), needs_libraries]


@pytest.fixture(name="libraries", autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    add_folders(monkeypatch)
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)  # whose product has no backward


def base(folder: Path, kind: str, **options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return quantised(folder / "whole", BitsAndBytesConfig(**KINDS[kind]), **options)


def compiled(model: Any, text: str) -> Any:
    peftc.compile(f"peft 2\n{text}", model, seed=0)
    randomise(peftc.parameters(model))
    return model


def logits(model: Any, grad: bool = False) -> Tensor:
    with torch.set_grad_enabled(grad):
        return model(**zoo.inputs("llama", model))[0]


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("kind", KINDS)
def test_edits_of_a_quantised_base(kind: str, edits: str, tmp_path: Path) -> None:
    model = base(tmp_path, kind)
    assert logits(model).isfinite().all()  # the first call of 8 bits moves codes to another place
    before, want = Before.of(model), logits(model)
    plan, plain = (peftc.plan(f"peft 2\n{EDITS[edits]}", one) for one in (model, whole(tmp_path / "whole")))
    assert (plan.model.parameters, plan.edits) == (plain.model.parameters, plain.edits)
    compiled(model, EDITS[edits])
    assert not peftc.verify(model).findings  # by hooks on the same base
    out = logits(model)
    assert (out - want).abs().max() > 1e-3
    ids = zoo.inputs("llama", model)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in peftc.parameters(model).values())
    assert not [n for n, p in model.named_parameters() if p.requires_grad and ".peftc." not in n]
    assert torch.equal(logits(copy.deepcopy(model)), out)
    arguments = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, **arguments)
    peftc.save(model, tmp_path / "adapter")
    again = peftc.load(tmp_path / "adapter", base(tmp_path, kind))
    logits(again)
    assert torch.equal(logits(again), out)
    assert torch.equal(again.generate(ids, **arguments), tokens)
    assert all("is packed" in one.reason or one.edit in "ap" for one in peftc.fold(model, dequantize=True).refused)
    assert torch.equal(logits(model), out)
    peftc.remove(model)
    now = Before.of(model)
    assert (now.classes, now.requires_grad, now.modules) == (before.classes, before.requires_grad, before.modules)
    assert now.state.keys() == before.state.keys()
    assert all(same_bits(value, now.state[name]) for name, value in before.state.items())  # codes may read as NaN
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("text", [LORA, MAGNITUDE], ids=["lora", "magnitude"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_way_to_plain_weights(kind: str, text: str, tmp_path: Path) -> None:
    """The adapter acts the same on what the base stands for, and folds into it."""
    model = compiled(base(tmp_path, kind), text)
    peftc.save(model, tmp_path / "adapter")
    dense = base(tmp_path, kind).dequantize()
    peftc.load(tmp_path / "adapter", dense)
    torch.testing.assert_close(logits(dense), logits(model), rtol=1e-4, atol=1e-4)
    assert not peftc.fold(dense).refused
    torch.testing.assert_close(logits(dense), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_beside_layers_in_float32(kind: str, tmp_path: Path) -> None:
    """As `prepare_model_for_kbit_training` of PEFT leaves a base."""
    model = base(tmp_path, kind, dtype=torch.bfloat16)
    compiled(model, f"{LORA}\n{MAGNITUDE.replace('{q, o}', 'o')}")
    assert logits(model).dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        if (parameter.dtype == torch.bfloat16 and parameter.ndim == 1) or "embed" in name or "lm_head" in name:
            parameter.data = parameter.data.float()
    assert logits(model).dtype == torch.float32
    logits(model, grad=True).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in peftc.parameters(model).values())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_trainer(kind: str, tmp_path: Path) -> None:
    """It takes the model when it is compiled, and not when the edits are out again."""
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(5, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    options: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "disable_tqdm": True}
    options |= {"gradient_checkpointing": True, "report_to": [], "use_cpu": True, "logging_steps": 1}

    def trainer(model: Any, folder: str = "out") -> Trainer:
        return Trainer(model, TrainingArguments(str(tmp_path / folder), **options), train_dataset=rows)

    model = base(tmp_path, kind)
    with pytest.raises(ValueError, match="purely quantized"):
        trainer(model)
    quantizer = model.hf_quantizer
    peftc.compile(f"peft 2\n{LORA}", model, seed=0)
    first = trainer(model)
    first.train()
    again = trainer(peftc.compile(f"peft 2\n{LORA}", base(tmp_path, kind), seed=9), "again")
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (first, again)]
    assert losses[0] == losses[1]
    with peftc.disabled(model):
        model.save_pretrained(tmp_path / "base")
        assert type(whole(tmp_path / "whole")).from_pretrained(tmp_path / "base").hf_quantizer.pre_quantized
    peftc.remove(model)
    assert model.hf_quantizer is quantizer
    with pytest.raises(ValueError, match="purely quantized"):
        trainer(model)
