"""The references compute what AdapterHub's own code computed (see `adapterhub.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import zoo
from tests.reference import adapterhub, methods
from tests.reference.reference import Reference

MEASURED = json.loads((Path(__file__).parent / "adapterhub.json").read_text())
CASES = [(method, name) for method, names in adapterhub.METHODS.items() for name in names]
PRE_NORM = ("t5", "gpt2")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def method_of(method: str, name: str) -> methods.Method:
    """What each configuration means; in pre-norm models its parallel adapter reads the residual, not x."""
    pre = name in PRE_NORM
    parallel = methods.parallel_residual if pre else methods.parallel
    return {
        "seq_bn": (methods.seq_bn_without_norm if pre else methods.seq_bn)("e", "ffn"),
        "double_seq_bn": methods.sequential("e", "self ffn", "silu"),
        "par_bn": parallel("e", "ffn", s=4.0),
        "prefix": methods.prefix_mlp("p"),
        "mam": methods.together(methods.prefix_mlp("p"), parallel("e", "ffn", s=4.0)),
    }[method]


def weights(ref: Reference, method: str) -> dict[str, Tensor]:
    r = 32 // {"seq_bn": 16, "double_seq_bn": 16, "par_bn": 2}.get(method, adapterhub.REDUCTION)
    sites = [
        (site.path, layer.stack, layer.index, site.slot)
        for layer in ref.layers
        for site in (*layer.attentions, layer.ffn)
        if site.slot != "cross"
    ]
    groups = {f"{layer.stack}.{a.slot}": layer.index + 1 for layer in ref.layers for a in layer.attentions}
    found: dict[str, Tensor] = {}
    for ours, label in adapterhub.labels(ref.name, iter(groups), iter(sites)).items():
        path, kind = ours.rsplit(".", 1)
        if path.endswith("/adapter"):
            shape: tuple[int, ...] = {"down": (r, 32), "down_bias": (r,), "up": (32, r), "up_bias": (32,)}[kind]
            found[f"e/{ours}"] = adapterhub.draw(label, shape)
        else:
            m, rows = adapterhub.WIDTH, 2 * 32 * groups[path.removeprefix("prefix.").removesuffix("/prefix")]
            shape = {
                "embedding": (adapterhub.LENGTH, 32),
                "down": (m, 32),
                "down_bias": (m,),
                "up": (rows, m),
                "up_bias": (rows,),
            }[kind]
            found[f"p/{ours}"] = adapterhub.draw(label, shape)
    return found


@pytest.mark.parametrize(("method", "name"), CASES)
def test_the_same_numbers(method: str, name: str) -> None:
    ref = Reference(name, zoo.build(name, torch.float64, attn_implementation="eager"))
    base = adapterhub.numbers(ref.model, name)
    method_of(method, name)(ref, weights(ref, method))
    now = adapterhub.numbers(ref.model, name)
    for got, want, was in zip(now, MEASURED[method][name], base, strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert abs(got - was) > 1e-6


@pytest.mark.parametrize("name", MEASURED["base"])
def test_the_same_base(name: str) -> None:
    model = zoo.build(name, torch.float64, attn_implementation="eager")
    assert adapterhub.numbers(model, name) == pytest.approx(MEASURED["base"][name], rel=1e-6, abs=1e-6)
