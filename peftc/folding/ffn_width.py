"""Folding parallel bottlenecks by making ffns wider: W_down (act(W_up x) ⊕ act(D x)) has the units of both side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers import PretrainedConfig

from peftc.addressing.sites import Site, WeightRef
from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.bottlenecks import NotWider, bottleneck_of, factor_of, is_sum
from peftc.folding.report import Change, Folded, FoldReport, Refused
from peftc.folding.weights import Folding, listed_names
from peftc.forms.adapter_module import ACTIVATION
from peftc.forms.shapes import Weight
from peftc.installation.journal import Journal
from peftc.installation.record import installation_of, is_installed
from peftc.planning.foldability.target import is_linear
from peftc.planning.ir import SiteEdit
from peftc.recognition.layers import LayerType
from peftc.rewriting.container import CONTAINER, SHARED
from peftc.runtime.parameters import dense

GRID = torch.linspace(-8, 8, 161, dtype=torch.float64)  # where activations are compared
CLOSE = 1e-12


@dataclass(frozen=True, eq=False)
class Units:
    """New hidden units of one ffn. Shapes: rows (n, d_in), their biases (n,), columns (d_out, n), the constant (d_out,)."""

    edit: str
    up: Site
    down: Site
    rows: Tensor
    biases: Tensor | None
    columns: Tensor
    constant: Tensor | None


def fold_and_widen(
    model: nn.Module,
    only: Iterable[str] | None,
    name: str | None,
    sample: Mapping[str, Any] | None,
    dequantize: bool,
) -> FoldReport:
    """Folds what folds, widens what can be, and folds what could not be before: all of it or, after an error or an interrupt, nothing."""
    asked = None if only is None else listed_names(only)
    with Journal() as journal, Deferral() as deferral:
        try:
            with deferral.interruptible():
                return _by_turns(model, asked, name, sample, dequantize, journal)
        except BaseException:
            with Deferral():
                journal.undo()
            raise


def _by_turns(
    model: nn.Module,
    asked: tuple[str, ...] | None,
    name: str | None,
    sample: Mapping[str, Any] | None,
    dequantize: bool,
    journal: Journal,
) -> FoldReport:
    folded: list[Folded] = []
    while True:
        report = Folding(model, asked, name, sample, dequantize, journal).run(strict=False)
        folded += report.folded
        if not is_installed(model):
            return FoldReport(tuple(folded), ())
        left = None if asked is None else tuple(one.edit for one in report.refused if one.edit in asked)
        if left == ():
            return FoldReport(tuple(folded), report.refused)
        names = {part.name for part in installation_of(model).specs}
        one = name if name in names else None
        widened, why = Widening(model, left, one, sample, dequantize, journal).widened()
        if not widened:
            refused = tuple(
                Refused(r.edit, f"{r.reason}; not wider: {why[r.edit]}" if r.edit in why else r.reason)
                for r in report.refused
            )
            return FoldReport(tuple(folded), refused)
        folded += widened
        done = {one.edit for one in widened}
        asked = None if left is None else tuple(edit for edit in left if edit not in done)
        if not is_installed(model) or asked == ():
            return FoldReport(tuple(folded), tuple(one for one in report.refused if one.edit not in done))


class Widening(Folding):
    """One widening in the making, of the edits that stay after a fold. Nothing of the model changes before `commit`."""

    def widened(self) -> tuple[tuple[Folded, ...], dict[str, str]]:
        """What was folded so, and why the others cannot be.

        Raises: P530 where an entry is NaN or infinite.
        """
        places: dict[str, list[SiteEdit]] = defaultdict(list)
        for placed in self.record.site_edits:
            places[placed.edit].append(placed)
        found: dict[str, list[Units]] = {}
        refused: dict[str, str] = {}
        for name, placed in places.items():
            if name not in self.others:
                try:
                    found[name] = [self.units(one, places) for one in placed]
                except NotWider as why:
                    refused[name] = why.reason
        if not found:
            return (), refused
        layers: dict[str, list[Units]] = defaultdict(list)
        for units in (one for each in found.values() for one in each):
            layers[units.up.path.rpartition(".")[0]].append(units)
        wider = [Wider(self.model, units) for units in layers.values()]
        self.replace(list(found), wider)
        changes = {name: tuple(c for one in wider for c in one.changes if name in c.edits) for name in found}
        return tuple(Folded(name, changes[name]) for name in found), refused

    # What can be -----------------------------------------------------------------------------------------------------

    def units(self, placed: SiteEdit, places: Mapping[str, Collection[SiteEdit]]) -> Units:
        """The units that an edit has at a site. Raises: NotWider."""
        site = placed.site
        form, factors = bottleneck_of(placed)
        up, down = (self.sites.get(f"{site.path}.{name}") for name in ("up", "down"))
        hidden = self.sites.get(f"{site.path}.hidden")
        if up is None or down is None or hidden is None or f"{site.path}.gate" in self.sites:
            raise NotWider(f"`{site.path}` is not two Linears with an activation between them")
        if not (is_linear(up) and is_linear(down) and site.states["h"].linear == down.path):
            raise NotWider(f"`h` of `{site.path}` is not simply the output of `down`")
        self.alone(placed, up, down, places)
        own = self.activation(site, up, hidden)
        modules = self.modules(placed)
        scale = factor_of(factors, modules)
        found = modules[form.instance.key].hidden_units()
        if found is None:
            raise NotWider(f"`{form.instance.form.name}` is not one bottleneck")
        rows, biases, columns, constant, act = found
        columns = columns * scale
        if act == "none":
            if (own(GRID) - own(-GRID) - GRID).abs().max() > CLOSE:
                raise NotWider(f"the activation of `{site.path}` does not make a linear unit of two")
            rows, columns = torch.cat([rows, -rows]), torch.cat([columns, -columns], 1)
            biases = None if biases is None else torch.cat([biases, -biases])
        elif (own(GRID) - ACTIVATION[act](GRID)).abs().max() > CLOSE:
            raise NotWider(f"the activation of `{site.path}` is not {act}")
        return Units(placed.edit, up, down, rows, biases, columns, None if constant is None else constant * scale)

    def alone(self, placed: SiteEdit, up: Site, down: Site, places: Mapping[str, Collection[SiteEdit]]) -> None:
        """Raises: NotWider where what stays needs the ffn as it is, or was there before this edit."""
        path = placed.site.path
        for name, others in places.items():
            for other in others:
                inside = other.site.path.startswith(f"{path}.") and not other.site.path.endswith((".norm", ".add"))
                before = other.site.path == path and list(places).index(name) < list(places).index(placed.edit)
                if inside or (before and any(a.state == "h" for a in other.assigns) and not is_sum(other)):
                    raise NotWider(f"`{name}` at `{other.site.path}` stays")
        trained = {place: name.partition("/")[0] for name, place in self.record.trained.items()}
        for site in (up, down):
            for ref in (state.weight for state in site.states.values() if state.weight is not None):
                name = name_of(ref)
                table = self.analysis.table
                if ref.is_partial or site.calls > 1 or any(name in group for group in (*table.tied, *table.overlaps)):
                    raise NotWider(f"`{name}` is used elsewhere, too")
                if name in trained:
                    raise NotWider(f"`{name}` is trained by `{trained[name]}`, which stays")
                if (reason := self.unfit(name)) is not None:
                    raise NotWider(reason)

    def activation(self, site: Site, up: Site, hidden: Site) -> Callable[[Tensor], Tensor]:
        """What the model's code does between `up` and `down`, as a function. Raises: NotWider where it is more than that."""
        kinds = {n: k for s in self.analysis.structure.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
        kind = kinds.get(site.root)
        places = [site.states.get("x"), up.states.get("x"), up.states.get("h"), hidden.states.get("h")]
        nodes = [
            node_of(kind, state.activation.node) if kind and state and state.activation else None for state in places
        ]
        if kind is None or None in nodes or nodes[0] is not nodes[1]:
            raise NotWider(f"`x` of `{site.path}` is not what `up` reads")
        _, _, start, end = nodes
        assert start is not None
        assert end is not None
        return lambda grid: Between(kind, start, grid).value(end)

    # Writing ---------------------------------------------------------------------------------------------------------

    def replace(self, edits: Collection[str], wider: Collection[Wider]) -> None:
        """Puts the wider weights in place and takes the edits out, or does nothing."""
        with self.steps() as journal, Deferral() as deferral:
            start = len(journal.steps)
            try:
                for one in wider:
                    journal.steps.append(one.undo)
                    one.swap()
                with deferral.interruptible():
                    values = wider_config(self.model, {one.width for one in wider})
                    created = [name for one in wider for name in one.created]
                    self.take_out(edits, created, journal)
                config = cast(Any, self.model).config if values else None
                for name, value in values.items():
                    journal.steps.append(partial(setattr, config, name, getattr(config, name)))
                    setattr(config, name, value)
            except BaseException:
                with Deferral():
                    journal.undo(start)
                raise


class Wider:
    """The weights of one ffn with new hidden units."""

    def __init__(self, model: nn.Module, units: list[Units]) -> None:
        self.modules = [model.get_submodule(site.module) for site in (units[0].up, units[0].down)]
        self.changes: list[Change] = []
        self.created: list[str] = []
        self.values: list[dict[str, Tensor]] = [{}, {}]
        self.kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        edits = tuple(dict.fromkeys(one.edit for one in units))
        up, down = units[0].up, units[0].down
        rows, columns = torch.cat([one.rows for one in units]), torch.cat([one.columns for one in units], 1)
        self.width = (width_of(up), width_of(up) + len(rows))
        self.put(0, up, "w", rows, edits)
        self.put(1, down, "w", columns, edits)
        biases = [rows.new_zeros(len(one.rows)) if one.biases is None else one.biases for one in units]
        if any(one.biases is not None for one in units) or "b" in up.states:
            self.put(0, up, "b", torch.cat(biases), edits)
        constants = [one.constant for one in units if one.constant is not None]
        if constants:
            self.put(1, down, "b", torch.stack(constants).sum(0), edits)

    def put(self, at: int, site: Site, state: str, more: Tensor, edits: tuple[str, ...]) -> None:
        """One parameter with more rows (of `up`) or columns (of `down`), or with a constant added; rounded once."""
        module, weight = self.modules[at], site.states["w"].weight
        assert weight is not None
        attribute = weight.attribute if state == "w" else "bias"
        old, like = getattr(module, attribute, None), dense(getattr(module, weight.attribute).detach())
        name = f"{site.module}.{attribute}"
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        more = more.detach().to(like.device, wide)
        if state == "w":
            whole = like.t() if weight.transposed else like
            new = torch.cat([whole.to(wide), more], at)
            new = new.t() if weight.transposed else new
        else:
            own = like.new_zeros(width_of(site)) if old is None else old.detach()
            new = torch.cat([own.to(wide), more]) if at == 0 else own.to(wide) + more
            if old is None:
                self.created.append(name)
        new = new.to(like.dtype).contiguous()
        if not bool(new.isfinite().all()):
            what = f"`{name}` would have NaN or infinite entries in {str(like.dtype).removeprefix('torch.')}"
            raise PeftcError(
                Diagnostic("P530", what, notes=(f"after folding {', '.join(edits)}", "nothing was written"))
            )
        self.values[at][attribute] = new
        added = new.numel() - (0 if old is None else old.numel()) or int((more != 0).sum())
        dtype = str(like.dtype).removeprefix("torch.")
        self.changes.append(Change(name, new.numel(), added, 1.0, dtype, old is None, edits))

    def swap(self) -> None:
        grown = self.width[1] - self.width[0]
        for at, module in enumerate(self.modules):
            sizes = ("out_features", "nf") if at == 0 else ("in_features", "nx")
            held = {name: getattr(module, name) for name in sizes if hasattr(module, name)}
            own = dict(module.named_parameters(recurse=False))
            parameters = {name: own.get(name) for name in self.values[at]}
            self.kept.append((module, held, parameters))
            for name, value in self.values[at].items():
                old = parameters[name]
                module.register_parameter(
                    name, nn.Parameter(value, requires_grad=old is not None and old.requires_grad)
                )
            for name, value in held.items():
                setattr(module, name, value + grown)

    def undo(self) -> None:
        for module, held, parameters in self.kept:
            for name, value in parameters.items():
                module.register_parameter(name, value)
            for name, value in held.items():
                setattr(module, name, value)


@dataclass(eq=False)
class Between:
    """Evaluates what a layer's graph has between two nodes, of values of the first. Raises: NotWider where it reads more."""

    kind: LayerType
    start: fx.Node
    grid: Tensor
    known: dict[fx.Node, Tensor] = field(default_factory=dict[fx.Node, Tensor])

    def value(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node is self.start:
            return self.grid
        if node not in self.known:
            self.known[node] = self.computed(node)
        return self.known[node]

    def computed(self, node: fx.Node) -> Any:
        before = self.kind.layer.passes_through(node)
        if before is not None:  # dropout, casts
            return self.value(before)
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        match node.op:
            case "call_function" if callable(node.target):
                return node.target(*args, **kwargs)
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case "call_module":
                module = self.kind.root.get_submodule(str(node.target))
                if not any(True for _ in module.parameters()):
                    return module(*args, **kwargs)
            case _:
                pass
        raise NotWider("something else stands between `up` and `down`")


def node_of(kind: LayerType, name: str) -> fx.Node | None:
    return next((node for node in kind.traced.graph.nodes if node.name == name), None)


def name_of(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")


def width_of(site: Site) -> int:
    """The features that a Linear gives."""
    shape = site.states["w"].shape
    assert isinstance(shape, Weight)
    return shape.d_out


def wider_config(model: nn.Module, widths: Collection[tuple[int, int]]) -> dict[str, int]:
    """What changes in the configuration: the new width, where all ffns have the same and a model built from it has these shapes, so
    that it can be saved and loaded; else nothing.
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
