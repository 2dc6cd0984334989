"""What does not fold stays, as an adapter for the new checkpoint: together they are the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.merging.checkpoints import LORA, assert_merged, save_adapter, save_base

PREFIX = "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"
EXPERTS = "edit w at layer[*].ffn.experts[0].gate { w += lowrank(r=1) }\n"


@pytest.mark.parametrize(("name", "spec"), [("llama", PREFIX + LORA), ("mixtral", PREFIX + LORA + "\n" + EXPERTS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_rest_is_an_adapter_for_the_new_checkpoint(
    name: str, spec: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    cls = save_base(base, name, dtype)
    model: Any = save_adapter(tmp_path / "adapter", base, cls, spec)
    report = peftc.merge(base, tmp_path / "adapter", out, partial=True)
    assert [*report.refused] == ["p"]
    peftc.fold(model)
    merged: Any = cls.from_pretrained(out, dtype="auto").eval()
    peftc.load(out / "adapter", merged, strict=True)  # its samples are those of the new weights
    one, other = peftc.parameters(model), peftc.parameters(merged)
    assert {key.partition("/")[2]: v.tolist() for key, v in one.items()} == {
        key.partition("/")[2]: v.tolist() for key, v in other.items()
    }
    if dtype == torch.float64 and name == "llama":
        for each in (model, merged):
            zoo._exact_norms(each)  # pyright: ignore[reportPrivateUsage]
        with torch.no_grad():
            results = [each(**zoo.inputs(name, each))[0] for each in (model, merged)]
        assert (results[0] - results[1]).abs().max() < 1e-10
    base.rename(tmp_path / "gone")
    with warnings.catch_warnings():
        warnings.simplefilter("error", peftc.PeftcWarning)
        again: Any = peftc.from_pretrained(out / "adapter", dtype="auto")
    (tmp_path / "gone").rename(base)
    assert again.config._name_or_path == str(out)
    peftc.remove(model)
    assert_merged(out, base, model, dtype)


def test_if_nothing_folds_the_checkpoint_is_the_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    cls = save_base(base, "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", base, cls, PREFIX)
    peftc.merge(base, tmp_path / "adapter", tmp_path / "out", partial=True)
    assert assert_merged(tmp_path / "out", base, cls.from_pretrained(base, dtype="auto"), torch.bfloat16) == []
    assert (tmp_path / "out" / "adapter" / "adapter.json").exists()
