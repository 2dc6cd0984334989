"""Experts are merged one by one: a layer has many more of them than memory should hold."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from benchmarks.families import build
from peftc.merging.base_model import BaseModel
from tests.laws.harness import randomise
from tests.merging.checkpoints import same_bits, tensors

ALL = "edit e at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down { w += lowrank(r=2) }"
ONE = "edit e at layer[*].ffn.experts[1].gate { w = magnitude(w + lowrank(r=2)) }"


@pytest.mark.parametrize("spec", [ALL, ONE])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"])
@pytest.mark.filterwarnings("ignore")
def test_one_expert_is_in_memory(family: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("causal-lm", family)
    cls: Any = type(model)
    base: Any = model.to(torch.bfloat16)
    base.config.architectures = [cls.__name__]
    base.save_pretrained(tmp_path / "base", max_shard_size="200KB")
    loaded: Any = cls.from_pretrained(tmp_path / "base", dtype="auto").eval()
    peftc.compile(f"peft 1\n{spec}\n", loaded, seed=0)
    randomise(peftc.parameters(loaded))
    peftc.save(loaded, tmp_path / "adapter")
    counts = list[int]()

    def counted(original: Any) -> Any:
        @contextmanager
        def counting(*args: Any) -> Generator[Any]:
            with original(*args) as read:
                counts.append(sum(value.numel() for value in read.values()))
                yield read

        return counting

    monkeypatch.setattr(BaseModel, "loaded", counted(BaseModel.loaded))
    monkeypatch.setattr(BaseModel, "loaded_slices", counted(BaseModel.loaded_slices))
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", verify=True)
    monkeypatch.undo()
    peftc.fold(loaded)
    merged: Any = cls.from_pretrained(tmp_path / "out", dtype="auto")
    actual = dict(merged.named_parameters())
    assert [n for n, value in loaded.named_parameters() if not same_bits(value.data, actual[n].data)] == []
    experts = [p for _, p in loaded.named_parameters() if p.ndim == 3]
    assert max(counts) <= 2 * max(p[0].numel() for p in experts)
    assert all(tensor.parameter.endswith("]") for tensor in report.tensors)
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    changed = {key for key in before if not same_bits(before[key], after[key])}
    assert changed == {key for tensor in report.tensors for key in tensor.keys}
