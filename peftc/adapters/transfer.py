"""Puts values of saved adapters into edits of a compiled model: `warm_start` and `fuse`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from peftc.adapters.files import path_of, read
from peftc.adapters.loading import (
    adapter_tasks,
    check_base,
    check_python_forms,
    check_tensors,
    expanded_spec,
    notify_forms,
    plan_adapter,
)
from peftc.adapters.metadata import Adapter
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equation_code.buffer_module import BufferModule
from peftc.equations.table import FORMS, with_built_in
from peftc.installation.builder import shared_name
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters, states
from peftc.installation.journal import copy_all
from peftc.installation.record import Installation, joint_spec
from peftc.models.samples import joint_sample
from peftc.planning import ir
from peftc.rewriting.assembly import regions_of
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import values, walk

FUSION, ADAPTER = "fusion", "adapter"


def warm_start(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    edits: Mapping[str, str] | None = None,
    task: str | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> tuple[str, ...]:
    """Initializes edits of a compiled model with the values of a saved adapter.

    For instance, the prompt of a new task starts as that of another one. The spec of the model
    stays, and other edits of the adapter are ignored.

    Args:
        model: a compiled model.
        directory: with an adapter that `save` wrote.
        edits: from edits of the model to those of the adapter; by default all with the same name.
        task: the task to initialize, of edits that are `per task` in the model only.
        other_weights: as in `load`.
        strict: as in `load`.

    Returns:
        The edits of the model that have new values.

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P520-P522 (the files), P523 and P524
            (another base), P525 (tensors that do not fit), P532 (no such edit), P534 (no such
            task). After an error the model is unchanged.

    Source: SPoT, Vu et al. 2021, arXiv:2110.07904.
    """
    record = active_installation(model)
    adapter, tensors = read(path_of(directory))
    check_base(adapter, model, other_weights, strict)
    own = {edit for spec in record.specs for edit in spec.edits}
    saved_edits = dict.fromkeys(name.partition("/")[0] for name in tensors)
    names = check_edit_names(edits, own, saved_edits) if edits is not None else {n: n for n in saved_edits if n in own}
    if not names:
        message = "no edit of the adapter has the name of an edit of the model"
        listing = f"the adapter has {join_names(list(saved_edits))}, the model {join_names(sorted(own))}"
        raise PeftcError(Diagnostic("P532", message, help=f"{listing}: name pairs with `edits`"))
    _check_forms(adapter, joint_spec(spec.spec for spec in record.specs), names.values())
    suffix = re.compile("(?!)" if task is None else rf"\.tasks\.{re.escape(record.task.of(task))}(?=[./])")
    targets: dict[str, list[Tensor]] = {}  # by saved name; several edits may start from one
    for name, value in {**parameters(model), **states(model)}.items():
        edit, _, rest = name.partition("/")
        if edit in names and task is not None and ".tasks." not in rest:
            message = f"`{edit}` has parts that are common to all tasks, and would change for all of them"
            raise PeftcError(Diagnostic("P525", message, help="leave it out of `edits`"))
        if edit in names and (task is None or suffix.search(rest)):
            rest = re.sub(rf"^{re.escape(edit)}(?=\.[^/]*/)", names[edit], suffix.sub("", rest))
            targets.setdefault(f"{names[edit]}/{rest}", []).append(value)
    selected = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] in names.values()}
    for i in range(max(map(len, targets.values()), default=1)):
        expected = {name: values[min(i, len(values) - 1)] for name, values in targets.items()}
        per_task = [any(".tasks." in name for name in tensors) for tensors in (expected, selected)]
        needs_task = task is None and per_task == [True, False]
        help_ = f'name the task to initialize: task="{record.task.names[0]}"' if needs_task else None
        message = f"the adapter in {directory} does not fit {join_names(names)} of the model"
        check_tensors(selected, expected, message, help_)
    pairs = ((value, selected[name].reshape(value.shape)) for name, values in targets.items() for value in values)
    copy_all(pairs, partial(notify_forms, model))
    return tuple(names)


def _check_forms(adapter: Adapter, own: ast.Spec, edits: Iterable[str]) -> None:
    """Raises: P525 for an edit of the adapter whose forms have other texts in the model."""
    check_python_forms(adapter)
    saved = with_built_in(parse_text(adapter.spec), adapter.forms)
    theirs, mine = ({s.name: s for s in spec.statements if isinstance(s, ast.Form)} for spec in (saved, own))
    wanted = [s for s in saved.statements if isinstance(s, ast.Edit) and s.name in set(edits)]
    parts = (part for edit in wanted for value in values(edit) for part in walk(value) if isinstance(part, ast.Call))
    for name in dict.fromkeys(part.function for part in parts):
        saved_form, own_form = theirs.get(name), mine.get(name)
        if saved_form != own_form and (name in FORMS or None not in (saved_form, own_form)):
            message = f"the adapter was saved with another `{name}` than the model has"
            raise PeftcError(Diagnostic("P525", message, help="its values would mean something else: train again"))


def check_edit_names(
    edits: Mapping[str, str], own: Iterable[str], saved: Iterable[str] | None = None
) -> Mapping[str, str]:
    """Checks a mapping of edits; `saved` is None if unknown. Raises: P532, P545."""
    if not isinstance(edits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`edits` is a dictionary, from edits of the model to those of the adapter; found {edits!r}"
        raise PeftcError(Diagnostic("P545", message, help='edits={"mine": "theirs"}'))
    saved = edits.values() if saved is None else saved
    for names, known, owner in ((edits, tuple(own), "model"), (edits.values(), tuple(saved), "adapter")):
        for name in names:
            if name not in known:
                help_ = did_you_mean(name, known) or f"the {owner} has {join_names(sorted(known))}"
                raise PeftcError(Diagnostic("P532", f"the {owner} has no edit `{name}`", help=help_))
    return edits


def fuse(
    model: nn.Module,
    directories: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    edits: Mapping[str, str] | None = None,
    task: str | None = None,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> tuple[str, ...]:
    """Loads the adapters that the `fusion` forms of a compiled model mix, one from each directory.

    An adapter has the equations of the fusion at the same sites, with `adapter` in place of
    `fusion`. It is saved with the fusion, and not trained.

    Args:
        model: a compiled model.
        directories: of the saved adapters, in the order in which they are mixed.
        edits: from edits of the model to those of the adapters; by default all with a `fusion`.
        task: the one whose fusions mix them, for edits that are `per task`; by default all tasks.
        sample: as in `compile`.
        samples: as in `compile`.
        other_weights: as in `load`.
        strict: as in `load`.

    Returns:
        The edits of the model that have adapters now.

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P520-P522 (the files), P523 and P524
            (another base), P525 (adapters that do not fit), P532 (no such edit), P534 (no such
            task), P544 (not as many as `n`). After an error the model is unchanged.

    Source: AdapterFusion, Pfeiffer et al. 2021, arXiv:2005.00247.
    """
    record = active_installation(model)
    pairs = ((site_edit, instance) for site_edit in record.site_edits for instance in site_edit.instances)
    fusions = [(site_edit, instance) for site_edit, instance in pairs if instance.form.name == FUSION]
    fused_edits = dict.fromkeys(site_edit.edit for site_edit, _ in fusions)
    if not fused_edits:
        raise PeftcError(Diagnostic("P532", "the model has no edit with a `fusion`"))
    is_sequence = isinstance(directories, Iterable) and not isinstance(directories, str)
    paths = [path_of(directory) for directory in cast(Any, directories if is_sequence else [directories])]
    names = {edit: edit for edit in fused_edits} if edits is None else check_edit_names(edits, fused_edits)
    sites = [(site_edit, instance) for site_edit, instance in fusions if site_edit.edit in names]
    task = None if task is None else record.task.of(task)
    modules = (name for site in sites for name in fusion_modules(record, *site, task))
    targets = {name: Target(cast(BufferModule, model.get_submodule(name))) for name in modules}
    for site_edit, instance in sites:
        if instance.args["n"] != len(paths):
            message = f"`{site_edit.edit}` mixes {instance.args['n']} adapters, but there are {len(paths)} directories"
            raise PeftcError(Diagnostic("P544", message, help="`n` of `fusion` is the number of adapters"))
    compiled = CompiledModel.active(model, joint_sample(sample, samples))
    for i, directory in enumerate(paths):
        source = Source(directory, compiled, other_weights, strict)
        check_edit_names(names, fused_edits, source.edits)
        source.check_sites({(names[site_edit.edit], site_edit.site.path) for site_edit, _ in sites})
        for site_edit, instance in sites:
            adapter = source.adapter_name(names[site_edit.edit], site_edit, instance)
            for name in fusion_modules(record, site_edit, instance, task):
                targets[name].add(i, source, adapter)
    values = (pair for target in targets.values() for pair in target.module.filling(target.adapters))
    copy_all(values, lambda: [target.module.after_load() for target in targets.values()])
    return tuple(names)


def fusion_modules(
    record: Installation, site_edit: ir.SiteEdit, instance: ir.FormInstance, task: str | None
) -> Iterator[str]:
    for name, suffix in instance.task_suffixes():
        if task in (None, name):
            owner = instance.owner_of(name)
            place = f"{site_edit.edit}/{site_edit.site.path}/{instance.key}"
            yield f"{record.form_modules[place]}{suffix}" if owner is None else shared_name(owner)


@dataclass
class Target:
    """A fusion module with the tensors of its adapters, and their names in the files."""

    module: BufferModule
    adapters: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    names: list[str] = field(default_factory=list[str])

    def add(self, i: int, source: Source, name: str) -> None:
        """Adds adapter number `i`. Raises: P525 for another shape, or a second adapter for `i`."""
        if i < len(self.names):
            if self.names[i] != name:
                raise source.refusal("the fusion is shared by sites whose adapters differ")
            return
        expected = {f"{name}.{part}": self.module.get_buffer(part)[0] for part in self.module.adapter()}
        tensors = {saved: tensor for saved, tensor in source.tensors.items() if saved.startswith(f"{name}.")}
        edit = name.partition("/")[0]
        message = f"the adapter in {source.directory} does not fit the fusion: `{edit}` has other sizes"
        check_tensors(tensors, expected, message)
        self.adapters.append({saved.removeprefix(f"{name}."): tensor for saved, tensor in tensors.items()})
        self.names.append(name)


class Source:
    def __init__(self, directory: Path, compiled: CompiledModel, other_weights: bool, strict: bool) -> None:
        adapter, self.tensors = read(directory)
        self.directory = directory
        check_base(adapter, compiled.module, other_weights, strict)
        spec = expanded_spec(adapter, directory)
        planned = plan_adapter(adapter, spec, compiled, adapter_tasks(adapter, spec))
        self.site_edits = {(edit.edit, edit.site.path): edit for edit in planned.site_edits}
        self.edits = tuple(dict.fromkeys(site_edit.edit for site_edit in planned.site_edits))
        self.owners: dict[str, str] = {}  # the saved names of shared parameters, which the first site gives
        regions = regions_of(planned.site_edits, compiled.analysis.structure)
        for site_edit in (site_edit for region in regions for site_edit in region.site_edits):
            for one in site_edit.instances:
                if one.owner is not None:
                    self.owners.setdefault(one.owner, f"{site_edit.edit}/{one.owner}/{one.key}")

    def check_sites(self, expected: set[tuple[str, str]]) -> None:
        edits = {edit for edit, _ in expected}
        other = sorted(expected ^ {key for key in self.site_edits if key[0] in edits})
        if other:
            edit, path = other[0]
            subject = "the fusion is not" if (edit, path) in self.site_edits else f"`{edit}` is not"
            more = f", nor at {len(other) - 1} more" if other[1:] else ""
            raise self.refusal(f"{subject} at {path}{more}")

    def adapter_name(self, edit: str, site_edit: ir.SiteEdit, instance: ir.FormInstance) -> str:
        """The saved name of the adapter in place of a fusion. Raises: P525 for other equations."""
        other = self.site_edits[edit, site_edit.site.path]
        if any(form.tasks for form in other.instances):
            raise self.refusal(f"`{edit}` is `per task`")
        pairs = dict[int, ir.FormInstance]()
        equal = len(other.assigns) == len(site_edit.assigns) and all(
            a.state == b.state and match_terms(a.value, b.value, pairs)
            for a, b in zip(site_edit.assigns, other.assigns, strict=True)
        )
        if not equal:
            sources = [("the fusion has", a.source) for a in site_edit.assigns]
            sources += [("the adapter", a.source) for a in other.assigns]
            notes = [f"{subject} {s.target} {s.op} {print_expression(s.value)}" for subject, s in sources]
            adapter = pairs.get(id(instance))
            if adapter is not None and adapter.form.name == ADAPTER:
                notes = [*argument_differences(instance, adapter), *notes]
            raise self.refusal("its equations are not those of the fusion, with `adapter` in its place", *notes)
        adapter = pairs[id(instance)]
        return f"{edit}/{site_edit.site.path}/{adapter.key}" if adapter.owner is None else self.owners[adapter.owner]

    def refusal(self, message: str, *notes: str) -> PeftcError:
        return PeftcError(Diagnostic("P525", f"the adapter in {self.directory} does not fit: {message}", notes=notes))


def match_terms(fused: ir.Term, other: ir.Term, pairs: dict[int, ir.FormInstance]) -> bool:
    """Whether two terms are equal but for adapters in place of fusions, added to `pairs`."""
    match fused, other:
        case ir.Read(), ir.Read():
            return fused.state == other.state
        case ir.Constant(), ir.Constant():
            return fused.value == other.value
        case ir.FrozenCall(), ir.FrozenCall():
            return fused.module == other.module and match_terms(fused.input, other.input, pairs)
        case ir.Feature(), ir.Feature():
            return fused.index == other.index and match_terms(fused.input, other.input, pairs)
        case ir.Arithmetic(), ir.Arithmetic():
            sides = ((fused.left, other.left), (fused.right, other.right))
            return fused.op == other.op and all(match_terms(a, b, pairs) for a, b in sides)
        case ir.FormCall(), ir.FormCall() if fused.instance.form.name == FUSION and fused.input and other.input:
            pairs[id(fused.instance)] = adapter = other.instance
            fits = adapter.form.name == ADAPTER and not argument_differences(fused.instance, adapter)
            return fits and match_terms(fused.input, other.input, pairs)
        case _:
            return False


def argument_differences(fusion: ir.FormInstance, adapter: ir.FormInstance) -> list[str]:
    """The arguments by which a fusion cannot mix an adapter, but for sizes."""
    args, expected = adapter.form.fill(adapter.args), fusion.form.fill(fusion.args)
    norms = [f"the adapter has `{n}`, and a fusion mixes adapters without" for n in ("norm_in", "norm_out") if args[n]]
    acts = [f"`act` is {args['act']} in the adapter, and {expected['act']} in the fusion"]
    return norms + (acts if args["act"] != expected["act"] else [])
