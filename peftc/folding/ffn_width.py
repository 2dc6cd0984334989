"""Folds bottlenecks by widening ffns: W_down (act(W_up x) ⊕ act(D x)) has the units of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers import PretrainedConfig

from peftc.adapters.base import dtype_name
from peftc.addressing.sites import Site, parameter_name
from peftc.equation_code.code import function_named
from peftc.equations.primitives import ACTIVATIONS
from peftc.folding.own_forward import base_class, computes_product
from peftc.folding.report import Change, Folded, FoldReport, Refused
from peftc.folding.rounding import rounded
from peftc.folding.unrounded_parameters import sum_dtype
from peftc.folding.weights import Folding, listed_names
from peftc.forms.module import FormModule
from peftc.forms.shapes import Weight
from peftc.installation.journal import Journal, transaction
from peftc.installation.record import installation_of, is_installed
from peftc.planning.foldability.affine import is_linear
from peftc.planning.foldability.check import is_number
from peftc.planning.ir import Arithmetic, Constant, FormCall, Read, SiteEdit, Term
from peftc.recognition.layer_types import LayerType
from peftc.rewriting.edits import CONTAINER, SHARED
from peftc.runtime.parameters import dense

GRID = torch.linspace(-8, 8, 161, dtype=torch.float64)  # where activations are compared
CLOSE = 1e-12
Bottleneck = tuple[FormCall, tuple[tuple[str, Term], ...]]  # a form, and its factors with their operators


@dataclass(frozen=True, eq=False)
class HiddenUnits:
    """New hidden units of one ffn."""

    edit: str
    up: Site
    down: Site
    rows: Tensor  # (n, d_in)
    biases: Tensor | None  # (n,)
    columns: Tensor  # (d_out, n)
    constant: Tensor | None  # (d_out,)


def fold_and_widen(
    model: nn.Module, only: Iterable[str] | None, name: str | None, sample: Mapping[str, Any] | None, dequantize: bool
) -> FoldReport:
    """Folds, widens, and folds what could not be folded before, in one transaction."""
    names = None if only is None else listed_names(only)
    folded: list[Folded] = []
    with transaction() as (journal, deferral), deferral.interruptible():
        while True:
            report = Folding(model, names, name, sample, dequantize, journal).run(strict=False)
            folded += report.folded
            refused = report.refused if is_installed(model) else ()
            names = None if names is None else tuple(one.edit for one in refused if one.edit in names)
            if not refused or names == ():
                return FoldReport(tuple(folded), refused)
            own_name = name if name in {spec.name for spec in installation_of(model).specs} else None
            widened, reasons = Widening(model, names, own_name, sample, dequantize, journal).widen()
            if not widened:
                notes = {edit: f"; not wider: {reason}" for edit, reason in reasons.items()}
                refused = tuple(Refused(r.edit, r.reason + notes.get(r.edit, "")) for r in refused)
                return FoldReport(tuple(folded), refused)
            folded += widened
            done = {one.edit for one in widened}
            names = None if names is None else tuple(edit for edit in names if edit not in done)
            if not is_installed(model) or names == ():
                return FoldReport(tuple(folded), tuple(one for one in refused if one.edit not in done))


class Widening(Folding):
    """Widens ffns by edits that do not fold. Nothing of the model changes before `replace`."""

    folded_first: Collection[str] = ()  # edits that will be in the weights before

    def widen(self) -> tuple[tuple[Folded, ...], dict[str, str]]:
        """The edits that became hidden units, and why the others cannot. Raises: P530."""
        units, reasons = self.all_units()
        if not units:
            return (), reasons
        layers: dict[str, list[HiddenUnits]] = defaultdict(list)
        for one in (one for each in units.values() for one in each):
            layers[one.up.path.rpartition(".")[0]].append(one)
        ffns = [WiderFfn(self.model, units_of_layer) for units_of_layer in layers.values()]
        self.replace(list(units), ffns)
        changes = {name: tuple(c for ffn in ffns for c in ffn.changes if name in c.edits) for name in units}
        return tuple(Folded(name, changes[name]) for name in units), reasons

    def all_units(self) -> tuple[dict[str, list[HiddenUnits]], dict[str, str]]:
        """The units of each edit that can become some, and why the others cannot."""
        units: dict[str, list[HiddenUnits]] = {}
        reasons: dict[str, str] = {}
        for name, site_edits in self.places.items():
            if name not in self.others and name not in self.folded_first:
                try:
                    units[name] = [self.units(one) for one in site_edits]
                except NotWider as error:
                    reasons[name] = error.reason
        return units, reasons

    def units(self, site_edit: SiteEdit) -> HiddenUnits:
        """The units that an edit has at a site. Raises: NotWider."""
        site = site_edit.site
        if (parts := bottleneck_of(site_edit)) is None:
            raise NotWider("it is not a sum of `h` and a bottleneck of `x`")
        form, factors = parts
        up, down, hidden = (self.sites.get(f"{site.path}.{name}") for name in ("up", "down", "hidden"))
        if up is None or down is None or hidden is None or f"{site.path}.gate" in self.sites:
            raise NotWider(f"`{site.path}` is not two Linears with an activation between them")
        if up.bare or down.bare:
            raise NotWider(f"the matrices of `{site.path}` are parameters of no Linear")
        if not (is_linear(up) and is_linear(down) and site.states["h"].linear == down.path):
            raise NotWider(f"`h` of `{site.path}` is not simply the output of `down`")
        places = (one.states["x"].activation for one in (up, down))
        if any(place is not None and place.kernel is not None for place in places):
            raise NotWider(f"`{site.path}` has convolutions over several positions")
        for linear in (up, down):
            self.check_forward(linear)
        self.check_alone(site_edit, up, down)
        own = self.activation(site, up, hidden)
        modules = self.modules(site_edit)
        scale = factor_of(factors, modules)
        bottleneck = modules[form.instance.key].hidden_units()
        if bottleneck is None:
            raise NotWider(f"`{form.instance.form.name}` is not one bottleneck")
        rows, biases, columns, constant, act = bottleneck
        columns = columns * scale
        if act == "none":
            if (own(GRID) - own(-GRID) - GRID).abs().max() > CLOSE:
                raise NotWider(f"the activation of `{site.path}` does not make a linear unit of two")
            rows, columns = torch.cat([rows, -rows]), torch.cat([columns, -columns], 1)
            biases = None if biases is None else torch.cat([biases, -biases])
        elif act not in ACTIVATIONS or (own(GRID) - function_named(ACTIVATIONS[act].torch)(GRID)).abs().max() > CLOSE:
            raise NotWider(f"the activation of `{site.path}` is not {act}")
        constant = None if constant is None else constant * scale
        return HiddenUnits(site_edit.edit, up, down, rows, biases, columns, constant)

    def check_forward(self, linear: Site) -> None:
        """Raises: NotWider where a class's own code computes something else than a product."""
        module, weight = self.model.get_submodule(linear.module), linear.states["w"].weight
        if weight is None or not computes_product(module, weight):
            raise NotWider(f"`forward` of {base_class(module).__name__} is not simply a product with its weight")

    def check_alone(self, site_edit: SiteEdit, up: Site, down: Site) -> None:
        """Raises: NotWider where another edit needs the ffn as it is, or acts before this one."""
        path, order = site_edit.site.path, list(self.places)
        for other in (one for one in self.record.site_edits if one.edit not in self.folded_first):
            inside = other.site.path.startswith(f"{path}.") and not other.site.path.endswith((".norm", ".add"))
            before = other.site.path == path and order.index(other.edit) < order.index(site_edit.edit)
            if inside or (before and any(a.state == "h" for a in other.assigns) and bottleneck_of(other) is None):
                raise NotWider(f"`{other.edit}` at `{other.site.path}` stays")
        table = self.analysis.table
        for site in (up, down):
            for ref in (state.weight for state in site.states.values() if state.weight is not None):
                name = parameter_name(ref)
                shared = any(name in group for group in (*table.tied, *table.overlaps, *table.external_reads))
                if ref.is_partial or site.calls > 1 or shared:
                    raise NotWider(f"`{name}` is used elsewhere, too")
                if name in self.trained:
                    raise NotWider(f"`{name}` is trained by `{self.trained[name]}`, which stays")
                if (reason := self.unwritable_parameter(name)) is not None:
                    raise NotWider(reason)

    def activation(self, site: Site, up: Site, hidden: Site) -> Callable[[Tensor], Tensor]:
        """The function between `up` and `down`. Raises: NotWider where there is more."""
        types = {kind.key: kind for stack in self.analysis.structure.stacks for kind in stack.kinds}
        layer_type = types.get(site.kind)
        states = [site.states.get("x"), up.states.get("x"), up.states.get("h"), hidden.states.get("h")]
        names = [state.activation.node if state and state.activation else None for state in states]
        graph = {} if layer_type is None else {node.name: node for node in layer_type.traced.graph.nodes}
        nodes = [graph.get(name) for name in names if name is not None]
        if layer_type is None or len(nodes) < 4 or None in nodes or nodes[0] is not nodes[1]:
            raise NotWider(f"`x` of `{site.path}` is not what `up` reads")
        _, _, start, end = nodes
        assert start is not None
        assert end is not None
        return lambda grid: ActivationFunction(layer_type, {start: grid}).value(end)

    def replace(self, edits: Collection[str], ffns: Collection[WiderFfn]) -> None:
        """Puts the wider weights in place and takes the edits out, in one transaction."""
        with transaction(self.journal) as (journal, deferral):
            for ffn in ffns:
                ffn.swap(journal)
            with deferral.interruptible():
                values = wider_config(self.model, {ffn.width for ffn in ffns})
                self.remove_edits(edits, [name for ffn in ffns for name in ffn.created], journal)
            config = cast(Any, self.model).config if values else None
            for name, value in values.items():
                journal.steps.append(partial(setattr, config, name, getattr(config, name)))
                setattr(config, name, value)


