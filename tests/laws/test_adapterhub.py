"""Compiled models equal AdapterHub's own code with the same weights: outputs and gradients. The
numbers are in `tests/reference/adapterhub.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.reference import adapterhub
from tests.reference.adapterhub import FIRST, LAST, LENGTH, PHM, RANK, REDUCTION, REFT, WIDTH
from tests.reference.reference import Reference
from tests.reference.test_adapterhub import CASES, MEASURED, PRE_NORM, SLOPES, TOLERANCE, places

SPECS = Path(__file__).parents[2] / "specs"
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "unipelt-paper": ("unipelt", {"l": LENGTH, "r": RANK, "reparam": f"mlp({WIDTH})"}),
    "loreft": ("loreft", {"r": REFT}),
    "loreft-first": ("loreft", {"r": REFT, "first": FIRST}),
    "loreft-ends": ("loreft", {"r": REFT, "first": FIRST, "last": LAST}),
    "direft": ("direft", {"r": REFT}),
}
UNIPELT = f"""
edit qv at layer[*].attn.q | layer[*].attn.v {{ h += gate(x) * lora(x, r={RANK}, alpha={RANK}) }}
edit prefix at layer[*].attn {{ kv = concat(gate(x) * prefix(len={LENGTH}, reparam=mlp({WIDTH})), kv) }}
edit ffn at layer[*].ffn {{ let r = %s  h += gate(r) * adapter(r, reduction=16, act=relu) }}
"""


def spec_of(method: str, name: str) -> str:
    """The specs of methods that no recipe states."""
    pre = name in PRE_NORM
    reads = "h + res" if pre else "norm(h + res)"
    prefix = f"edit p at layer[*].attn {{ kv = concat(prefix(len={LENGTH}, reparam=mlp({WIDTH})), kv) }}"
    parallel = "edit e at layer[*].ffn {{ h += 4 * adapter({}, reduction={}, init=lora) }}"
    return (
        "peft 1\n"
        + {
            "seq_bn": f"edit e at layer[*].ffn {{ h += adapter({reads}, reduction=16) }}",
            "double_seq_bn": "edit e at layer[*].attn.self | layer[*].ffn { h += adapter(h, reduction=16, act=silu) }",
            "par_bn": parallel.format("res" if pre else "x", 2),
            "prefix": prefix,
            "mam": prefix + "\n" + parallel.format("res" if pre else "x", REDUCTION),
            "compacter": f"edit e at layer[*].attn.self | layer[*].ffn {{ h += phm(h, reduction={PHM}, act=gelu) }}",
            "compacter++-paper": f"edit e at layer[*].ffn {{ h += phm(h, reduction={PHM}, act=gelu) }}",
            "compacter++": f"edit e at layer[*].ffn {{ h += phm({reads}, reduction={PHM}, act=gelu) }}",
            "unipelt": UNIPELT % reads,
            "noreft": f"edit layers at layer[*] {{ h += reft(h, r={REFT}, orthogonal=false) }}",
        }[method]
    )


@pytest.mark.parametrize(("method", "name"), CASES)
def test_the_same_numbers_and_gradients(method: str, name: str) -> None:
    model = zoo.build(name, torch.float64)
    expected_keys = places(Reference(name, model), method)
    if method in RECIPES:
        recipe, settings = RECIPES[method]
        peftc.compile(SPECS / f"{recipe}.peft", model, seed=0, settings=settings)
    else:
        peftc.compile(spec_of(method, name), model, seed=0)
    parameters = peftc.parameters(model)
    assert set(parameters) == set(expected_keys)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(adapterhub.draw(*expected_keys[key]))
    labels = {expected_keys[key][0]: parameter for key, parameter in parameters.items()}
    numbers, slopes = adapterhub.measured(model, name, labels)
    assert numbers == pytest.approx(MEASURED[method][name], rel=TOLERANCE, abs=TOLERANCE)
    assert slopes == pytest.approx(SLOPES[method][name], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", adapterhub.FUSION)
def test_the_same_fusion(name: str, tmp_path: Path) -> None:
    """Two saved adapters, fused. AdapterHub's key bias changes nothing."""
    modules = {
        layer.ffn.path: adapterhub.adapter_module(name, layer.stack, layer.index, "ffn")
        for layer in Reference(name, zoo.build(name, torch.float64)).layers
    }
    text = "peft 1\nedit e at layer[*].ffn { h += %s }"

    def compiled(form: str, part: str, names: dict[str, str]) -> tuple[Any, dict[str, torch.Tensor]]:
        model = peftc.compile(text % form, zoo.build(name, torch.float64), seed=0)
        parameters: dict[str, torch.Tensor] = {}
        for key, parameter in peftc.parameters(model).items():
            _, path, tensor = key.split("/")
            label = f"{modules[path]}.{part}.{names[tensor.rpartition('.')[2]]}"
            parameters[label] = parameter
            with torch.no_grad():
                parameter.copy_(adapterhub.draw(label, tuple(parameter.shape)))
        return model, parameters

    for one in "ab":
        model, _ = compiled("adapter(h, reduction=16)", f"adapters.{one}", adapterhub.NAMES["adapter"])
        peftc.save(model, tmp_path / one)
    part = adapterhub.FUSED_BY.rstrip(".")
    model, labels = compiled("fusion(h, n=2, reduction=16)", part, adapterhub.FUSION_NAMES)
    peftc.fuse(model, [tmp_path / "a", tmp_path / "b"])
    numbers, slopes = adapterhub.measured(model.eval(), name, labels)
    assert numbers == pytest.approx(MEASURED["fusion"][name], rel=TOLERANCE, abs=TOLERANCE)
    assert slopes == pytest.approx(SLOPES["fusion"][name], rel=TOLERANCE, abs=TOLERANCE)
