"""Sample inputs, derived from the model's own forward and configuration."""

import pytest
import torch
from torch import nn

from peftc.diagnostics import PeftcError
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.skeleton import sample_inputs
from tests import zoo


@pytest.mark.parametrize("name", zoo.ALL)
def test_ids_for_every_stack_and_no_mask(name: str) -> None:
    fake = fake_copy(zoo.build(name))
    inputs = sample_inputs(fake)
    assert set(inputs) == {"input_ids"} | ({"decoder_input_ids"} if fake.config.is_encoder_decoder else set())
    cache = {"use_cache": True} if name in zoo.GENERATING else {}
    with fake_mode(fake), torch.no_grad():
        out = fake(**inputs, **cache)
    assert (out.get("past_key_values") is not None) == (name in zoo.GENERATING)


def test_a_model_with_unknown_inputs_asks_for_a_sample() -> None:
    with pytest.raises(PeftcError) as excinfo:
        sample_inputs(fake_copy(nn.Linear(2, 2)))
    assert excinfo.value.diagnostics[0].code == "P507"
    assert "sample=" in str(excinfo.value)
