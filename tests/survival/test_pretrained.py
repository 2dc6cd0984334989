"""save_pretrained of a compiled model: an adapter, which transformers refuses to load as a model;
inside of `disabled`, a checkpoint of its base.
"""

from __future__ import annotations

import copy
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
from tests.laws.harness import randomise
from tests.refusals import refused
from tests.survival.harness import SOME, SPECIES, compiled, model_inputs, same, state, text, train

FILES = [".json", ".json", ".json", ".safetensors"]  # the configuration, the description, the index
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
def test_outside_an_adapter_is_saved(name: str, spec: str, tmp_path: Path) -> None:
    """The parameters as they are trained, without the base; other adapters are replaced."""
    model = compiled(name, spec, torch.float32)
    inputs = model_inputs(name, model)
    want = logits(model, inputs)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert sorted(file.suffix for file in tmp_path.iterdir() if file.stem != "generation_config") == FILES
    (tensors,) = map(load_file, tmp_path.glob("*.safetensors"))
    assert set(peftc.parameters(model)) <= set(tensors)
    assert all(torch.equal(tensors[n], p) for n, p in peftc.parameters(model).items())
    assert torch.equal(logits(peftc.load(tmp_path, build(name)), inputs), want)
    again = peftc.compile(text(spec), build(name), seed=5)
    assert again.load_state_dict(tensors) == ([], [])
    assert torch.equal(logits(again, inputs), want)


