"""save_pretrained of a compiled model: a checkpoint of its base, with or without edit
parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import peftc
from tests import zoo
from tests.survival.harness import SOME, SPECIES, compiled, model_inputs, same, state, text, train

pairs = pytest.mark.parametrize(("name", "spec"), SOME)


def read(directory: Path, name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, loaded as users do, with transformers' loading info."""
    cls = getattr(transformers, zoo.SPECIES[name].model)
    return cls.from_pretrained(directory, output_loading_info=True, dtype="auto", **options)


def keys(directory: Path) -> set[str]:
    return {key for file in directory.glob("*.safetensors") for key in load_file(file)}


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def build(name: str, **options: Any) -> Any:
    return zoo.build(name, torch.float32, **options)


@pairs
def test_inside_disabled_the_base_alone_is_saved(name: str, spec: str, tmp_path: Path) -> None:
    """The same files as from the base, byte for byte; the edits are back afterwards."""
    model, base = compiled(name, spec, torch.float32), build(name)
    inputs = model_inputs(name, model)
    want, first = logits(model, inputs), logits(base, inputs)
    base.save_pretrained(tmp_path / "base")
    with peftc.disabled(model):
        model.save_pretrained(tmp_path / "saved")
    for file in (tmp_path / "base").iterdir():
        assert file.read_bytes() == (tmp_path / "saved" / file.name).read_bytes(), file.name
    loaded, info = read(tmp_path / "saved", name)
    assert not any(info.values()), info
    assert torch.equal(logits(loaded, inputs), first)
    assert torch.equal(logits(model, inputs), want)
    assert not torch.equal(want, first)
    assert model._keys_to_ignore_on_save == base._keys_to_ignore_on_save
    adapter = peftc.save(model, tmp_path / "adapter")
    assert torch.equal(logits(peftc.load(adapter, loaded), inputs), want)


@pairs
def test_outside_everything_is_saved_and_the_base_loads(name: str, spec: str, tmp_path: Path) -> None:
    """A training checkpoint: complete for the base; additional keys belong to edits."""
    model, base = compiled(name, spec, torch.float32), build(name)
    inputs = model_inputs(name, model)
    want = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded, info = read(tmp_path, name)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    assert all(".peftc." in key or key.startswith("peftc_shared.") for key in info["unexpected_keys"])
    assert len(info["unexpected_keys"]) == len([n for n in peftc.parameters(model) if not n.startswith("norms/")])
    trained = {peftc.parameters(model)[n] for n in peftc.parameters(model) if n.startswith("norms/")}
    learning = {n for n, p in model.named_parameters() if p in trained}
    assert same(
        {k: v for k, v in state(loaded).items() if k not in learning},
        {k: v for k, v in state(base).items() if k not in learning},
    )
    again = peftc.compile(text(spec), build(name, seed=3), seed=5)
    model.save_pretrained(tmp_path, save_original_format=False)  # otherwise some models are saved with the hub's names
    assert not again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).unexpected_keys
    again.tie_weights()
    assert torch.equal(logits(again, inputs), want)


@pytest.mark.parametrize("name", SPECIES)
def test_shards(name: str, tmp_path: Path) -> None:
    model = compiled(name, "mam", torch.float32)
    inputs = model_inputs(name, model)
    with peftc.disabled(model):
        model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == keys(tmp_path)
    loaded, info = read(tmp_path, name)
    assert not any(info.values()), info
    assert torch.equal(logits(loaded, inputs), logits(build(name), inputs))


@pairs
def test_a_loaded_model_can_be_compiled_and_saved(name: str, spec: str, tmp_path: Path) -> None:
    """The life of a checkpoint: loaded, compiled, trained, saved, removed."""
    build(name).save_pretrained(tmp_path / "base")
    model, _ = read(tmp_path / "base", name)
    before = state(model)
    peftc.compile(text(spec), model, seed=0)
    inputs = model_inputs(name, model)
    losses = train(model, [inputs] * 2, rate=0.02)
    assert losses[0] != losses[1]
    want = logits(model, inputs)
    peftc.save(model, tmp_path / "adapter")
    other, _ = read(tmp_path / "base", name)
    assert torch.equal(logits(peftc.load(tmp_path / "adapter", other), inputs), want)
    assert same(state(peftc.remove(model)), before)


@pytest.mark.parametrize("name", SPECIES)
def test_folded_models_are_plain_checkpoints(name: str, tmp_path: Path) -> None:
    model = compiled(name, "lora", torch.float32)
    inputs = model_inputs(name, model)
    peftc.fold(model)
    want = logits(model, inputs)
    if hasattr(model, "_peftc"):
        peftc.remove(model)
    model.save_pretrained(tmp_path)
    loaded, info = read(tmp_path, name)
    assert not any(info.values()), info
    assert torch.equal(logits(loaded, inputs), want)


@pytest.mark.parametrize("name", SPECIES)
def test_the_saved_config_is_that_of_the_base(name: str, tmp_path: Path) -> None:
    """Edits of a half-precision base are float32; the checkpoint's dtype is the base's."""
    model = peftc.compile(text("sequential"), zoo.build(name, torch.bfloat16), seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == [zoo.SPECIES[name].model]
    loaded, _ = read(tmp_path, name)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for k, t in tensors.items() if ".peftc." in k} == {torch.float32}
