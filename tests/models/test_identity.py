"""Fingerprints distinguish bases, and nothing else."""

from pathlib import Path

import pytest
import torch

from peftc.models.identity import fingerprint, parameter_count, tied_groups
from peftc.models.skeleton import skeleton
from peftc.models.sources import load_model, resolve
from tests import zoo


@pytest.mark.parametrize("name", zoo.ALL)
def test_skeleton_and_model_have_one_fingerprint(name: str) -> None:
    model = zoo.build(name)
    bones = skeleton(resolve(model.config))
    assert fingerprint(bones) == fingerprint(model) == fingerprint(skeleton(resolve(model)))
    assert parameter_count(bones) == parameter_count(model)


def test_neither_dtype_nor_values_nor_training_matter() -> None:
    one, two = zoo.build("gpt2"), zoo.build("gpt2", torch.bfloat16, seed=3).train()
    two.requires_grad_(False)
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 2},
        {"n_inner": 40},
        {"vocab_size": 62},
        {"n_head": 2},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
    ],
)
def test_the_function_of_the_model_matters(change: dict[str, object]) -> None:
    assert fingerprint(zoo.build("gpt2")) != fingerprint(zoo.build("gpt2", **change))


def test_architectures_differ() -> None:
    assert len({fingerprint(zoo.build(name)) for name in zoo.ALL}) == len(zoo.ALL)


def test_added_parameters_can_be_left_out() -> None:
    model = zoo.build("bert")
    before = fingerprint(model), parameter_count(model)
    model.bert.extra = torch.nn.Linear(2, 2)
    assert (fingerprint(model), parameter_count(model)) != before
    base = lambda name: "extra" not in name  # noqa: E731
    assert (fingerprint(model, base), parameter_count(model, base)) == before


def test_tied_weights_are_grouped_in_model_order() -> None:
    assert tied_groups(zoo.build("gpt2")) == (("transformer.wte.weight", "lm_head.weight"),)
    assert tied_groups(zoo.build("llama")) == ()


def test_a_t5_saved_untied_is_planned_and_loaded_untied(tmp_path: Path) -> None:
    model = zoo.build("t5-gated")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    bones, loaded = skeleton(resolve(tmp_path)), load_model(resolve(str(tmp_path)))
    assert parameter_count(bones) == parameter_count(loaded) == parameter_count(model)
    assert fingerprint(bones) == fingerprint(loaded)
