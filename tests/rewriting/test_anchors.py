"""Sites of a layer's child module as seen from the layer."""

from __future__ import annotations

import pytest
import torch

import peftc
from peftc.rewriting.anchors import Anchor
from tests import zoo
from tests.laws.harness import close


@pytest.mark.parametrize(
    ("frame", "target", "region", "expected"),
    [
        ("", "ff.dropout", "", ("", "ff.dropout")),
        ("ff", "dropout", "", ("ff", "dropout")),
        ("ff", "dropout", "ff", ("", "dropout")),  # from the calling code
        ("block.ff", "inner.dropout", "block", ("ff", "inner.dropout")),
        ("block.ff", "block.shared", "block", ("ff", "shared")),  # the module of another sub-layer
    ],
)
def test_one_of_several_calls_of_a_module(frame: str, target: str, region: str, expected: tuple[str, str]) -> None:
    anchor = Anchor("node", frame, (f"call_module {target}", 1)).relative(region)
    assert (anchor.module, anchor.key) == (expected[0], (f"call_module {expected[1]}", 1))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_reader_of_a_state_gets_its_edited_value(name: str) -> None:
    """Three projections read a norm's output: doubling it equals doubling the norm's weight."""
    model, base = (zoo.build(name, torch.float64).eval() for _ in range(2))
    norms = [site for site in peftc.sites(base).sites if site.path.endswith((".attn.self.norm", ".ffn.norm"))]
    peftc.compile(
        "peft 1\nedit e at layer[*].attn.self.norm | layer[*].ffn.norm { h *= vector(init=2) }", model, seed=0
    )
    with torch.no_grad():
        for site in norms:
            base.get_submodule(site.module).weight *= 2
        inputs = zoo.inputs(name, base)
        close(model(**inputs).logits, base(**inputs).logits, "all norms")
    assert norms
