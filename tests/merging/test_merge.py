"""A merged checkpoint is the folded model, bit for bit, whatever its files look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.merging.checkpoints import LINEARS, LORA, assert_merged, save_adapter, save_base, tensors

EXPERTS = (
    "edit e at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down { w += lowrank(r=2) }\n"
    "edit w at layer[*].ffn.experts[0].gate { w += lowrank(r=1) }"
)
SPECS = {
    "lora": ("llama", LORA),
    "linears": ("llama", LINEARS.replace("ffn.hidden", "ffn.hidden")),
    "fused qkv, Conv1D": ("gpt2", LINEARS),
    "encoder and decoder": ("bart", LINEARS),
    "norms and biases": (
        "bert",
        "train n = [w, b] at layer[*].norm\nedit a at layer[*].attn.q { b += vector(init=0) }",
    ),
    "tied embeddings": ("t5", LINEARS),
    "grouped queries": ("qwen3", LINEARS),
    "stacked experts": ("mixtral", EXPERTS),
    "images": ("vit", LORA),
    "with an embedding": ("llama", 'edit t at "model.embed_tokens" { h *= vector(init=1) }\n' + LORA),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", SPECS)
def test_merge_is_fold(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, spec = SPECS[case]
    cls = save_base(tmp_path / "base", name, dtype)
    model = save_adapter(tmp_path / "adapter", tmp_path / "base", cls, spec)
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    expected = peftc.fold(model)
    assert not expected.refused
    changed = assert_merged(tmp_path / "out", tmp_path / "base", model, dtype)
    assert changed
    assert {key for tensor in report.tensors for key in tensor.keys} == set(changed)
    assert report.folded == tuple(folded.edit for folded in expected.folded)


@pytest.mark.parametrize("case", SPECS)
def test_plain_transformers_computes_what_the_edited_model_computes(case: str, tmp_path: Path) -> None:
    name, spec = SPECS[case]
    cls = save_base(tmp_path / "base", name, torch.float64)
    model: Any = save_adapter(tmp_path / "adapter", tmp_path / "base", cls, spec)
    peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    loaded: Any = cls.from_pretrained(tmp_path / "out", dtype="auto").eval()
    for one in (model, loaded):
        zoo._exact_norms(one)  # pyright: ignore[reportPrivateUsage]
        if name == "mixtral":
            one.set_experts_implementation("batched_mm")
    with torch.no_grad():
        difference = model(**zoo.inputs(name, model))[0] - loaded(**zoo.inputs(name, loaded))[0]
    assert difference.abs().max() < 1e-10


def test_one_file(tmp_path: Path) -> None:
    cls = save_base(tmp_path / "base", "llama", torch.bfloat16, "1GB")
    model = save_adapter(tmp_path / "adapter", tmp_path / "base", cls, LORA)
    peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    peftc.fold(model)
    assert len(assert_merged(tmp_path / "out", tmp_path / "base", model, torch.bfloat16)) == 6


def test_several_adapters_act_in_order(tmp_path: Path) -> None:
    base = tmp_path / "base"
    cls = save_base(base, "llama", torch.float64)
    scale = "edit a at layer[*].attn.q { h *= vector(init=1) }"
    for name, spec in (("one", LORA), ("two", scale)):
        save_adapter(tmp_path / name, base, cls, spec, seed=len(name))
    model: Any = cls.from_pretrained(base, dtype="auto")
    peftc.load(tmp_path / "one", model)
    peftc.load(tmp_path / "two", model, prefix="two")
    peftc.fold(model)
    peftc.merge(base, [tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert_merged(tmp_path / "out", base, model, torch.float64)
    peftc.merge(base, [tmp_path / "two", tmp_path / "one"], tmp_path / "other")
    one, other = tensors(tmp_path / "out"), tensors(tmp_path / "other")
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_other_files_are_copied(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    cls = save_base(base, "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", base, cls, LORA)
    names = ("tokenizer.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "pytorch_model.bin", ".git/config")
    for name in (*names, "consolidated.safetensors", "onnx/model.onnx"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(name)
    report = peftc.merge(base, tmp_path / "adapter", out)
    assert {"tokenizer.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= set(report.files)
    assert set(report.left) == {"pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"}
    assert all((out / name).read_text() == (base / name).read_text() for name in report.files if "config" not in name)
    assert not any((out / name).exists() for name in (*report.left, ".git"))
    assert report.model_validate_json((out / "peftc-merge.json").read_text()) == report


def test_a_checkpoint_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are links into another folder, and are copied."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    cls = save_base(repository / "blobs", "llama", torch.bfloat16)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    model = save_adapter(tmp_path / "adapter", snapshot, cls, LORA)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    peftc.merge("someone/tiny", tmp_path / "adapter", tmp_path / "out")
    peftc.fold(model)
    assert assert_merged(tmp_path / "out", snapshot, model, torch.bfloat16)
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