class WiderFfn:
    """The weights of one ffn with new hidden units."""

    def __init__(self, model: nn.Module, units: list[HiddenUnits]) -> None:
        up, down = units[0].up, units[0].down
        self.modules = [model.get_submodule(site.module) for site in (up, down)]
        self.changes: list[Change] = []
        self.created: list[str] = []
        self.values: list[dict[str, Tensor]] = [{}, {}]
        self.edits = tuple(dict.fromkeys(one.edit for one in units))
        rows, columns = torch.cat([one.rows for one in units]), torch.cat([one.columns for one in units], 1)
        self.width = (width_of(up), width_of(up) + len(rows))
        self.put(0, up, "w", rows)
        self.put(1, down, "w", columns)
        biases = [rows.new_zeros(len(one.rows)) if one.biases is None else one.biases for one in units]
        if any(one.biases is not None for one in units) or "b" in up.states:
            self.put(0, up, "b", torch.cat(biases))
        constants = [one.constant for one in units if one.constant is not None]
        if constants:
            self.put(1, down, "b", torch.stack(constants).sum(0))

    def put(self, at: int, site: Site, state: str, more: Tensor) -> None:
        """Adds rows (to `up`), columns (to `down`) or a constant; rounds once. Raises: P530."""
        module, weight = self.modules[at], site.states["w"].weight
        assert weight is not None
        attribute = weight.attribute if state == "w" else "bias"
        old, like = getattr(module, attribute, None), dense(getattr(module, weight.attribute).detach())
        name, dtype = f"{site.module}.{attribute}", sum_dtype(like.dtype)
        more = more.detach().to(like.device, dtype)
        if state == "w":
            whole = like.t() if weight.transposed else like
            new = torch.cat([whole.to(dtype), more], at)
            new = new.t() if weight.transposed else new
        else:
            own = like.new_zeros(width_of(site)) if old is None else old.detach()
            new = torch.cat([own.to(dtype), more]) if at == 0 else own.to(dtype) + more
            if old is None:
                self.created.append(name)
        new = rounded(name, new, like.dtype, self.edits).contiguous()
        self.values[at][attribute] = new
        added = new.numel() - (0 if old is None else old.numel()) or int((more != 0).sum())
        self.changes.append(Change(name, new.numel(), added, 1.0, dtype_name(like), old is None, self.edits))

    def swap(self, journal: Journal) -> None:
        grown = self.width[1] - self.width[0]
        for at, module in enumerate(self.modules):
            for name in ("out_features", "nf") if at == 0 else ("in_features", "nx"):
                if hasattr(module, name):
                    size = getattr(module, name)
                    journal.steps.append(partial(setattr, module, name, size))
                    setattr(module, name, size + grown)
            own = dict(module.named_parameters(recurse=False))
            for name, value in self.values[at].items():
                old = own.get(name)
                journal.steps.append(partial(module.register_parameter, name, old))
                module.register_parameter(name, nn.Parameter(value, old is not None and old.requires_grad))


