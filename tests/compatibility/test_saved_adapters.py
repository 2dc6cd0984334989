"""Backward compatibility: adapters saved by earlier versions load with the same tensors and give
the same outputs, and their specs have the same counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import peftc
from tests.compatibility import corpus

VERSIONS = corpus.versions()
CASES = [
    (version, case) for version in VERSIONS for case in json.loads((corpus.folder(version) / "cases.json").read_text())
]


def entry(version: str, case: str) -> dict[str, Any]:
    return json.loads((corpus.folder(version) / "cases.json").read_text())[case]


def expected(version: str, case: str) -> torch.Tensor:
    return load_file(corpus.folder(version) / "outputs.safetensors")[case]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize(("version", "case"), CASES, ids=lambda part: part)
def test_a_saved_adapter_loads_and_computes_what_it_computed(version: str, case: str, tmp_path: Path) -> None:
    folder, described = corpus.folder(version) / case, entry(version, case)
    model = corpus.build(described["model"])
    peftc.load(folder, model)
    want = expected(version, case)
    assert (corpus.output(model.eval(), described["tasks"]) - want).abs().max() <= 1e-9 * want.abs().max()
    if not case.startswith("text-"):  # what is saved of recipes is a law of its own
        return
    peftc.save(model, tmp_path / "again")
    old, new = tensors(folder), tensors(tmp_path / "again")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("model", corpus.PLANNED)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_spec_counts_what_it_counted(version: str, model: str) -> None:
    specs = json.loads((corpus.folder(version) / "specs.json").read_text())
    table = peftc.sites(model)
    counts = {name: corpus.totals(spec["text"], table) for name, spec in specs.items()}
    assert counts == {name: spec["totals"][model] for name, spec in specs.items()}
