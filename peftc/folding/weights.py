"""Folding edits into the weights of the base, in memory and in place."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.adapters.base import dtype_name, require_base
from peftc.addressing.sites import parameter_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.folding.computed_weight import is_computed, make_plain, stored_values
from peftc.folding.memory import next_round, reused
from peftc.folding.module_folds import combine
from peftc.folding.report import Change, Folded, FoldReport, Refused
from peftc.folding.unrounded_parameters import CannotFold, Fold, is_linear_module
from peftc.forms.module import FormModule, has_values
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.completeness import active_installation
from peftc.installation.journal import Journal, transaction
from peftc.modules.memory import storage_id
from peftc.modules.packed import is_unpackable, packed_shape
from peftc.observation.parameter_uses import parameter_views
from peftc.planning.foldability.affine import FoldTarget, fold_target, scales_output
from peftc.planning.foldability.check import check_foldability
from peftc.planning.ir import SiteEdit
from peftc.rewriting.anchors import contains
from peftc.rewriting.edits import CONTAINER, slug
from peftc.runtime.parameters import is_quantised
from peftc.syntax import ast
from peftc.syntax.walk import names_in

NOT_SELECTED = "it was not asked for"
OF_ADAPTERS = "each attached adapter has values of its own, and a parameter of the base has one"


class Folding:
    """One fold. The model changes in `commit`. `journal`: of a larger transaction."""

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
        selected = [edit for spec in self.record.selected(name) for edit in spec.edits]
        require_base(model)
        self.names = [edit for spec in self.record.specs for edit in spec.edits]
        self.only = None if only is None else _check_names(only, selected)
        self.others = frozenset(self.names) - (frozenset(selected) if self.only is None else self.only)
        self.analysis = self.compiled.analysis
        self.kinds = {kind.key: kind for stack in self.analysis.structure.stacks for kind in stack.kinds}
        self.sites = {site.path: site for site in self.analysis.table.sites}
        self.places: dict[str, list[SiteEdit]] = defaultdict(list)  # by edit
        for site_edit in self.record.site_edits:
            self.places[site_edit.edit].append(site_edit)
        trained = (*self.record.trained.items(), *self.record.adapter_parameters.items())
        self.trained = {place: saved.partition("/")[0] for saved, place in trained}
        self.regions: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
        for region, generated in self.record.regions:
            for i, edit in enumerate(generated.edits):
                self.regions[edit.edit, edit.slug].append((region, i))

    def run(self, strict: bool = True) -> FoldReport:
        others = {n: NOT_SELECTED for n in self.names if n in self.others}
        others |= {saved.partition("/")[0]: OF_ADAPTERS for saved in self.record.adapter_parameters}
        while True:  # an edit for which there turns out to be no parameter stays, too
            refused = others | self.refusals(others)
            if strict and self.only is not None and (wrong := [name for name in refused if name in self.only]):
                message = f"`{wrong[0]}` does not fold: {refused[wrong[0]]}"
                raise PeftcError(Diagnostic("P531", message, help="fold without `only` to fold what folds"))
            folded = [name for name in self.names if name not in refused]
            try:
                return self.report(folded, refused, self.commit(folded) if folded else [])
            except CannotFold as error:
                others[error.edit] = error.reason

    def refusals(self, others: Mapping[str, str]) -> dict[str, str]:
        known = {**self.unwritable(others), **others}
        results = check_foldability(list(self.places.values()), self.analysis.table, known)
        results_of = zip(self.places, results, strict=True)
        return {name: known.get(name, result.reason) for name, result in results_of if not result.foldable}

    def unwritable(self, others: Collection[str]) -> dict[str, str]:
        """Edits whose parameters nothing can be folded into, whatever the equations say."""
        first = {name: group[0] for group in self.analysis.table.tied for name in group}
        views, captured = parameter_views(self.model), self.analysis.structure.seen.closure_reads
        reasons: dict[str, str] = {}
        for site_edit in self.record.site_edits:
            target = self.target(site_edit)
            if target is not None and (buffer := self.nonzero_bias(target)) and scales_output(site_edit, target):
                reasons.setdefault(site_edit.edit, f"`{buffer}` is added to the result, and no fold changes a buffer")
            for name in (parameter_name(ref) for ref in (target.refs if target else ())):
                name = first.get(name, name)
                parameter = self.parameter(name)
                reader = None if parameter is None else captured.get(storage_id(parameter))
                reason = self.unwritable_parameter(name)
                if reason is None and reader is not None:
                    reason = f"`{reader}` computes with `{name}`, too: a fold would change both uses"
                if reason is None and name in views:
                    reason = f"`{views[name][0]}` holds a view of `{name}`: a fold would change both"
                if reason is None and self.trained.get(name) in others:
                    reason = f"`{name}` is trained by `{self.trained[name]}`, which stays"
                if reason is not None:
                    reasons.setdefault(site_edit.edit, reason)
        return reasons

    def nonzero_bias(self, target: FoldTarget) -> str:
        """The buffer that the model's code adds as a bias, if it has other entries than zeros."""
        name = target.site.constant_bias
        buffer = self.model.get_buffer(name) if name else None
        return name if buffer is not None and has_values(buffer) and bool(buffer.any()) else ""

    def unwritable_parameter(self, name: str) -> str | None:
        """Why nothing can be written into this parameter; None where it can."""
        parameter = self.parameter(name)
        owner, _, attribute = name.rpartition(".")
        if parameter is None and is_computed(self.model.get_submodule(owner), attribute):
            return None  # whether it can have the new value, the value tells
        if parameter is None:
            return f"`{name}` is computed from other parameters"
        is_packed = attribute == "weight" and packed_shape(self.model.get_submodule(owner)) is not None
        if is_packed and is_unpackable(parameter):
            way_out = "`peftc.merge` with `dequantize=True` folds into its files"
            return f"`{name}` is packed ({type(parameter).__name__}): {way_out}"
        if is_quantised(parameter):
            if self.dequantize and is_linear_module(self.model.get_submodule(name.rpartition(".")[0])):
                return None
            return f"`{name}` is quantised ({type(parameter.data).__name__}): `dequantize=True` writes it out in full"
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return f"`{name}` is quantised ({dtype_name(parameter)})"
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            return f"`{name}` was made under `torch.inference_mode()`, and is written only there"
        if type(parameter.data) is not Tensor:
            return f"`{name}` is a {type(parameter.data).__name__}, not a plain tensor"
        return None

    def target(self, site_edit: SiteEdit) -> FoldTarget | None:
        target = fold_target(site_edit, self.sites)
        return None if isinstance(target, str) else target

    def parameter(self, name: str) -> nn.Parameter | None:
        module, _, attribute = name.rpartition(".")
        return dict(self.model.get_submodule(module).named_parameters(recurse=False)).get(attribute)

    def folds(self, folded: Collection[str]) -> dict[str, list[Fold]]:
        """What is folded, by the module into which it is."""
        groups: dict[str, list[Fold]] = defaultdict(list)
        first = {name: group[0] for group in self.analysis.table.shared_modules for name in group}
        owners, tied = self.owners(), {name: group[0] for group in self.analysis.table.tied for name in group}
        written: dict[tuple[str, str], str] = {}
        for site_edit in self.record.site_edits:
            if site_edit.edit in folded:
                target, (region, index, _) = self.target(site_edit), self.region(site_edit)
                assert target is not None
                names = [name for name in map(parameter_name, target.refs) if name in tied]
                if any(written.setdefault((site_edit.edit, tied[name]), name) != name for name in names):
                    continue  # the same change of a weight under another name
                fold = Fold(site_edit, target, self.modules(site_edit), (-region.count("."), index))
                modules = [first.get(ref.module, ref.module) for ref in target.refs]
                groups[owners.get(modules[0], modules[0])].append(fold)
        return groups

    def owners(self) -> dict[str, str]:
        """The module of a weight by that of its bias, where these are two."""
        # Seen in: no transformers model; BEiT of timm, whose biases are not beside their weight
        targets = (self.target(site_edit) for site_edit in self.record.site_edits)
        pairs = ((t.weight.module, t.bias.module) for t in targets if t is not None and t.weight and t.bias)
        return {bias: weight for weight, bias in pairs if bias != weight}

    def region(self, site_edit: SiteEdit) -> tuple[str, int, str]:
        """The region of an edit at a site, its index among the edits there, and its slug there."""
        root, short, long = site_edit.site.root, slug(site_edit), slug(site_edit, of_several_layers=True)
        kind = self.kinds.get(site_edit.site.kind)
        parts = [f"{root}.{part}".strip(".") for part in (kind.parts if kind is not None else ("",))]
        regions = self.regions[site_edit.edit, short]
        inside = ((r, i, short) for r, i in regions if any(contains(part, r) for part in parts))
        around = ((r, i, text) for text in (long, short) for r, i in self.regions[site_edit.edit, text])
        return next(inside, None) or next(item for item in around if contains(item[0], root))

    def modules(self, site_edit: SiteEdit) -> dict[str, FormModule]:
        """The forms of an edit at a site, by key."""
        region, _, slug = self.region(site_edit)
        container = f"{region}.{CONTAINER}.{site_edit.edit.replace('.', '__')}.{slug}".lstrip(".")
        keys = (one.key for one in site_edit.instances)
        return {key: cast(FormModule, self.model.get_submodule(f"{container}.{key}")) for key in keys}

    def commit(self, folded: Collection[str], into_weights: bool = True) -> list[Change]:
        """Writes all values and takes the folded edits out, in one transaction.

        Raises: CannotFold, P530, P546; whatever planning the other edits raises.
        """
        changes, plain = list[Change](), dict[str, Tensor]()
        with transaction(self.journal) as (journal, deferral), reused(1):
            for module, folds in self.folds(folded).items() if into_weights else ():
                next_round()
                with deferral.interruptible():
                    values = combine(self.model, module, folds, plain=len(folded) == len(self.names))
                while values:  # none is held longer than it takes to write it
                    name = next(iter(values))
                    new, change = values.pop(name)
                    if not write_value(journal, self.model, name, new):
                        plain[name] = new.clone()
                    changes.append(change)
            created = [change.parameter for change in changes if change.created]
            with deferral.interruptible():
                self.remove_edits(folded, created, journal)
            for name, new in plain.items():  # into modules of their own classes
                owner, _, attribute = name.rpartition(".")
                make_plain(journal, self.model.get_submodule(owner), attribute, new)
        return changes

    def remove_edits(self, edits: Collection[str], created: Collection[str], journal: Journal) -> None:
        """Takes out edits. `created`: new biases; their `requires_grad` is that of the weights."""
        flags = self.record.requires_grad
        flags = flags | {name: flags.get(f"{name.rpartition('.')[0]}.weight", False) for name in created}
        compiled = CompiledModel(self.model, self.compiled.sample)
        rest = [replace(one, spec=spec) for one in compiled.specs if (spec := without(one.spec, edits)) is not None]
        compiled.set_specs(compiled.replan(rest), requires_grad=flags, journal=journal)

    def report(self, folded: Collection[str], refused: Mapping[str, str], written: Iterable[Change]) -> FoldReport:
        changes: dict[str, list[Change]] = defaultdict(list)
        names = set[str]()
        for change in written:
            names.add(change.parameter)
            for edit in change.edits:
                changes[edit].append(change)
        for place, edit in self.trained.items():
            if edit in folded and place not in names:
                parameter, original = self.model.get_parameter(place), self.record.originals[place]
                entries, dtype = int((parameter != original).sum()), dtype_name(parameter)
                changes[edit].append(Change(place, parameter.numel(), entries, 1.0, dtype, edits=(edit,)))
        return FoldReport(
            tuple(Folded(name, tuple(changes[name])) for name in self.names if name in folded),
            tuple(Refused(name, refused[name]) for name in self.names if name in refused),
        )