@dataclass(eq=False)
class ActivationFunction:
    """Evaluates a layer's graph from known values. Raises: NotWider where anything else is read."""

    layer_type: LayerType
    known: dict[fx.Node, Any]

    def value(self, node: fx.Node) -> Any:
        if node not in self.known:
            self.known[node] = self.evaluate(node)
        return self.known[node]

    def evaluate(self, node: fx.Node) -> Any:
        source = self.layer_type.layer.passes_through(node)
        if source is not None:  # dropout, casts
            return self.value(source)
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        match node.op:
            case "call_function" if callable(node.target):
                return node.target(*args, **kwargs)
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case "call_module":
                module = self.layer_type.root.get_submodule(str(node.target))
                if not any(True for _ in module.parameters()):
                    return module(*args, **kwargs)
            case _:
                pass
        raise NotWider("something else stands between `up` and `down`")


def width_of(site: Site) -> int:
    """The features that a Linear gives."""
    shape = site.states["w"].shape
    assert isinstance(shape, Weight)
    return shape.d_out


def wider_config(model: nn.Module, widths: Collection[tuple[int, int]]) -> dict[str, int]:
    """The keys of the configuration that take the new width, to save and load the model.

    None if widths differ between ffns, or a model of the new configuration has other shapes.
    """
    config = getattr(model, "config", None)
    if len(widths) != 1 or not isinstance(config, PretrainedConfig):
        return {}
    ((old, new),) = widths
    names = [name for name, value in config.to_dict().items() if value == old and type(value) is int]
    changed = deepcopy(config)
    for name in names:
        setattr(changed, name, new)
    try:
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in type(model)(changed).named_parameters()}
    except Exception:  # a model's __init__ raises whatever its own checks raise
        return {}
    ours = {CONTAINER, SHARED}
    own = ((name, p) for name, p in model.named_parameters() if ours.isdisjoint(name.split(".")))
    return dict.fromkeys(names, new) if all(shapes.get(name) == p.shape for name, p in own) else {}


