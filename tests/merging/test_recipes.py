"""Every recipe: what folds is in the merged checkpoint, and what does not is in its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from peftc.filesystem import resources
from tests import zoo
from tests.laws.harness import randomise
from tests.merging.checkpoints import same_bits, save_base

NO_PLACE = ("P201", "P202", "P205")
TOO_LARGE = ("P314", "P317", "P318")  # for a tiny model
NEEDS_DATA = ("P540", "P543", "P544")


@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("recipe", resources.recipes())
@pytest.mark.filterwarnings("ignore::peftc.PeftcWarning")
def test_merge_is_fold(recipe: str, name: str, tmp_path: Path) -> None:
    cls: Any = save_base(tmp_path / "base", name, torch.float64, "1GB")
    model: Any = cls.from_pretrained(tmp_path / "base", dtype="auto").eval()
    try:
        peftc.compile(f"peft 1\nuse {recipe} from std\napply {recipe}()\n", model, seed=0)
        randomise(peftc.parameters(model))
        peftc.save(model, tmp_path / "adapter")
    except peftc.PeftcError as error:
        if error.diagnostics[0].code not in (*NO_PLACE, *TOO_LARGE, *NEEDS_DATA):
            raise
        pytest.skip(f"{error.diagnostics[0]}")
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", partial=True, verify=True)
    merged, loaded = (cls.from_pretrained(tmp_path / folder, dtype="auto").eval() for folder in ("out", "base"))
    for one in (merged, loaded):
        zoo._exact_norms(one)  # pyright: ignore[reportPrivateUsage]
    peftc.load(tmp_path / "adapter", loaded)
    if (tmp_path / "out" / "adapter").exists():
        peftc.load(tmp_path / "out" / "adapter", merged, strict=True)
    with torch.no_grad():
        difference = merged(**zoo.inputs(name, merged))[0] - loaded(**zoo.inputs(name, loaded))[0]
    assert difference.abs().max() < 1e-10
    if not report.refused:
        peftc.fold(loaded)
        expected, actual = dict(loaded.named_parameters()), dict(merged.named_parameters())
        assert [
            n for n, value in expected.items() if n not in actual or not same_bits(value.data, actual[n].data)
        ] == []
