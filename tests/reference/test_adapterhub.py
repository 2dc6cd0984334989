"""The references equal AdapterHub's own code: outputs and gradients (see `adapterhub.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import zoo
from tests.reference import adapterhub, literature, methods
from tests.reference.adapterhub import FIRST, LAST, LENGTH, RANK, REDUCTION, REFT, WIDTH
from tests.reference.reference import Reference
from tests.reference.table import Attention

KEPT = json.loads((Path(__file__).parent / "adapterhub.json").read_text())
MEASURED, SLOPES = KEPT["outputs"], KEPT["gradients"]
CASES = [(method, name) for method, names in adapterhub.METHODS.items() for name in names]
TOLERANCE = 1e-10
PRE_NORM = ("t5", "gpt2")
D = 32
Shape = tuple[int, ...]

UNIPELT = (
    ("qv", "lora", "q v"),
    ("qv", "gate", "q v"),
    ("prefix", "prefix", "group"),
    ("prefix", "gate", "self cross"),
    ("ffn", "adapter", "ffn"),
    ("ffn", "gate", "ffn"),
)
PARTS: dict[str, tuple[tuple[str, str, str], ...]] = {  # method: (edit, form, where)
    "seq_bn": (("e", "adapter", "ffn"),),
    "double_seq_bn": (("e", "adapter", "self ffn"),),
    "par_bn": (("e", "adapter", "ffn"),),
    "prefix": (("p", "prefix", "group"),),
    "mam": (("p", "prefix", "group"), ("e", "adapter", "ffn")),
    "compacter": (("e", "phm", "self ffn"), ("e", "phm", "edit")),
    "compacter++": (("e", "phm", "ffn"), ("e", "phm", "edit")),
    "compacter++-paper": (("e", "phm", "ffn"), ("e", "phm", "edit")),
    "unipelt": UNIPELT,
    "unipelt-paper": UNIPELT,
    "loreft": (("layers", "reft", "layer"),),
    "loreft-first": (("layers", "reft", "layer"),),
    "loreft-ends": (("layers", "reft", "layer"),),
    "noreft": (("layers", "reft", "layer"),),
    "direft": (("layers", "reft", "layer"),),
}
WIDTHS = {"par_bn": 16, "mam": D // REDUCTION}  # of the adapter; else 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def method_of(method: str, name: str) -> methods.Method:
    """The equations of each configuration; in pre-norm models its parallel adapter reads the
    residual, not x.
    """
    pre = name in PRE_NORM
    parallel = methods.parallel_residual if pre else methods.parallel
    return {
        "seq_bn": (methods.seq_bn_without_norm if pre else methods.seq_bn)("e", "ffn"),
        "double_seq_bn": methods.sequential("e", "self ffn", "silu"),
        "par_bn": parallel("e", "ffn", s=4.0),
        "prefix": methods.prefix_mlp("p"),
        "mam": methods.together(methods.prefix_mlp("p"), parallel("e", "ffn", s=4.0)),
        "compacter": literature.compacter("e", "self ffn", "gelu"),
        "compacter++": literature.compacter_after("e", "ffn", "gelu", norm=not pre),
        "compacter++-paper": literature.compacter("e", "ffn", "gelu"),
        "unipelt": unipelt(methods.gated_after("ffn", "ffn", norm=not pre)),
        "unipelt-paper": unipelt(methods.gated("ffn", "ffn")),
        "loreft": literature.reft("layers"),
        "loreft-first": literature.reft("layers", first=FIRST),
        "loreft-ends": literature.reft("layers", first=FIRST, last=LAST),
        "noreft": literature.reft("layers", orthogonal=False),
        "direft": literature.reft("layers", orthogonal=False, subtract=False),
    }[method]


def unipelt(adapter: methods.Method, alpha: float = RANK) -> methods.Method:
    return methods.together(methods.gated_lora("qv", "q v", alpha), methods.prefix_mlp("prefix", gated=True), adapter)


def shapes(form: str, r: int) -> dict[str, Shape]:
    """The shapes of a form's tensors at one site with D features."""
    n, m = 4, REDUCTION
    return {
        "adapter": {"down": (r, D), "down_bias": (r,), "up": (D, r), "up_bias": (D,)},
        "phm": {
            "down_left": (n, D // n, 1),
            "down_right": (n, 1, m // n),
            "down_bias": (m,),
            "up_left": (n, m // n, 1),
            "up_right": (n, 1, D // n),
            "up_bias": (D,),
        },
        "lora": {"A": (RANK, D), "B": (D, RANK)},
        "gate": {"weight": (1, D), "bias": (1,)},
        "reft": {"R": (REFT, D), "W": (REFT, D), "b": (REFT,)},
    }[form]


def places(ref: Reference, method: str) -> dict[str, tuple[str, Shape]]:
    """Our tensors by their saved names: the names that seed their values, and their shapes."""
    return {
        f"{edit}/{path}/{form}.{ours}": (label, shape)
        for edit, form, where in PARTS[method]
        for path, ours, label, shape in _places(ref, edit, form, where, WIDTHS.get(method, 2))
    }


def _places(ref: Reference, edit: str, form: str, where: str, r: int) -> Iterator[tuple[str, str, str, Shape]]:
    names = adapterhub.NAMES[form]
    if where == "edit":
        yield f"{edit}.{form}", "A", adapterhub.RULE, (4, 4, 4)
    elif where == "group":
        groups = {f"{layer.stack}.{a.slot}": layer.index + 1 for layer in ref.layers for a in layer.attentions}
        for group, depth in groups.items():
            sizes = ((LENGTH, D), (WIDTH, D), (WIDTH,), (2 * D * depth, WIDTH), (2 * D * depth,))
            for (ours, theirs), shape in zip(names.items(), sizes, strict=True):
                yield f"{edit}.{form}.{group}", ours, f"{adapterhub.group_module(ref.name, group)}.{theirs}", shape
    else:
        for path, module in _modules(ref, where.split()):
            for ours, shape in shapes(form, r).items():
                theirs = names[ours].removeprefix("gate.") if module.endswith("gates.a") else names[ours]
                yield path, ours, f"{module}.{theirs}", shape


def _modules(ref: Reference, where: list[str]) -> Iterator[tuple[str, str]]:
    """Site paths, and the modules that have the form there."""
    for layer in ref.layers:
        if "layer" in where:
            yield layer.path, f"{layer.module}.reft_layer.refts.a.units.0"
        for site in (*layer.attentions, layer.ffn):
            for role in "qv":
                if role in where and hasattr(site, role):
                    rows = getattr(site, role)
                    yield f"{site.path}.{role}", f"{rows.module}{'' if rows.stop is None else f'.{role}'}.loras.a"
            if isinstance(site, Attention) and "cross" in where:
                yield site.path, f"{site.core}.prefix_tuning.prefix_gates.a"
            elif site.slot in where:
                module = adapterhub.adapter_module(ref.name, layer.stack, layer.index, site.slot)
                yield site.path, f"{module}.adapters.a"


def weights(ref: Reference, method: str) -> dict[str, Tensor]:
    return {ours: adapterhub.draw(label, shape) for ours, (label, shape) in places(ref, method).items()}


def fresh(name: str) -> Reference:
    return Reference(name, zoo.build(name, torch.float64, attn_implementation="eager"))


def now(ref: Reference) -> list[float]:
    with torch.no_grad():
        return adapterhub.numbers(adapterhub.results(ref.model, ref.name), ref.name)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_the_same_numbers_and_gradients(method: str, name: str) -> None:
    ref = fresh(name)
    parameters = {key: value.requires_grad_() for key, value in weights(ref, method).items()}
    method_of(method, name)(ref, parameters)
    labels = {label: parameters[key] for key, (label, _) in places(ref, method).items()}
    outputs, slopes = adapterhub.measured(ref.model, name, labels)
    assert outputs == pytest.approx(MEASURED[method][name], rel=TOLERANCE, abs=TOLERANCE)
    assert slopes == pytest.approx(SLOPES[method][name], rel=TOLERANCE, abs=TOLERANCE)
    assert min(abs(a - b) for a, b in zip(outputs, MEASURED["base"][name], strict=True)) > 1e-6


@pytest.mark.parametrize("name", MEASURED["base"])
def test_the_same_base(name: str) -> None:
    assert now(fresh(name)) == pytest.approx(MEASURED["base"][name], rel=TOLERANCE, abs=TOLERANCE)


def test_a_gated_lora_of_theirs_is_not_scaled() -> None:
    """The papers have g (α/r) B A x (Mao et al. 2022, section 3; Hu et al. 2021, section 4.1).
    AdapterHub ignores α: with α = 2, r = 4 it computes α = r; the papers' value equals theirs with
    half the B.
    """
    measured, half = MEASURED["unipelt-paper"]["gpt2"], fresh("gpt2")
    parameters = weights(half, "unipelt-paper")
    adapter = methods.gated("ffn", "ffn")
    right = fresh("gpt2")
    unipelt(adapter, alpha=adapterhub.ALPHA)(right, parameters)
    unipelt(adapter)(
        half, {k: v * adapterhub.ALPHA / RANK if k.endswith("lora.B") else v for k, v in parameters.items()}
    )
    outputs = now(right)
    assert outputs == pytest.approx(now(half), rel=TOLERANCE)
    assert min(abs(a - b) for a, b in zip(outputs, measured, strict=True)) > 1e-3
