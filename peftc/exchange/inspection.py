"""`peftc.inspect`: what a saved adapter is, and how much it changes."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Literal

import torch
from torch import Tensor

from peftc.adapters.files import path_of, read
from peftc.adapters.metadata import Adapter, Origin
from peftc.compiler import plan
from peftc.diagnostics import PeftcError, PeftcWarning
from peftc.diagnostics.markup import clean, details, lines_of, report, table
from peftc.exchange.edited_model import Model, edited
from peftc.exchange.low_rank_changes.products import Product, products
from peftc.folding.weights import Folding
from peftc.planning.foldability.affine import NotAffine
from peftc.planning.report.plan import PlanTotals, figure_svg
from peftc.planning.report.plan_sites import Record
from peftc.syntax.parser import parse_text

_LAYER = re.compile(r"^(.*?\blayer\[\d+\])")
_NO_MODEL = re.compile(r"P5(0|1)\d")  # codes of a base that is not there


class LayerInspection(Record):
    """The values of an edit in one layer, with six digits.

    Attributes:
        layer: such as `decoder.layer[3]`; a whole path outside of layers, or the name under which
            layers share parameters.
        parameters: entries of the tensors.
        norm: √Σ θ² over them.
        change: √Σ ‖W' − W‖² over the Linears of the layer, where the change is a product of
            matrices; None where it is not, or where the base is needed and not there.
        rank: the mean rank of these products.
        effective_rank: the mean of exp(−Σ p log p), p = σ / Σσ over the singular values of W' − W
            (Roy and Vetterli 2007, "The effective rank"). From 1 to the rank.
    """

    layer: str
    parameters: int
    norm: float
    change: float | None = None
    rank: float | None = None
    effective_rank: float | None = None


class EditInspection(Record):
    """An edit of an adapter.

    Attributes:
        name: of the edit.
        layers: in model order.
    """

    name: str
    layers: tuple[LayerInspection, ...]


class Inspection(Record):
    """What a saved adapter is. `str` gives it as text.

    Attributes:
        format_version: of this data.
        folder: as it was named.
        peftc: the version that saved it.
        adapter_format: the format of `adapter.json`.
        spec: the expanded spec that was compiled.
        base: the name of the base.
        type: of the base.
        origin: where the base comes from, if that is known.
        seed: of the first values.
        tasks: of edits `per task`.
        dtypes: of the tensors.
        bytes: of the tensors.
        totals: the counts of the plan.
        edits: in the order of the spec.
        notes: what could not be computed, and why.
    """

    format_version: Literal["1.0"] = "1.0"
    folder: str
    peftc: str
    adapter_format: str
    spec: str
    base: str
    type: str
    origin: Origin | None
    seed: int
    tasks: tuple[str, ...]
    dtypes: tuple[str, ...]
    bytes: int
    totals: PlanTotals
    edits: tuple[EditInspection, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        """For notebooks: the same as tables."""
        return report(_html(self))

    def _repr_svg_(self) -> str | None:
        """For notebooks: the picture of the spec on the named base; None where that is not at hand,
        or without pygraphviz.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PeftcWarning)
                planned = plan(parse_text(self.spec, self.folder), self.base, tasks=self.tasks or None)
        except PeftcError:
            return None
        return figure_svg(planned)


