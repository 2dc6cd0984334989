"""Folding edits into the weights of the base, in memory and in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.adapters.readable_weights import require_base
from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.folding.module_folds import CannotFold, Fold, combine, is_linear
from peftc.folding.report import Change, Folded, FoldReport, Refused
from peftc.forms.module import FormModule
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.journal import Journal
from peftc.installation.presence import active_installation
from peftc.installation.record import Installation
from peftc.modules.memory import storage_id
from peftc.observation.parameter_uses import parameter_views
from peftc.planning.foldability.check import Foldability, check_foldability
from peftc.planning.foldability.target import FoldTarget, fold_target
from peftc.planning.ir import SiteEdit
from peftc.rewriting.container import CONTAINER
from peftc.rewriting.edits import slug
from peftc.runtime.parameters import is_quantised
from peftc.semantics.walk import names_in
from peftc.syntax import ast
from peftc.tracing.module_calls import forward_signature

NOT_ASKED = "it was not asked for"


class Folding:
    """A fold in the making: nothing of the model changes before `commit`. `journal`: of a transaction that it is a part of."""

    def __init__(
        self,
        model: nn.Module,
        only: Iterable[str] | None,
        name: str | None,
        sample: Mapping[str, Any] | None,
        dequantize: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self.model, self.record, self.dequantize, self.journal = model, active_installation(model), dequantize, journal
        self.compiled = CompiledModel(model, sample)
        asked = [edit for part in self.record.selected(name) for edit in part.edits]
        require_base(model)
        self.names = [edit for part in self.record.specs for edit in part.edits]
        self.only = None if only is None else _checked(only, asked)
        self.others = frozenset(self.names) - (frozenset(asked) if self.only is None else self.only)
        self.analysis = self.compiled.analysis
        self.sites = {site.path: site for site in self.analysis.table.sites}
        self.regions = _regions(self.record)

    def run(self, strict: bool = True) -> FoldReport:
        stays = {n: NOT_ASKED for n in self.names if n in self.others}
        while True:  # what turns out to have no place is one more that stays
            refused = stays | self.refused(stays)
            if strict and self.only is not None and (wrong := [name for name in refused if name in self.only]):
                message = f"`{wrong[0]}` does not fold: {refused[wrong[0]]}"
                raise PeftcError(Diagnostic("P531", message, help="fold without `only` to fold what folds"))
            folded = [name for name in self.names if name not in refused]
            try:
                return self.report(folded, refused, self.commit(folded) if folded else [])
            except CannotFold as cannot:
                stays[cannot.edit] = cannot.reason

    # What folds, and into what ---------------------------------------------------------------------------------------

    def refused(self, stays: Mapping[str, str]) -> dict[str, str]:
        places: dict[str, list[SiteEdit]] = defaultdict(list)
        for placed in self.record.site_edits:
            places[placed.edit].append(placed)
        known = {**self.unwritable(stays), **stays}
        found: list[Foldability] = check_foldability(list(places.values()), self.analysis.table, known)
        return {name: known.get(name, v.reason) for name, v in zip(places, found, strict=True) if not v.foldable}

    def unwritable(self, stays: Collection[str]) -> dict[str, str]:
        """Edits whose parameters nothing can be folded into, whatever the equations say."""
        trained = {place: name.partition("/")[0] for name, place in self.record.trained.items()}
        first = {name: group[0] for group in self.analysis.table.tied for name in group}
        held, captured = parameter_views(self.model), self.analysis.structure.seen.closure_reads
        found: dict[str, str] = {}
        for placed in self.record.site_edits:
            for name in (first.get(n, n) for n in _parameters(self.target(placed))):
                if (reason := self.unfit(name)) is not None:
                    found.setdefault(placed.edit, reason)
                elif (parameter := self.parameter(name)) is not None and storage_id(parameter) in captured:
                    reader = captured[storage_id(parameter)]
                    found.setdefault(
                        placed.edit, f"`{reader}` computes with `{name}`, too: a fold would change both uses"
                    )
                elif name in held:
                    found.setdefault(
                        placed.edit, f"`{held[name][0]}` holds a view of `{name}`: a fold would change both"
                    )
                elif trained.get(name) in stays:
                    found.setdefault(placed.edit, f"`{name}` is trained by `{trained[name]}`, which stays")
        return found

    def unfit(self, name: str) -> str | None:
        """Why nothing can be written into this parameter; None where it can."""
        whole = self.dequantize and is_linear(self.model.get_submodule(name.rpartition(".")[0]))
        return unwritable(name, self.parameter(name), whole)

    def target(self, placed: SiteEdit) -> FoldTarget | None:
        found = fold_target(placed, self.sites)
        return None if isinstance(found, str) else found

    def parameter(self, name: str) -> nn.Parameter | None:
        module, _, attribute = name.rpartition(".")
        return dict(self.model.get_submodule(module).named_parameters(recurse=False)).get(attribute)

    def folds(self, folded: Collection[str]) -> dict[str, list[Fold]]:
        """What is folded, by the module into which it is."""
        groups: dict[str, list[Fold]] = defaultdict(list)
        first = {name: group[0] for group in self.analysis.table.shared_modules for name in group}
        for placed in self.record.site_edits:
            if placed.edit in folded:
                one = self.fold(placed)
                module = _module(one.target)
                groups[first.get(module, module)].append(one)
        return groups

    def fold(self, placed: SiteEdit) -> Fold:
        target = self.target(placed)
        assert target is not None
        region, index = self.region(placed)
        return Fold(placed, target, self.modules(placed), (-region.count("."), index))

    def region(self, placed: SiteEdit) -> tuple[str, int]:
        """The region in which an edit stands, and its place among the edits there."""
        found = self.regions[placed.edit, slug(placed)]
        inside = ((r, i) for r, i in found if f"{r}.".startswith(f"{placed.site.root}."))
        return next(inside, None) or next((r, i) for r, i in found if f"{placed.site.root}.".startswith(f"{r}."))

    def modules(self, placed: SiteEdit) -> dict[str, FormModule]:
        """The forms of an edit at a site, by key."""
        region = self.region(placed)[0]
        container = f"{region}.{CONTAINER}.{placed.edit.replace('.', '__')}.{slug(placed)}".lstrip(".")
        return {i.key: cast(FormModule, self.model.get_submodule(f"{container}.{i.key}")) for i in placed.instances}

    @property
    def inputs(self) -> frozenset[str]:
        """What the forward of the model takes."""
        return frozenset(forward_signature(self.model).parameters)

    # Writing ---------------------------------------------------------------------------------------------------------

    def commit(self, folded: Collection[str], into_weights: bool = True) -> list[Change]:
        """Writes all values, one parameter after the other, and takes the folded edits out, or does nothing.

        Raises: CannotFold, P530, P546; whatever planning what stays raises.
        """
        changes: list[Change] = []
        with self.steps() as journal, Deferral() as deferral:
            start = len(journal.steps)
            try:
                for module, folds in self.folds(folded).items() if into_weights else ():
                    with deferral.interruptible():
                        values = combine(self.model, module, folds)
                    while values:  # none is held longer than it takes to write it
                        name = next(iter(values))
                        new = values.pop(name)
                        journal.write(self.model, name, new.value)
                        changes.append(new.change)
                created = [change.parameter for change in changes if change.created]
                with deferral.interruptible():
                    self.take_out(folded, created, journal)
            except BaseException:
                with Deferral():
                    journal.undo(start)
                raise
        return changes

    def steps(self) -> AbstractContextManager[Journal]:
        """Where a commit notes what it does: the journal of the whole, which stays open, or one of its own."""
        return Journal() if self.journal is None else nullcontext(self.journal)

    def take_out(
        self,
        edits: Collection[str],
        created: Collection[str],
        journal: Journal,
    ) -> None:
        """The model without some edits. `created`: biases that it did not have: they require gradients where their weights do."""
        flags = self.record.requires_grad
        flags = flags | {name: flags.get(f"{name.rpartition('.')[0]}.weight", False) for name in created}
        compiled = CompiledModel(self.model, self.compiled.sample)
        rest = [replace(one, spec=spec) for one in compiled.specs if (spec := without(one.spec, edits)) is not None]
        compiled.set_specs(compiled.replan(rest), requires_grad=flags, journal=journal)

    # Saying ----------------------------------------------------------------------------------------------------------

    def report(self, folded: Collection[str], refused: Mapping[str, str], written: Iterable[Change]) -> FoldReport:
        changes: dict[str, list[Change]] = defaultdict(list)
        names = set[str]()
        for change in written:
            names.add(change.parameter)
            for edit in change.edits:
                changes[edit].append(change)
        for name, place in self.record.trained.items():
            edit = name.partition("/")[0]
            if edit in folded and place not in names:
                changes[edit].append(
                    _trained(place, self.model.get_parameter(place), self.record.originals[place], edit)
                )
        return FoldReport(
            tuple(Folded(name, tuple(changes[name])) for name in self.names if name in folded),
            tuple(Refused(name, refused[name]) for name in self.names if name in refused),
        )


def listed_names(only: Iterable[str]) -> tuple[str, ...]:
    """The names in `only`; one may stand alone. Raises: P545 for anything else."""
    names = (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Iterable) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if names is None or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        raise PeftcError(Diagnostic("P545", f"`only` takes names of edits, not {only!r}", help='only=["name"]'))
    return names


def _checked(only: Iterable[str], known: Collection[str]) -> frozenset[str]:
    wanted = listed_names(only)
    for name in wanted:
        if name not in known:
            help_ = did_you_mean(name, known) or f"the model has {join_names(list(known))}"
            raise PeftcError(Diagnostic("P532", f"the model has no edit `{name}`", help=help_))
    return frozenset(wanted)


def _regions(record: Installation) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Where each edit is applied: by its name and its site's name there, the regions and its place among their edits."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for name, kind in record.regions:
        for i, edit in enumerate(kind.edits):
            found[edit.edit, edit.slug].append((name, i))
    return found


def _parameters(target: FoldTarget | None) -> list[str]:
    refs = (target.weight, target.bias) if target else ()
    return [f"{ref.module}.{ref.attribute}".lstrip(".") for ref in refs if ref is not None]


def _module(target: FoldTarget) -> str:
    ref = target.weight or target.bias
    assert ref is not None
    return ref.module


def unwritable(name: str, parameter: nn.Parameter | None, dequantize: bool) -> str | None:
    """Why nothing can be written into a parameter; None where it can."""
    if parameter is None:
        return f"`{name}` is computed from other parameters"
    if is_quantised(parameter):
        reason = f"`{name}` is quantised ({type(parameter.data).__name__}): `dequantize=True` writes it out in full"
        return None if dequantize else reason
    dtype = str(parameter.dtype).removeprefix("torch.")
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        return f"`{name}` is quantised ({dtype})"
    if parameter.is_inference() and not torch.is_inference_mode_enabled():
        return f"`{name}` was made under `torch.inference_mode()`, and is written only there"
    if type(parameter.data) is not Tensor:
        return f"`{name}` is a {type(parameter.data).__name__}, not a plain tensor"
    return None


def without(spec: ast.Spec, folded: Collection[str]) -> ast.Spec | None:
    """The statements that are left, and the shared parameters that they use. What was expected held before."""
    kept = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train) and s.name not in folded]
    if not kept:
        return None
    used = {n for s in kept if isinstance(s, ast.Edit) for line in s.body for n in names_in(line.value)}
    shared = [s for s in spec.statements if isinstance(s, ast.Let) and s.name in used]
    return replace(spec, statements=(*shared, *kept))


def _trained(name: str, now: nn.Parameter, before: Tensor, edit: str) -> Change:
    dtype = str(now.dtype).removeprefix("torch.")
    return Change(name, now.numel(), int((now != before).sum()), 1.0, dtype, edits=(edit,))