@dataclass(eq=False)
class NotWider(Exception):
    reason: str  # why an edit is no bottleneck, or its ffn cannot be widened


def bottleneck_of(site_edit: SiteEdit) -> Bottleneck | None:
    """The bottleneck of `h += factors * form(x)`, independent of h: such edits commute."""
    is_ffn = site_edit.site.steps[-1][0] == "ffn" and not site_edit.lets
    if is_ffn and [assign.state for assign in site_edit.assigns] == ["h"]:
        match site_edit.assigns[0].value:
            case Arithmetic("+", Read("h"), other) | Arithmetic("+", other, Read("h")) if bottleneck := product(other):
                return bottleneck
            case _:
                pass
    return None


def product(term: Term) -> Bottleneck | None:
    match term:
        case FormCall(input=Read(state="x")) if not term.instance.tasks:
            return term, ()
        case Arithmetic(op="*", left=left, right=right):
            for one, other in ((left, right), (right, left)):
                if is_number(other) and (inner := product(one)) is not None:
                    return inner[0], (*inner[1], ("*", other))
        case Arithmetic(op="/", left=left, right=right) if is_number(right) and (inner := product(left)) is not None:
            return inner[0], (*inner[1], ("/", right))
        case _:
            pass
    return None


def factor_of(factors: Collection[tuple[str, Term]], modules: Mapping[str, FormModule]) -> Tensor:
    scale = torch.ones((), dtype=torch.float64)
    for op, term in factors:
        if isinstance(term, Constant):
            value = torch.tensor(term.value, dtype=torch.float64)
        else:
            assert isinstance(term, FormCall)
            value = modules[term.instance.key](scale).detach().squeeze()
        scale = scale * value if op == "*" else scale / value
    return scale