def listed_names(only: Iterable[str]) -> tuple[str, ...]:
    """The names in `only`; one may stand alone. Raises: P545 for anything else."""
    names = (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Iterable) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if names is None or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise PeftcError(Diagnostic("P545", f"`only` takes names of edits, not {only!r}", help='only=["name"]'))
    return names


def _check_names(only: Iterable[str], known: Collection[str]) -> frozenset[str]:
    names = listed_names(only)
    for name in names:
        if name not in known:
            help_ = did_you_mean(name, known) or f"the model has {join_names(list(known))}"
            raise PeftcError(Diagnostic("P532", f"the model has no edit `{name}`", help=help_))
    return frozenset(names)


def write_value(journal: Journal, model: nn.Module, name: str, value: Tensor) -> bool:
    """Sets a parameter, or those that its module computes it from. Returns: whether there are such
    values.
    """
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if not is_computed(module, attribute):
        journal.write(model, name, value)
        return True
    values = stored_values(module, attribute, value)
    for part, new in (values or {}).items():
        journal.write(model, f"{owner}.{part}".lstrip("."), new)
    return values is not None


def without(spec: ast.Spec, folded: Collection[str]) -> ast.Spec | None:
    """The other edits and the shared parameters that they use, without expectations."""
    rest = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train) and s.name not in folded]
    if not rest:
        return None
    used = {n for s in rest if isinstance(s, ast.Edit) for line in s.body for n in names_in(line.value)}
    shared = [s for s in spec.statements if isinstance(s, ast.Let) and s.name in used]
    used |= {n for let in shared for n in names_in(let.value)}
    forms = [s for s in spec.statements if isinstance(s, ast.Form) and s.name in used]
    return replace(spec, statements=(*forms, *shared, *rest))
