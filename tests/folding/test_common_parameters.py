"""Edits that share parameters fold together, or not at all."""

from __future__ import annotations

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import close, randomise

SPEC = """peft 1
let common = shared({form})
edit a at layer[*].attn.q {{ {equation} }}
edit b at layer[*].ffn.down {{ {equation} }}"""
FORMS = [("vera(r=4)", "h += common(x)"), ("sparse(density=0.05, select=random)", "w += common()")]


@pytest.mark.parametrize(("form", "equation"), FORMS)
def test_one_of_two_does_not_fold(form: str, equation: str) -> None:
    """A parameter drawn for the widest site, or counted over all sites, would change if one of the
    edits were missing from the file.
    """
    model = peftc.compile(SPEC.format(form=form, equation=equation), zoo.build("llama", torch.float64), seed=0).eval()
    randomise(peftc.parameters(model))
    inputs = zoo.inputs("llama", model)
    want = model(**inputs).logits
    with pytest.raises(peftc.PeftcError, match="P531") as excinfo:
        peftc.fold(model, only=["b"])
    assert "shares parameters" in str(excinfo.value)
    assert torch.equal(model(**inputs).logits, want)
    assert [folded.edit for folded in peftc.fold(model).folded] == ["a", "b"]
    close(model(**inputs).logits, want, "folded")
