"""Compiled models compute what AdapterHub's own code computed with the same weights (`tests/reference/adapterhub.json`)."""

from __future__ import annotations

import pytest
import torch

import peftc
from tests import zoo
from tests.reference import adapterhub
from tests.reference.reference import Reference
from tests.reference.test_adapterhub import CASES, MEASURED, PRE_NORM, weights


def spec_of(method: str, name: str) -> str:
    pre = name in PRE_NORM
    reads = "h + res" if pre else "norm(h + res)"
    prefix = "edit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }"
    parallel = "edit e at layer[*].ffn {{ h += 4 * adapter({}, reduction={}, init=lora) }}"
    return (
        "peft 1\n"
        + {
            "seq_bn": f"edit e at layer[*].ffn {{ h += adapter({reads}, reduction=16) }}",
            "double_seq_bn": "edit e at layer[*].attn.self | layer[*].ffn { h += adapter(h, reduction=16, act=silu) }",
            "par_bn": parallel.format("res" if pre else "x", 2),
            "prefix": prefix,
            "mam": prefix + "\n" + parallel.format("res" if pre else "x", adapterhub.REDUCTION),
        }[method]
    )


@pytest.mark.parametrize(("method", "name"), CASES)
def test_the_same_numbers(method: str, name: str) -> None:
    model = zoo.build(name, torch.float64)
    wanted = weights(Reference(name, model), method)
    peftc.compile(spec_of(method, name), model, seed=0)
    parameters = peftc.parameters(model)
    given = {key.replace("/p.prefix.", "/prefix."): parameter for key, parameter in parameters.items()}
    assert set(given) <= set(wanted)
    with torch.no_grad():
        for key, parameter in given.items():
            parameter.copy_(wanted[key])
    assert adapterhub.numbers(model, name) == pytest.approx(MEASURED[method][name], rel=1e-6, abs=1e-6)
