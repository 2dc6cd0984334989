"""Adapters that do not load: damaged or malformed files, other formats, other bases."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import peftc
from peftc.adapters.metadata import METADATA
from tests import zoo
from tests.adapters.saved import (
    compiled,
    describe,
    description,
    refused,
    retensor,
    tensors_of,
)
from tests.laws.harness import Before, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return peftc.save(compiled("bert"), tmp_path / "a")


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 8, 200, -1])
def test_a_flipped_bit_is_seen(at: int, folder: Path) -> None:
    flipped(tensors_of(folder), at)
    assert "sha256" in refused(folder, zoo.build("bert"), "P521").notes[0]


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_seen(keep: int, folder: Path) -> None:
    data = tensors_of(folder).read_bytes()[:keep]
    tensors_of(folder).write_bytes(data)
    refused(folder, zoo.build("bert"), "P521")
    describe(folder, sha256=hashlib.sha256(data).hexdigest())  # even where the description agrees
    refused(folder, zoo.build("bert"), "P521")


def test_a_pickle_is_not_read(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tensors_of(folder))
    describe(folder, sha256=hashlib.sha256(tensors_of(folder).read_bytes()).hexdigest())
    refused(folder, zoo.build("bert"), "P521")


DESCRIPTIONS: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "not text": lambda text: "\udcff",
    "no version": lambda text: text.replace('"format_version"', '"version"'),
    "unknown key": lambda text: text.replace('"seed"', '"speed": 1,\n"seed"'),
    "unknown key inside": lambda text: text.replace('"facts"', '"fax": 1,\n"facts"'),
    "missing key": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "base"}),
    "wrong type": lambda text: text.replace('"seed": 3', '"seed": "three"'),
    "a path for a file": lambda text: text.replace('"file": "', '"file": "../'),
    "an absolute file": lambda text: text.replace('"file": "', '"file": "/tmp/'),
    "another file": lambda text: text.replace('"file": "adapter-', '"file": "adapter_'),
    "another sample": lambda text: text.replace('"sample": [', '"sample": [1.5,'),
    "other plan": lambda text: text.replace('"foldable": true', '"foldable": "perhaps"'),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_damaged_description_is_refused(case: str, folder: Path) -> None:
    text = (folder / METADATA).read_text()
    damaged = DESCRIPTIONS[case](text)
    assert damaged != text
    (folder / METADATA).write_bytes(damaged.encode(errors="surrogateescape"))
    refused(folder, zoo.build("bert"), "P521")


@pytest.mark.parametrize("keys", [("base",), ("base", "seed"), ("base", "seed", "plan", "spec")], ids=len)
def test_all_mistakes_in_a_description_are_counted(keys: tuple[str, ...], folder: Path) -> None:
    (folder / METADATA).write_text(json.dumps({k: v for k, v in description(folder).items() if k not in keys}))
    result = refused(folder, zoo.build("bert"), "P521")
    assert result.message.endswith(f" ({len(keys)} mistakes)" if len(keys) > 1 else "an adapter")
    assert {note.partition(":")[0] for note in result.notes} <= set(keys)
    assert len(result.notes) == min(3, len(keys))


def test_a_newer_format_is_refused(folder: Path) -> None:
    describe(folder, format_version="2.0", something_new=1)
    assert "'2.0'" in refused(folder, zoo.build("bert"), "P522").message


@pytest.mark.parametrize("which", [METADATA, "tensors"])
def test_a_missing_file_is_refused(which: str, folder: Path) -> None:
    name = METADATA if which == METADATA else tensors_of(folder).name
    (folder / name).unlink()
    assert name in refused(folder, zoo.build("bert"), "P520").notes[0]


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("k/s/lora.A")


def added(tensors: dict[str, torch.Tensor]) -> None:
    tensors["k/t/lora.A"] = torch.zeros(2)


def turned(tensors: dict[str, torch.Tensor]) -> None:
    tensors["k/s/lora.A"] = tensors["k/s/lora.A"].T.contiguous()


def reshaped_norm(tensors: dict[str, torch.Tensor]) -> None:
    key = next(k for k in tensors if k.startswith("n/"))
    tensors[key] = torch.zeros(5)


@pytest.mark.parametrize(
    ("change", "excerpt"),
    [
        (drop_one, "1 are missing, such as `k/s/lora.A`"),
        (added, "1 are unknown, such as `k/t/lora.A`"),
        (turned, "`k/s/lora.A` is [32, 2], expected [2, 32]"),
        (reshaped_norm, "is [5], expected [32]"),
    ],
)
def test_tensors_that_do_not_fit_the_spec(change: Callable[[Any], None], excerpt: str, folder: Path) -> None:
    tensors = load_file(tensors_of(folder))
    change(tensors)
    retensor(folder, tensors)
    assert excerpt in "\n".join(refused(folder, zoo.build("bert"), "P525").notes)


def test_tensors_other_than_those_listed(folder: Path) -> None:
    tensors = description(folder)["tensors"]
    tensors["k/s/lora.A"]["dtype"] = "float16"
    describe(folder, tensors=tensors)
    assert "float16 [2, 32] listed, float32 [2, 32] there" in refused(folder, zoo.build("bert"), "P521").notes[0]


@pytest.mark.parametrize(
    ("spec", "excerpt"),
    [
        ("peft 1\nedit e at layer[*].nothing { h += lora(x, r=2) }", "P20"),
        ("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2000) }", "P317"),
        ("__import__('os').abort()", "P0"),
    ],
)
def test_a_spec_that_cannot_be_planned(spec: str, excerpt: str, folder: Path) -> None:
    describe(folder, spec=spec)
    result = refused(folder, zoo.build("bert"), "P525")
    assert excerpt in result.notes[0]


# Other bases
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "excerpt"),
    [
        ("bert", {"num_hidden_layers": 2}, "16 parameters (`bert.encoder.layer.2."),
        ("bert", {"num_hidden_layers": 4}, "16 parameters (`bert.encoder.layer.3."),
        ("bert", {"intermediate_size": 40}, "[48, 32] there and [40, 32] here"),
        ("bert", {"num_attention_heads": 2}, "`num_attention_heads` of the configuration is 4 there and 2 here"),
        ("bert", {"hidden_act": "relu"}, "`hidden_act` of the configuration is gelu there and relu here"),
        ("bert", {"tie_word_embeddings": False}, "other parameters are tied"),
        ("roberta", {}, "it was saved for a model of type bert, this is roberta"),
    ],
)
def test_another_base_is_refused_with_what_differs(name: str, change: Any, excerpt: str, folder: Path) -> None:
    result = refused(folder, zoo.build(name, **change), "P523")
    assert excerpt in "\n".join(result.notes), result
    assert "bert" in result.message


def test_values_that_train_replaces_may_differ(folder: Path) -> None:
    """A trained head is saved with the adapter, so the base's own head may differ where it is
    loaded.
    """
    model = zoo.build("bert")
    with torch.no_grad():
        model.get_submodule("bert.encoder.layer.1.output.LayerNorm").weight.add_(1.0)
    peftc.load(folder, model)
    key = "n/bert.encoder.layer.1.output.LayerNorm.weight"
    assert torch.equal(peftc.parameters(model)[key], load_file(tensors_of(folder))[key])


def test_a_base_without_weights_is_refused(folder: Path) -> None:
    refused_meta = zoo.build("bert").to("meta")
    with pytest.raises(peftc.PeftcError, match="P527"):
        peftc.load(folder, refused_meta)


def test_a_model_with_an_edit_of_that_name_is_refused(folder: Path) -> None:
    model = compiled("bert")
    parameters = values(peftc.parameters(model))
    with pytest.raises(peftc.PeftcError, match="P412"):
        peftc.load(folder, model)
    assert all(torch.equal(v, parameters[k]) for k, v in peftc.parameters(model).items())


def test_a_failure_while_loading_leaves_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.adapters import loading

    model = zoo.build("bert")
    before = Before.of(model)

    def short(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
        result = peftc.parameters(model, name)
        result["k/missing"] = nn.Parameter(torch.zeros(1))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loading, "parameters", short)
        with pytest.raises(KeyError):
            peftc.load(folder, model)
    before.assert_same(model)
