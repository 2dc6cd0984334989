"""Every id of the catalogue has, to the parameter, the total that was published for it."""

import pytest
import torch

from peftc.fakes.tensors import fake_mode
from peftc.models import catalogue
from peftc.models.identity import fingerprint, parameter_count, tied_groups
from peftc.models.skeleton import sample_inputs, skeleton
from peftc.models.sources import resolve

IDS = tuple(catalogue.catalogue())


def test_there_are_49_checkpoints() -> None:
    assert len(IDS) == 49


@pytest.mark.parametrize("name", IDS)
def test_total_is_the_published_one(name: str) -> None:
    source = resolve(name)
    assert source.kind == "catalogue"
    assert parameter_count(skeleton(source)) == catalogue.catalogue()[name].parameters


def test_an_untied_head_is_a_matrix_of_its_own() -> None:
    flan = skeleton(resolve("google/flan-t5-large"))
    assert tied_groups(flan) == (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),)
    plain = skeleton(resolve("t5-large"))
    assert "lm_head.weight" in tied_groups(plain)[0]


def test_an_id_is_found_under_its_other_name() -> None:
    assert catalogue.find("openai-community/gpt2") is catalogue.find("gpt2")
    assert fingerprint(skeleton(resolve("openai-community/gpt2"))) == fingerprint(skeleton(resolve("gpt2")))


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("facebook/bart-lage", "facebook/bart-large"),
        ("bart-large", "facebook/bart-large"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("BERT-base-uncased", "bert-base-uncased"),
    ],
)
def test_near_ids_are_named(typed: str, suggestion: str) -> None:
    assert suggestion in catalogue.nearest_ids(typed)


def test_nothing_is_near_to_nonsense() -> None:
    assert catalogue.nearest_ids("qqqqqqqq") == []


@pytest.mark.parametrize(
    "name", ["facebook/bart-base", "t5-small", "gpt2", "google/vit-base-patch16-224", "openai/whisper-small"]
)
def test_a_skeleton_runs_on_sampled_inputs(name: str) -> None:
    model = skeleton(resolve(name))
    with fake_mode(model), torch.no_grad():
        out = model(**sample_inputs(model))
    assert out[0].shape[0] == 2
