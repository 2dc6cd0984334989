"""Lines of generated code that are too long for one."""

from __future__ import annotations

import torch

import peftc
from peftc.specialization.expressions import WIDTH, wrapped
from tests import zoo


def test_a_value_in_brackets_stays_a_value() -> None:
    value = "y" * (WIDTH - 10)
    assert wrapped(f"result = x + ({value} * 2)") == ["result = x + (", f"    {value} * 2", ")"]
    assert wrapped(f"result = f({value}, 2)") == ["result = f(", f"    {value},", "    2,", ")"]


def test_a_long_sum_computes() -> None:
    """The name of the sum in the code of this model makes a line that is longer than others."""
    model = zoo.build("gpt2", torch.float64)
    spec = "peft 2\nedit a at layer[*].ffn { h += scalar(init=1) * adapter(res, r=4, act=relu) }\n"
    with torch.no_grad():
        before = model(**zoo.inputs("gpt2", model)).logits
        after = peftc.compile(spec, model, seed=0)(**zoo.inputs("gpt2", model)).logits
    assert before.shape == after.shape
    assert not torch.equal(before, after)