@pairs
def test_transformers_refuses_an_adapter(name: str, spec: str, tmp_path: Path) -> None:
    """Without weights of the base, and whatever configuration is given."""
    model = compiled(name, spec, torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`peftc\.from_pretrained` loads"):
        read(tmp_path, name)
    with pytest.raises(KeyError, match="metadata"):
        read(tmp_path, name, config=zoo.config(name))


def test_a_state_dict_is_what_is_saved(tmp_path: Path) -> None:
    """Trainer and accelerate pass one, which they have gathered: values of edits and base."""
    model = compiled("bert", "weights", torch.float32)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "argument", state_dict=state)
    model.save_pretrained(tmp_path / "own")
    argument, own = (load_file(next((tmp_path / n).glob("*.safetensors"))) for n in ("argument", "own"))
    assert all(torch.equal(argument[name], own[name] + 1) for name in own)
    bases = [json.loads((tmp_path / n / "adapter.json").read_text())["base"]["tensors"] for n in ("argument", "own")]
    sampled = [name for name, tensor in bases[1].items() if tensor["sample"]]
    assert sampled
    for name in sampled:
        assert bases[0][name]["sample"] == pytest.approx([value + 1 for value in bases[1][name]["sample"]], abs=1e-6)
    del state[next(name for name in state if ".peftc." in name)]
    refused("P580", lambda: model.save_pretrained(tmp_path / "none", state_dict=state), model)
    assert not (tmp_path / "none").exists()
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_weights_beside_an_adapter_are_refused(tmp_path: Path) -> None:
    """Programs would load them without the adapter; other files may be there."""
    model = compiled("bert", "lora", torch.float32)
    with peftc.disabled(model):
        model.save_pretrained(tmp_path / "base")
    refused("P526", lambda: model.save_pretrained(tmp_path / "base"), model)
    assert not list((tmp_path / "base").glob("adapter*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").exists()


def test_a_base_beside_an_adapter_is_refused(tmp_path: Path) -> None:
    """AutoModel would load it without the adapter."""
    model = compiled("bert", "lora", torch.float32)
    model.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with peftc.disabled(model):
        refused("P526", lambda: model.save_pretrained(tmp_path), model)
        refused("P526", lambda: model.base_model.save_pretrained(tmp_path), model)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


INNER = "edit a at layer[*].attn.q { h += lora(x, r=2) }\nedit s at layer[*].ffn { h *= 2 }\n"


@pytest.mark.parametrize(
    "spec", [INNER, INNER + "train n = [w] at layer[*].norm\n", "edit s at layer[*].ffn { h *= 2 }"]
)
def test_a_model_in_a_compiled_model(spec: str, tmp_path: Path) -> None:
    """Of a part no adapter can be saved; inside of `disabled` the part of the base is."""
    base = build("llama")
    model: Any = peftc.compile("peft 1\n" + spec, build("llama"), seed=0, name="own")
    randomise(peftc.parameters(model))
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    want = logits(model, inputs)
    base.model.save_pretrained(tmp_path / "base")
    for part in (model.model, copy.deepcopy(model).model):
        refused("P581", lambda part=part: part.save_pretrained(tmp_path / "part"), model)
    assert not (tmp_path / "part").exists()
    for i, name in enumerate((None, "own")):
        with peftc.disabled(model, name):
            model.model.save_pretrained(tmp_path / f"off{i}")
            model.model.save_pretrained(tmp_path / f"state{i}", state_dict=model.model.state_dict())
        for folder in (f"off{i}", f"state{i}"):
            for file in (tmp_path / "base").iterdir():
                assert file.read_bytes() == (tmp_path / folder / file.name).read_bytes(), (folder, file.name)
    assert torch.equal(logits(model, inputs), want)
    copied = copy.deepcopy(model)
    peftc.remove(copied)
    assert type(copied.model) is type(base.model)
    peftc.fold(model)
    for i, plain in enumerate((copied, model)):
        plain.model.save_pretrained(tmp_path / f"plain{i}")
        assert keys(tmp_path / f"plain{i}") == keys(tmp_path / "base")


@pytest.mark.parametrize(
    "spec", [INNER, INNER + "train n = [w] at layer[*].norm\n", "edit s at layer[*].ffn { h *= 2 }"]
)
def test_a_model_around_a_compiled_one(spec: str, tmp_path: Path) -> None:
    """Its class reads no edits: it is not saved, but for its base."""
    build("llama").save_pretrained(tmp_path / "base")
    model = build("llama")
    peftc.compile("peft 1\n" + spec, model.model, seed=0)
    randomise(peftc.parameters(model.model))
    with pytest.raises(peftc.PeftcError, match=r"P581[\s\S]*`peftc.save\(model.model"):
        model.save_pretrained(tmp_path / "whole")
    with pytest.raises(peftc.PeftcError, match="P581"):
        model.save_pretrained(tmp_path / "whole", state_dict=model.state_dict())
    assert not (tmp_path / "whole" / "model.safetensors").exists()
    with peftc.disabled(model.model):
        model.save_pretrained(tmp_path / "state", state_dict=model.state_dict())
        for file in (tmp_path / "base").iterdir():
            assert file.read_bytes() == (tmp_path / "state" / file.name).read_bytes(), file.name
        model.save_pretrained(tmp_path / "off")
    for file in (tmp_path / "base").iterdir():
        assert file.read_bytes() == (tmp_path / "off" / file.name).read_bytes(), file.name
    again = build("llama")
    peftc.compile("peft 1\n" + spec, again.model, seed=1)
    again.load_state_dict(model.state_dict())  # of a whole model, all is there
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    assert torch.equal(logits(again, inputs), logits(model, inputs))
    model.model.save_pretrained(tmp_path / "adapter")
    peftc.remove(model.model)
    model.save_pretrained(tmp_path / "removed")
    assert keys(tmp_path / "removed") == keys(tmp_path / "base")


def test_trained_values_of_a_part_are_saved_with_the_model_around_it(tmp_path: Path) -> None:
    model = build("llama")
    peftc.compile("peft 1\ntrain n = [w] at layer[*].norm\n", model.model, seed=0)
    randomise(peftc.parameters(model.model))
    model.save_pretrained(tmp_path)
    loaded = type(build("llama")).from_pretrained(tmp_path, dtype="auto")
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    assert torch.equal(logits(loaded.eval(), inputs), logits(model.eval(), inputs))


def test_a_part_without_edits_is_saved(tmp_path: Path) -> None:
    """The encoder of a model whose decoder alone has edits."""
    model: Any = peftc.compile(
        "peft 1 edit a at decoder.layer[*].attn.self.q { h += lora(x, r=2) }", build("t5"), seed=0
    )
    model.encoder.save_pretrained(tmp_path)
    assert keys(tmp_path) == set(model.encoder.state_dict())
    refused("P581", lambda: model.decoder.save_pretrained(tmp_path), model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    """Nothing could load them; the last good adapter stays."""
    model = compiled("bert", "lora", torch.float32)
    model.save_pretrained(tmp_path / "a")
    peftc.save(model, tmp_path / "b")
    before = {file: file.read_bytes() for file in tmp_path.glob("*/*")}
    with torch.no_grad():
        next(iter(peftc.parameters(model).values())).view(-1)[0] = value
    refused("P561", lambda: model.save_pretrained(tmp_path / "a"), model)
    refused("P561", lambda: peftc.save(model, tmp_path / "b"), model)
    assert {file: file.read_bytes() for file in tmp_path.glob("*/*")} == before


def test_arguments_of_save_pretrained(tmp_path: Path) -> None:
    """A variant would not be read back; the layout of files has no effect, nor what is unknown."""
    model = compiled("bert", "lora", torch.float32)
    assert "variant" in refused("P545", lambda: model.save_pretrained(tmp_path, variant="fp16"), model).message
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path, max_shard_size="1KB", variant=None, unknown=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_of_two_specs_those_that_act_are_saved(tmp_path: Path) -> None:
    model = compiled("bert", "lora", torch.float32)
    peftc.compile("peft 1 edit own at layer[*].ffn { h += adapter(h, r=2) }", model, seed=0, name="own")
    model.save_pretrained(tmp_path / "both")
    with peftc.disabled(model, "own"):
        model.save_pretrained(tmp_path / "one")
    both, one = (set(load_file(next((tmp_path / n).glob("*.safetensors")))) for n in ("both", "one"))
    assert {name.partition("/")[0] for name in both} == {"qv", "own"}
    assert {name.partition("/")[0] for name in one} == {"qv"}


def test_what_no_edit_trains_is_refused(tmp_path: Path) -> None:
    """Its values would be lost."""
    model = compiled("bert", "lora", torch.float32)
    name, _ = next(iter(zoo.build("bert").named_parameters()))
    model.get_parameter(name).requires_grad_(True)
    message = refused("P583", lambda: model.save_pretrained(tmp_path), model).message
    assert not list(tmp_path.iterdir())
    with pytest.warns(peftc.PeftcWarning, match="P583") as caught:
        peftc.save(model, tmp_path)
    assert [message in str(one.message) for one in caught] == [True]


def test_running_statistics_are_warned_of(tmp_path: Path) -> None:
    model = compiled("bert", "lora", torch.float32)
    model.norm = torch.nn.BatchNorm1d(3).requires_grad_(False)
    model.train()
    with pytest.warns(peftc.PeftcWarning, match="P584"):
        model.save_pretrained(tmp_path)


def test_a_checkpoint_of_other_edits_is_refused(tmp_path: Path) -> None:
    compiled("bert", "lora", torch.float32).save_pretrained(tmp_path)
    other = compiled("bert", "sequential", torch.float32)
    before, tensors = state(other), load_file(next(tmp_path.glob("*.safetensors")))
    refused("P525", lambda: other.load_state_dict(tensors, strict=False), other)
    assert same(state(other), before)


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
    with peftc.disabled(model):
        model.save_pretrained(tmp_path / "base")
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    assert {k: v for k, v in config.items() if k != "transformers_weights"} == base
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    assert {t.dtype for t in tensors.values()} == {torch.float32}
