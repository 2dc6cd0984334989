"""Copies, pickles and files of whole compiled models."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.survival.harness import (
    SOME,
    SPECIES,
    SPECS,
    all_close,
    compiled,
    freshly_compiled,
    gradients,
    model_inputs,
    same,
    state,
    text,
)

pairs = pytest.mark.parametrize(("name", "spec"), SOME)


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
}


def backward(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return out.logits, gradients(model)


@pairs
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_model_of_its_own(name: str, spec: str, way: str) -> None:
    model = freshly_compiled(name, spec)
    inputs = model_inputs(name, model)
    want, slopes = backward(model, inputs)
    before = state(model)
    other: Any = WAYS[way](model)
    assert same(state(other), before)
    assert {n: p.requires_grad for n, p in other.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    with torch.no_grad():
        for p in peftc.parameters(model).values():
            p.add_(0.1)
        for p in model.parameters():
            p.mul_(0.9)
    got, others = backward(other, inputs)
    assert torch.equal(got, want)
    all_close(others, slopes, 0)
    assert same(state(other), before)
    assert not torch.equal(model(**inputs).logits, want)
    peftc.remove(model)
    assert torch.equal(other(**inputs).logits, want)
    base = zoo.build(name, torch.float64)
    assert same(state(peftc.remove(other)), state(base))
    assert [type(m) for m in other.modules()] == [type(m) for m in base.modules()]
    assert torch.equal(other(**inputs).logits, base(**inputs).logits)


@pytest.mark.parametrize("name", SPECIES)
def test_a_copy_of_a_layer_alone(name: str) -> None:
    model = compiled(name, "sequential")
    block = next(m for m in model.modules() if hasattr(type(m), "_peftc_kind"))
    twin = copy.deepcopy(block)
    assert type(twin) is type(block)
    assert same(state(twin), state(block))


READ = """
from pathlib import Path
import sys, torch
from tests import zoo
torch.set_num_threads(1)
for name in sys.argv[2:]:  # which makes the exact norms that the files name
    zoo.build(name, torch.float64)
for path in sorted(Path(sys.argv[1]).iterdir()):
    model, inputs, want = torch.load(path, weights_only=False)
    out = model(**inputs)
    assert torch.equal(out.logits, want), (path.name, (out.logits - want).abs().max())
    out.loss.backward()
    import peftc
    assert all(p.grad is not None for p in peftc.parameters(model).values()), path.name
    peftc.remove(model)
    assert not torch.equal(model(**inputs).logits, want), path.name
    print(path.name)
"""


def test_files_in_a_fresh_process(tmp_path: Path) -> None:
    """Loaded, run, trained and `remove`d in a process that has not imported peftc."""
    names = [(n, s) for n in SPECIES for s in SPECS]
    for name, spec in names:
        model = compiled(name, spec)
        inputs = model_inputs(name, model)
        torch.save((model, inputs, model(**inputs).logits.detach()), tmp_path / f"{name}-{spec}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), *SPECIES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == sorted(f"{n}-{s}" for n, s in names)


@pairs
def test_a_state_dict_goes_into_another_compiled_model(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = model_inputs(name, model)
    want = model(**inputs).logits
    other = peftc.compile(text(spec), zoo.build(name, torch.float64, seed=9), seed=9)
    assert not torch.equal(other(**inputs).logits, want)
    assert not any(other.load_state_dict(model.state_dict()))
    assert torch.equal(other(**inputs).logits, want)


@pairs
def test_the_class_of_a_compiled_model_constructs_a_model_without_edits(name: str, spec: str) -> None:
    """As `from_pretrained` of the class does."""
    model, base = compiled(name, spec, torch.float32), zoo.build(name, torch.float32).eval()
    constructed = type(model)(model.config).eval()
    assert [type(module) for module in constructed.modules()] == [type(module) for module in base.modules()]
    constructed.load_state_dict(base.state_dict())
    inputs = model_inputs(name, base)
    with torch.no_grad():
        assert torch.equal(constructed(**inputs)[0], base(**inputs)[0])
        assert not torch.equal(model(**inputs)[0], base(**inputs)[0])


def test_the_class_of_an_edited_module_constructs_one_without_edits() -> None:
    model = freshly_compiled("llama", "lora")
    layer = model.model.layers[0].self_attn.q_proj
    constructed = type(layer)(3, 4)
    assert type(constructed) is nn.Linear
    x = torch.randn(2, 3)
    assert torch.equal(constructed(x), nn.functional.linear(x, constructed.weight, constructed.bias))
