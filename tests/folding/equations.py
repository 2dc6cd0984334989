"""Terms and sites built by hand, and the unfolded value of an edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from peftc.addressing.sites import Site, State, WeightRef
from peftc.diagnostics import PeftcError
from peftc.equations.table import FORMS
from peftc.folding.module_folds import combine
from peftc.folding.unrounded_parameters import CannotFold, Fold
from peftc.forms import Dims
from peftc.forms.module import FormModule, build
from peftc.forms.shapes import Shape, Tokens, Vector, Weight
from peftc.planning.foldability.affine import FoldTarget, Side
from peftc.planning.ir import Arithmetic, Assign, Constant, FormCall, FormInstance, FrozenCall, Read, SiteEdit, Term
from peftc.syntax import ast

SOURCE = ast.Name("…")


def read(state: str, shape: Shape) -> Read:
    return Read(state, shape=shape, source=SOURCE)


def number(value: float) -> Constant:
    return Constant(value, shape=Tokens(1), source=SOURCE)


def op(symbol: str, left: Term, right: Term) -> Arithmetic:
    shape = right.shape if isinstance(left, Constant) else left.shape
    return Arithmetic(symbol, left, right, shape=shape, source=SOURCE)  # type: ignore[arg-type]


def apply(name: str, value: Term | None, target: Shape, key: str | None = None, **args: object) -> FormCall:
    form = FORMS[name]
    dims = Dims(value.shape if value else None, target, 8)
    instance = FormInstance(key or name, form, form.fill(args), dims)  # type: ignore[arg-type]
    return FormCall(instance, value, shape=target, source=SOURCE)


def frozen(name: str, value: Term) -> FrozenCall:
    return FrozenCall(name, name, value, shape=value.shape, source=SOURCE)


def assign(state: str, value: Term) -> Assign:
    return Assign(state, value, ast.Equation(state, "=", SOURCE))


def site(path: str, d_out: int, d_in: int, *, bias: bool = True, linear: str = "", weight: bool = True) -> Site:
    """A Linear (with w); with `weight=False`, a site with hidden states only."""
    states = {"x": State("x", Tokens(d_in)), "h": State("h", Tokens(d_out), linear=linear)}
    if weight:
        states["w"] = State("w", Weight(d_out, d_in), weight=WeightRef(path, "weight"))
    if weight and bias:
        states["b"] = State("b", Vector(d_out), weight=WeightRef(path, "bias"))
    steps = tuple((part.partition("[")[0], None) for part in path.split("."))
    return Site(path, steps, path, "root", "kind", states)


def instances(term: Term) -> list[FormInstance]:
    match term:
        case FormCall(instance=instance, input=value):
            return [instance, *([] if value is None else instances(value))]
        case Arithmetic(left=left, right=right):
            return instances(left) + instances(right)
        case FrozenCall(input=value):
            return instances(value)
        case _:
            return []


def site_edit(where: Site, *assigns: Assign) -> SiteEdit:
    by_id = {id(i): i for a in assigns for i in instances(a.value)}
    return SiteEdit("edit", where, assigns, tuple(by_id.values()))


def trained(
    edit: SiteEdit, dtype: torch.dtype = torch.float64, base: Mapping[str, Tensor] | None = None
) -> dict[str, FormModule]:
    """The modules of an edit, with every parameter perturbed."""
    modules: dict[str, FormModule] = {}
    for instance in edit.instances:
        module = build(instance, dtype=dtype).eval()
        module.initialise(_seeded, base or {})
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=_seeded(instance.key + name), dtype=dtype))
        modules[instance.key] = module
    return modules


@dataclass(frozen=True)
class Folded:
    weight: Tensor
    bias: Tensor | None
    survived: float


@dataclass(frozen=True)
class Unfolded:
    reason: str


def fold(
    edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side | None = None
) -> Folded | Unfolded:
    """A Linear with this weight and bias, after a fold of an edit at it."""
    states = {assign.state for assign in edit.assigns}
    output = "input" if states == {"z"} or edit.site.steps[-1][0] == "hidden" else "output"
    side = side or ("weight" if states <= {"w", "b"} else output)
    linear = torch.nn.Linear(1, 1)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    refs = WeightRef("q", "weight"), None if bias is None else WeightRef("q", "bias")
    target = FoldTarget(side, edit.site, *refs)
    try:
        values = combine(torch.nn.ModuleDict({"q": linear}), "q", [Fold(edit, target, modules, (0,))])
    except CannotFold as error:
        return Unfolded(error.reason)
    except PeftcError as error:
        return Unfolded(str(error))
    new = {name: value for name, (value, _) in values.items()}
    survived = values["q.weight"][1].survived if "q.weight" in values else 1.0
    return Folded(new.get("q.weight", weight), new.get("q.bias", bias), survived)


def run(edit: SiteEdit, modules: Mapping[str, FormModule], states: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states after the edit's equations, computed on plain tensors. `like` gives the dtype of
    forms without input.
    """
    values: dict[int, Tensor] = {}
    for equation in edit.assigns:
        states = states | {equation.state: _value(equation.value, modules, states, values)}
    return states


def _value(
    term: Term, modules: Mapping[str, FormModule], states: Mapping[str, Tensor], values: dict[int, Tensor]
) -> Tensor:
    if id(term) not in values:
        values[id(term)] = _fresh(term, modules, states, values)
    return values[id(term)]


def _fresh(
    term: Term, modules: Mapping[str, FormModule], states: Mapping[str, Tensor], values: dict[int, Tensor]
) -> Tensor:
    match term:
        case Read(state=state):
            return states[state]
        case Constant(value=value):
            return torch.tensor(value, dtype=torch.float64)
        case FormCall(instance=instance, input=value):
            like = states["like"] if value is None else _value(value, modules, states, values)
            return modules[instance.key](like)
        case Arithmetic(op=symbol, left=left, right=right):
            function = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}[symbol]
            return function(_value(left, modules, states, values), _value(right, modules, states, values))
        case _:
            raise AssertionError(term)


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(sha256(name.encode()).digest()[:4], "big"))
