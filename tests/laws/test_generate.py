"""generate(), hidden states and attentions of compiled models equal those of models
edited by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import zoo
from tests.laws.harness import Case, close
from tests.laws.recipes import NAMED
from tests.matrix import checkerboard

GENERATING = ("bart", "t5", "gpt2", "llama")
METHODS = ("mam", "everything", "dora", "scaled-states", "interpolated", "seq-bn", "prefix-mlp")
PAIRS = [(method, name) for name, method in checkerboard(GENERATING, METHODS)]
PAIRS += [("loreft", "bart"), ("krona-res", "t5"), ("vera", "gpt2"), ("compacter", "gpt2"), ("oft", "llama")]
PAIRS += [
    ("said-scaled", "llama"),
    ("glora", "bart"),
    ("difffit", "gpt2"),
    ("ladder", "bart"),
    ("adaptive-prefix", "llama"),
]
TOKENS = 7


def prompt(name: str, model: torch.nn.Module, padding: zoo.Padding | None = "left") -> dict[str, Tensor]:
    inputs = zoo.inputs(name, model, batch=3, padding=padding)
    inputs.pop("decoder_input_ids", None)
    return inputs


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: Any) -> tuple[Case, torch.nn.Module]:
    torch.set_num_threads(1)
    method, name = request.param
    case = Case(NAMED[method], name).at_random()
    return case, case.reference(grad=False)[0].model


def generate(model: torch.nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        min_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beam"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_generate(pair: tuple[Case, torch.nn.Module], cache: bool, beams: int) -> None:
    case, reference = pair
    inputs = prompt(case.name, case.model)
    got = generate(case.model, inputs, use_cache=cache, num_beams=beams)
    want = generate(reference, inputs, use_cache=cache, num_beams=beams)
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.logits) >= 3
    for a, b in zip(got.logits, want.logits, strict=True):
        close(a, b, "logits")


def test_a_cache_changes_nothing_without_gates(pair: tuple[Case, torch.nn.Module]) -> None:
    """A gate averages over the tokens of one call, so only gates depend on the cache."""
    case, _ = pair
    if "gate(" in case.recipe.spec:
        pytest.skip("a gate sees fewer tokens with a cache")
    inputs = prompt(case.name, case.model)
    one, two = (generate(case.model, inputs, use_cache=c) for c in (True, False))
    assert torch.equal(one.sequences, two.sequences)
    for a, b in zip(one.logits, two.logits, strict=True):
        close(a, b, "logits")


def test_generate_without_padding(pair: tuple[Case, torch.nn.Module]) -> None:
    case, reference = pair
    inputs = prompt(case.name, case.model, padding=None)
    got, want = generate(case.model, inputs), generate(reference, inputs)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("method", ["mam", "multi-head"])
@pytest.mark.parametrize("name", ["bert", "roberta", "opt", "qwen3", *GENERATING])
def test_hidden_states_and_attentions(name: str, method: str) -> None:
    """Only eager attention returns attentions; with a prefix, its columns come first."""
    case = Case(NAMED[method], name, attn_implementation="eager").at_random()
    reference = case.reference(grad=False)[0].model
    exact = name in ("bart", "bert", "roberta", "t5", "gpt2")  # the other models compute the softmax in float32
    inputs = zoo.inputs(name, case.model)
    with torch.no_grad():
        got, want = (m(**inputs, output_hidden_states=True, output_attentions=True) for m in (case.model, reference))
    fields = [key for key in want if ("hidden_states" in key or "attentions" in key) and len(want[key])]
    assert len(fields) >= 2
    for key in fields:
        assert len(got[key]) == len(want[key])
        for a, b in zip(got[key], want[key], strict=True):
            assert a.shape == b.shape, key
            assert (a - b).abs().max() <= (1e-10 if exact else 1e-5), key