def inspect(adapter: str | PathLike[str], *, model: Model | None = None, trust_remote_code: bool = False) -> Inspection:
    """Reads a saved adapter, and measures what its edits change.

    The base is needed for changes alone, and of it the configuration; weights only where a change
    depends on them. Without the base the norms of the tensors are there.

    Args:
        adapter: a folder that `save` wrote.
        model: the base; by default the one whose name the adapter has.
        trust_remote_code: as in `plan`.

    Raises:
        PeftcError: P520-P524 (the adapter); with `model` P501-P506 (the base), P523 (another base).
    """
    path = path_of(adapter)
    description, tensors = read(path)
    groups = _by_layer(description, tensors)
    changes, notes = _changes(path, description, model, trust_remote_code)
    edits = (
        EditInspection(
            name=edit.name,
            layers=tuple(
                _layer(layer, groups.get((edit.name, layer), []), changes.get((edit.name, layer), []))
                for layer in dict.fromkeys(layer for name, layer in (*groups, *changes) if name == edit.name)
            ),
        )
        for edit in description.plan.edits
    )
    base = description.base
    return Inspection(
        folder=str(adapter),
        peftc=description.peftc,
        adapter_format=description.format_version,
        spec=description.source,
        base=base.id,
        type=base.type,
        origin=base.origin,
        seed=description.seed,
        tasks=description.tasks,
        dtypes=tuple(sorted({tensor.dtype for tensor in description.tensors.values()})),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        totals=description.plan.totals,
        edits=tuple(edits),
        notes=tuple(notes),
    )


Groups = dict[tuple[str, str], list[Tensor]]


def _by_layer(description: Adapter, tensors: Mapping[str, Tensor]) -> Groups:
    """The tensors by edit and layer, in the order of the layers."""
    groups: Groups = defaultdict(list)
    trained = {edit.name: {site.module: site.path for site in edit.sites} for edit in description.plan.edits}
    for name, tensor in tensors.items():
        edit, _, place = name.partition("/")
        module = place.rpartition(".")[0]  # of a parameter that `train` has changed
        groups[edit, _layer_of(trained.get(edit, {}).get(module, place))].append(tensor)
    return dict(sorted(groups.items(), key=lambda pair: (pair[0][0], _numbers(pair[0][1]))))


def _layer_of(path: str) -> str:
    match = _LAYER.match(path)
    return match.group(1) if match else path.partition("/")[0]


