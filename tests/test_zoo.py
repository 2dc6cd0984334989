import copy
import pickle

import pytest
import torch
from torch import nn

from tests import zoo


@pytest.mark.parametrize("name", zoo.ALL)
def test_every_parameter_is_random_and_outputs_stay_sane(name: str) -> None:
    model = zoo.build(name)
    for key, parameter in model.named_parameters():
        assert parameter.std() > 0.01, key
    out = model(**zoo.inputs(name, model))[0]
    assert out.isfinite().all()
    assert 0.05 < out.std() < 30


@pytest.mark.parametrize("name", zoo.ALL)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    one, two = (zoo.build(name).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    other = zoo.build(name, seed=1).state_dict()
    assert not all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", zoo.ALL)
def test_float64_models_do_not_round_on_the_way(name: str) -> None:
    model = zoo.build(name, torch.float64)
    inputs = zoo.inputs(name, model)
    before = model(**inputs)[0]
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight.mul_(1 + 1e-14)
    drift = (model(**inputs)[0] - before).abs().max()
    assert drift < 1e-11


@pytest.mark.parametrize("name", zoo.ALL)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_masks_example_i_by_i_tokens(name: str, padding: zoo.Padding) -> None:
    model = zoo.build(name)
    inputs = zoo.inputs(name, model, batch=3, padding=padding, labels=zoo.SPECIES[name].labels is not None)
    assert inputs["attention_mask"].sum(1).tolist() == [7, 6, 5]
    assert model(**inputs)[0].isfinite().all()


@pytest.mark.parametrize("name", zoo.GENERATING)
def test_generates_as_many_tokens_as_asked(name: str) -> None:
    model = zoo.build(name)
    inputs = zoo.inputs(name, model, padding="left")
    inputs.pop("decoder_input_ids", None)
    out = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    start = 1 if model.config.is_encoder_decoder else 7
    assert out.shape == (2, start + 6)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_dropout_is_there_when_asked_for(name: str) -> None:
    model = zoo.build(name, dropout=0.3).train()
    inputs = zoo.inputs(name, model)
    assert not torch.equal(model(**inputs)[0], model(**inputs)[0])
    still = zoo.build(name).train()
    assert torch.equal(still(**inputs)[0], still(**inputs)[0])


def test_exact_norms_survive_copy_and_pickle() -> None:
    model = zoo.build("llama", torch.float64)
    norm = model.model.norm
    assert isinstance(copy.deepcopy(model).model.norm, type(norm))
    assert isinstance(pickle.loads(pickle.dumps(norm)), nn.Module)
