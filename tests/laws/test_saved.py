"""Saved adapters: they load bit for bit, and anything else is refused before it touches a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise, values
from tests.laws.recipes import NAMED

CASES = [(name, "everything") for name in zoo.ARCHITECTURES]
CASES += [(name, method) for name in ("bart", "gpt2") for method in ("mam", "dora", "in-order", "scaled-states")]
CASES += [("bart", "glora"), ("gpt2", "vera"), ("bart", "said-scaled"), ("gpt2", "adalora"), ("bart", "difffit")]
CASES += [("gpt2", "compacter"), ("llama", "loreft"), ("t5", "krona-res")]


def saved(name: str, method: str, folder: Path, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compiles, perturbs the parameters, saves; returns the outputs and the parameters."""
    model = zoo.build(name, **kwargs)
    peftc.compile(NAMED[method].text, model, seed=0)
    parameters = peftc.parameters(model)
    randomise(parameters)
    peftc.save(model, folder)
    with torch.no_grad():
        return model(**zoo.inputs(name, model))[0], values(parameters)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_saved_adapter_comes_back_bit_for_bit(name: str, method: str, tmp_path: Path) -> None:
    want, parameters = saved(name, method, tmp_path)
    model = zoo.build(name)
    before = Before.of(model)
    assert peftc.load(tmp_path, model) is model
    with torch.no_grad():
        assert torch.equal(model(**zoo.inputs(name, model))[0], want)
    again = peftc.parameters(model)
    assert list(again) == list(parameters)
    assert all(torch.equal(again[k], v) for k, v in parameters.items())
    peftc.remove(model)
    before.assert_same(model)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_reparametrised_prefix_is_saved_as_the_rows_it_makes(name: str, tmp_path: Path) -> None:
    """The MLP is not saved; the function is the same."""
    want, _ = saved(name, "prefix-mlp", tmp_path)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    assert {key.rpartition(".")[2] for key in tensors} == {"key", "value"}
    model = peftc.load(tmp_path, zoo.build(name))
    with torch.no_grad():
        assert (model(**zoo.inputs(name, model))[0] - want).abs().max() < 1e-5


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    saved("bert", "mam", tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".peft", ".md"}


def test_tensor_names_are_edit_site_and_form(tmp_path: Path) -> None:
    saved("bart", "mam", tmp_path)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    assert "ffn/encoder.layer[1].ffn/adapter.down" in tensors
    assert "prefix/decoder.layer[2].attn.cross/prefix.key" in tensors


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def corrupt(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return corrupt


def lose_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(sorted(tensors)[0])


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["ffn/encoder.layer[9].ffn/adapter.down"] = torch.zeros(2)


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    key = next(k for k in sorted(tensors) if tensors[k].ndim == 2)
    tensors[key] = tensors[key].T.contiguous()


def remove(path: Path) -> None:
    path.unlink()


CORRUPTIONS = {
    "truncated": truncate,
    "header": flip_header,
    "lost tensor": edit_tensors(lose_one),
    "unknown tensor": edit_tensors(add_one),
    "other shape": edit_tensors(reshape_one),
    "missing file": remove,
}


def assert_refused(folder: Path, model: torch.nn.Module) -> peftc.PeftcError:
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.load(folder, model)
    assert any(d.code.startswith("P5") for d in excinfo.value.diagnostics), excinfo.value.diagnostics
    before.assert_same(model)
    return excinfo.value


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corrupt_file_is_refused(corruption: str, tmp_path: Path) -> None:
    saved("bert", "mam", tmp_path)
    CORRUPTIONS[corruption](next(tmp_path.glob("*.safetensors")))
    assert_refused(tmp_path, zoo.build("bert"))


@pytest.mark.parametrize("damage", ["{", "[]", '{"format_version": "1.0"}', ""], ids=repr)
def test_a_corrupt_description_is_refused(damage: str, tmp_path: Path) -> None:
    saved("bert", "mam", tmp_path)
    for path in tmp_path.glob("*.json"):
        path.write_text(damage)
    assert_refused(tmp_path, zoo.build("bert"))


def test_an_unknown_key_in_the_description_is_refused(tmp_path: Path) -> None:
    """A misspelt key is never ignored."""
    saved("bert", "mam", tmp_path)
    refused = 0
    for path in tmp_path.glob("*.json"):
        text = path.read_text()
        data = json.loads(text)
        if isinstance(data, dict):
            path.write_text(json.dumps({**data, "lora_aplha": 3}))
            assert_refused(tmp_path, zoo.build("bert"))
            path.write_text(text)
            refused += 1
    assert refused


def test_an_adapter_of_other_weights_is_warned_of(tmp_path: Path) -> None:
    saved("bert", "mam", tmp_path)
    with pytest.warns(peftc.PeftcWarning, match="P524"):
        peftc.load(tmp_path, zoo.build("bert", seed=1))


@pytest.mark.parametrize(
    "other",
    [("bart", {"encoder_layers": 1}), ("bart", {"d_model": 48}), ("bart", {"encoder_ffn_dim": 40}), ("t5", {})],
    ids=str,
)
def test_an_adapter_of_another_base_is_refused_with_what_differs(other: tuple[str, Any], tmp_path: Path) -> None:
    saved("bart", "mam", tmp_path)
    error = assert_refused(tmp_path, zoo.build(other[0], **other[1]))
    first = error.diagnostics[0]
    assert first.message
    assert first.notes or any(c.isdigit() for c in first.message), "it should say what differs"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing", zoo.build("bert"))