def _numbers(path: str) -> list[tuple[int, str]]:
    """A key that sorts numbers by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def _changes(
    path: PathLike[str], description: Adapter, model: Model | None, trust_remote_code: bool
) -> tuple[dict[tuple[str, str], list[list[Product]]], list[str]]:
    """The changes of Linears by edit and layer, and what could not be computed.

    Raises: with a `model` P501-P506, P523.
    """
    changes: dict[tuple[str, str], list[list[Product]]] = defaultdict(list)
    notes = {f"{edit.name} does not fold: {edit.reason}": None for edit in description.plan.edits if not edit.foldable}
    folds_into_weights = {edit.name for edit in description.plan.edits if edit.foldable}
    try:
        with edited(path, model, trust_remote_code=trust_remote_code) as base:
            folding = Folding(base.module, None, None, None)
            for name in filter(folds_into_weights.__contains__, folding.places):
                for folds in folding.folds([name]).values():
                    for fold in folds:
                        try:
                            terms = products([fold], base)
                        except NotAffine as error:
                            notes[f"{name}: {error.reason}"] = None
                            continue
                        except PeftcError as error:
                            notes[f"{name}: {error.diagnostics[0].message}"] = None
                            continue
                        changes[name, _layer_of(fold.site_edit.site.path)].append(terms)
    except PeftcError as error:
        if model is not None or not _NO_MODEL.fullmatch(error.diagnostics[0].code):
            raise
        notes[f"changes are not measured: {error.diagnostics[0].message}"] = None
    return changes, list(notes)


def _layer(layer: str, tensors: list[Tensor], changes: list[list[Product]]) -> LayerInspection:
    spectra = [spectrum(terms) for terms in changes]
    ranks = [sum(term.rank for term in terms) for terms in changes]
    return LayerInspection(
        layer=layer,
        parameters=sum(tensor.numel() for tensor in tensors),
        norm=_rounded(math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))),
        change=_rounded(math.sqrt(sum(float(values.square().sum()) for values in spectra))) if spectra else None,
        rank=_rounded(sum(ranks) / len(ranks)) if ranks else None,
        effective_rank=_rounded(sum(map(effective_rank, spectra)) / len(spectra)) if spectra else None,
    )


def _rounded(value: float) -> float:
    """Six digits: the last bits of a sum depend on threads."""
    return float(f"{value:.6g}")


def spectrum(terms: list[Product]) -> Tensor:
    """The singular values of Σ f B A, from thin matrices alone, in float64."""
    if not terms:
        return torch.zeros(1, dtype=torch.float64)
    left = torch.cat([term.factor * term.b.double() for term in terms], dim=1)
    right = torch.cat([term.a.double() for term in terms], dim=0)
    return torch.linalg.svdvals(torch.linalg.qr(left).R @ torch.linalg.qr(right.t()).R.t())


def effective_rank(values: Tensor) -> float:
    """exp(−Σ p log p) with p = σ / Σσ; 0 of a change that is zero."""
    total = float(values.sum())
    if not total:
        return 0.0
    p = values[values > 0] / total
    return math.exp(-float((p * p.log()).sum()))


def _html(inspection: Inspection) -> Iterator[str]:
    head, *rest = list(_lines(inspection.model_copy(update={"edits": (), "notes": (), "spec": ""})))
    yield f"<div><strong>{clean(head)}</strong></div>"
    yield f"<pre>{lines_of(chr(10).join(rest).strip())}</pre>"
    yield from details("spec", [f"<pre>{lines_of(inspection.spec)}</pre>"])
    headers = ("edit", "layer", "parameters", "‖θ‖", "‖ΔW‖", "effective rank")
    rows = ((edit.name, layer.layer, *_numbers_of(layer)) for edit in inspection.edits for layer in edit.layers)
    yield from table(headers, rows, range(2, 6))
    if inspection.notes:
        yield from table(("note",), [(note,) for note in inspection.notes])


def _numbers_of(layer: LayerInspection) -> Iterator[str]:
    yield f"{layer.parameters:,}"
    yield f"{layer.norm:.3g}"
    yield "" if layer.change is None else f"{layer.change:.3g}"
    yield "" if layer.effective_rank is None else f"{layer.effective_rank:.1f} of {layer.rank:g}"


def _lines(inspection: Inspection) -> Iterator[str]:
    totals = inspection.totals
    yield f"{inspection.folder}  (peftc {inspection.peftc}, format {inspection.adapter_format})"
    yield ""
    origin = inspection.origin
    revision = f" at {origin.revision}" if origin and origin.revision else ""
    yield f"base    {inspection.base} ({inspection.type}){revision}"
    stored = f"{inspection.bytes:,} bytes in {', '.join(inspection.dtypes)}"
    yield f"stored  {totals.stored:,} parameters, {stored}; trained {totals.trained:,}"
    yield f"seed    {inspection.seed}"
    if inspection.tasks:
        yield f"tasks   {', '.join(inspection.tasks)}"
    yield ""
    yield from (f"    {line}".rstrip() for line in inspection.spec.splitlines())
    for edit in inspection.edits:
        yield ""
        width = max([len(layer.layer) for layer in edit.layers] + [len(edit.name)])
        measured = any(layer.change is not None for layer in edit.layers)
        more = f"  {'‖ΔW‖':>9}  effective rank" if measured else ""
        yield f"{edit.name:<{width}}  {'parameters':>12}  {'‖θ‖':>9}{more}"
        for layer in edit.layers:
            change = "" if layer.change is None else f"{layer.change:9.3g}"
            rank = "" if layer.effective_rank is None else f"{layer.effective_rank:.1f} of {layer.rank:g}"
            numbers = f"{layer.parameters:>12,}  {layer.norm:9.3g}  {change:>9}  {rank}"
            yield f"{layer.layer:<{width}}  {numbers}".rstrip()
    if inspection.notes:
        yield ""
        yield from (f"note  {note}" for note in inspection.notes)
