"""Calls that end in one diagnostic and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import peftc

Q = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"
FFN = "peft 1\nedit f at layer[*].ffn { h += adapter(h, r=2, act=gelu) }\n"
DORA = "peft 1\nedit d at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }\n"
NORMS = "peft 1\ntrain n = [w] at layer[*].norm\n"


def refused(code: str, function: Callable[[], Any], model: nn.Module | None = None) -> peftc.Diagnostic:
    """The single diagnostic of a call; the model is unchanged afterwards."""
    before = None if model is None else Structure(model)
    with pytest.raises(peftc.PeftcError) as excinfo:
        function()
    assert [d.code for d in excinfo.value.diagnostics] == [code]
    if before is not None:
        before.assert_same()
    return excinfo.value.diagnostics[0]


class Structure:
    """Classes, attributes, parameters and flags of a model whose parameters may be on the meta
    device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.structure = model, self.now(model)

    def now(self, model: nn.Module) -> Any:
        parameters = {n: (id(p), p.requires_grad, p.device) for n, p in model.named_parameters()}
        return parameters, {n: (type(m), frozenset(vars(m))) for n, m in model.named_modules()}

    def assert_same(self) -> None:
        assert self.now(self.model) == self.structure
