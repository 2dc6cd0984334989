"""Adapters of AdapterHub have the gradients and counts in peftc that they have in its library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import peftc
from tests.exchange.adapterhub.models import COUNTS, FOLDER, base, gradients
from tests.matrix import some

GRADIENTS = load_file(FOLDER / "gradients.safetensors")
TRAINED: dict[str, int] = json.loads((FOLDER / COUNTS).read_text(encoding="utf-8"))
CASES = sorted(key for key in TRAINED if key != "t5/prefix")  # whose positions the library counts from the prefix on
WITH_TEXTS = ("vera", "dora", "dvora", "mtl_lora", "loreft", "noreft", "direft", "seq_bn_inv")
CHOSEN = [
    key for key in CASES if key.partition("/")[2].startswith(WITH_TEXTS) and key.startswith(("bert", "gpt2", "qwen2"))
]
ROUNDED = {"t5": 1e-3}  # whose norms compute in float32


def of_library(key: str) -> dict[str, torch.Tensor]:
    """The tensors of an adapter."""
    file = FOLDER / key / "adapter.safetensors"
    return load_file(file) if file.exists() else torch.load(FOLDER / key / "pytorch_adapter.bin", weights_only=True)


def as_adapter(key: str, folder: Path) -> Path:
    """Gradients in the place of the tensors of an adapter: so they come in under our names."""
    shutil.copytree(FOLDER / key, folder, ignore=shutil.ignore_patterns("*.bin", "adapter.safetensors"))
    tensors = of_library(key)
    named = {name: GRADIENTS.get(f"{key}:{name}") for name in tensors}
    for name, one in tensors.items():
        twins = (named[n] for n, two in tensors.items() if named[n] is not None and one.equal(two))
        named[name] = next(twins, one) if named[name] is None else named[name]
    save_file({name: one.clone() for name, one in named.items() if one is not None}, folder / "adapter.safetensors")
    return folder


def parameters(folder: Path, source: Path, name: str) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    peftc.import_adapter(source, folder, model=base(name))
    model = peftc.load(folder, base(name))
    return model, dict(peftc.parameters(model))


@pytest.mark.parametrize("key", [*CHOSEN, *some([key for key in CASES if key not in CHOSEN], 12)])
def test_gradients_and_counts_are_those_of_the_library(key: str, tmp_path: Path) -> None:
    name = key.partition("/")[0]
    model, own = parameters(tmp_path / "ours", FOLDER / key, name)
    _, expected = parameters(tmp_path / "gradients", as_adapter(key, tmp_path / "in"), name)
    ours = {n: g for n, g in gradients(name, model, own).items() if n.partition("/")[0] != "head"}
    assert max(one.abs().max() for one in ours.values()) > 1e-3
    for path, one in ours.items():
        torch.testing.assert_close(one, expected[path].detach(), rtol=0, atol=ROUNDED.get(name, 1e-10))
    # With prefix and suffix apart, the library keeps a unit for no tokens, too
    half = ("loreft", "noreft", "direft", "direft_last")
    unused = 2 if key.partition("/")[2] in half else 1
    assert sum(one.numel() for n, one in own.items() if n in ours) * unused == TRAINED[key]


@pytest.mark.parametrize("key", ["bert/fusion", "gpt2/fusion"])
def test_gradients_of_a_fusion_are_those_of_the_library(key: str, tmp_path: Path) -> None:
    """The bias of the keys is the same in all scores: it has no effect, and does not come."""
    name = key.partition("/")[0]
    model, own = parameters(tmp_path / "ours", FOLDER / key, name)
    names = {"query": "query.weight", "query_bias": "query.bias", "key": "key.weight", "value": "value.weight"}
    expected = {n.partition(":")[2]: one for n, one in GRADIENTS.items() if n.startswith(f"{key}:")}
    ours = {n: one for n, one in gradients(name, model, own).items() if n.startswith("fusion/")}
    assert len(ours) == 8
    for path, one in ours.items():
        number, end = path[path.index("[") + 1], names[path.rpartition(".")[2]]
        (theirs,) = (g for n, g in expected.items() if f".{number}." in n and n.endswith(end))
        torch.testing.assert_close(one, theirs, rtol=0, atol=1e-10)
        assert one.abs().max() > 1e-6
    assert all(one.abs().max() < 1e-12 for n, one in expected.items() if n.endswith("key.bias"))
