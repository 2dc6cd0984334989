"""Only the first of several equal layers runs; the observations of the others are
derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn
from transformers import AlbertConfig, AlbertModel

from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.skeleton import sample_inputs
from peftc.observation.recorder import Recorder
from peftc.recognition.layer_candidates import repeated_blocks
from tests import zoo


def shared() -> nn.Module:
    sizes: dict[str, Any] = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return AlbertModel(AlbertConfig(vocab_size=61, num_hidden_layers=6, num_hidden_groups=2, **sizes))


@pytest.mark.parametrize("build", [shared, *(partial(zoo.build, name) for name in ("bart", "llama", "t5"))])
def test_derived_observations_equal_those_of_a_run(build: Callable[[], nn.Module]) -> None:
    model = fake_copy(build())
    inputs, blocks, mode = sample_inputs(model), repeated_blocks(model), fake_mode(model)
    some, every = (Recorder(model, mode, blocks).run(lambda: model(**inputs), run_all) for run_all in (False, True))
    assert list(some.calls.items()) == list(every.calls.items())
    assert {n: kind for n, (kind, _) in some.layers.items()} == {n: kind for n, (kind, _) in every.layers.items()}
