"""Giving a fusion the adapters that it mixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from peftc.adapters.files import path_of, read
from peftc.adapters.loading import check_base, check_tensors, planned_saved, tasks_in
from peftc.adapters.warm_start import checked_names
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.fusion_module import Fusion
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.journal import copy_all
from peftc.installation.presence import active_installation
from peftc.installation.record import Installation
from peftc.installation.surgery import identifier
from peftc.planning import ir
from peftc.rewriting.assembly import regions_of
from peftc.rewriting.container import SHARED
from peftc.syntax.print_expressions import print_expression

FUSION, ADAPTER = "fusion", "adapter"


def fuse(
    model: nn.Module,
    directories: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    edits: Mapping[str, str] | None = None,
    task: str | None = None,
    sample: Mapping[str, Any] | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> tuple[str, ...]:
    """Reads the adapters that the `fusion`s of a compiled model mix (AdapterFusion, Pfeiffer et al. 2021, arXiv:2005.00247): what was
    saved in these directories, one adapter each. Their edits have the equations of the fusions, with `adapter` in the place of
    `fusion`, at the same sites. They are saved with the fusion, and not trained.

    Args: `edits`: from edits of the model to those of the adapters; without it, all that have a `fusion`, and the same names.
    `task`: the one whose fusions read them, of edits that are `per task` here; all of them without it. `sample`: as in
    `compile`. `other_weights`, `strict`: as in `load`.
    Returns: the edits of the model that have adapters now.
    Raises: P410 (not compiled), P529 (switched off), P520-P522 (the files), P523 and P524 (another base), P525 (adapters that do not
    fit), P532 (no such edit), P534 (no such task), P544 (not as many as `n` says). After an error the model is as it was.
    """
    record = active_installation(model)
    own = dict.fromkeys(placed.edit for placed, _ in fusions(record))
    if not own:
        raise PeftcError(Diagnostic("P532", "the model has no edit with a `fusion`"))
    several = isinstance(directories, Iterable) and not isinstance(directories, str)
    given: Any = directories if several else [directories]  # from Python it may be anything
    paths = [path_of(directory) for directory in given]
    pairs = {edit: edit for edit in own} if edits is None else checked_names(edits, own)
    found = [(placed, one) for placed, one in fusions(record) if placed.edit in pairs]
    named = None if task is None else record.task.of(task)
    targets = {p: Target(cast(Fusion, model.get_submodule(p))) for one in found for p in places(record, *one, named)}
    for placed, one in found:
        if one.args["n"] != len(paths):
            message = f"`{placed.edit}` mixes {one.args['n']} adapters, and {len(paths)} are given"
            raise PeftcError(Diagnostic("P544", message, help="`n` of `fusion` says how many"))
    compiled = CompiledModel(model, sample)
    for i, directory in enumerate(paths):
        source = Source(directory, compiled, other_weights, strict)
        checked_names(pairs, own, source.edits)
        source.check_sites({(pairs[placed.edit], placed.site.path) for placed, _ in found})
        for placed, one in found:
            name = source.twin(pairs[placed.edit], placed, one)
            for place in places(record, placed, one, named):
                targets[place].take(i, source, name)
    modules = [target.module for target in targets.values()]
    values = (pair for target in targets.values() for pair in target.module.filling(target.adapters))
    copy_all(values, lambda: [module.loaded() for module in modules])
    return tuple(pairs)


def fusions(record: Installation) -> Iterator[tuple[ir.SiteEdit, ir.FormInstance]]:
    for placed in record.site_edits:
        yield from ((placed, one) for one in placed.instances if one.form.name == FUSION)


def places(record: Installation, placed: ir.SiteEdit, one: ir.FormInstance, task: str | None) -> Iterator[str]:
    """The names of the modules of a fusion at a site: of one task, or of all."""
    for present, tail in one.task_suffixes():
        if task in (None, present):
            owner = one.owner_of(present)
            site = f"{placed.edit}/{placed.site.path}/{one.key}"
            yield f"{record.form_modules[site]}{tail}" if owner is None else f"{SHARED}.{identifier(owner)}"


@dataclass
class Target:
    """A fusion, and what has been found for it: tensors of adapters, and their names in the files."""

    module: Fusion
    adapters: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    names: list[str] = field(default_factory=list[str])

    def take(self, i: int, source: Source, name: str) -> None:
        """Takes over the adapter number i. Raises: P525 where it is of another shape, or a second one."""
        if i < len(self.names):
            if self.names[i] != name:
                raise source.refusal("the fusion is shared by sites whose adapters differ")
            return
        wanted = {f"{name}.{part}": self.module.get_buffer(part)[0] for part in self.module.adapter()}
        found = {saved: tensor for saved, tensor in source.tensors.items() if saved.startswith(f"{name}.")}
        edit = name.partition("/")[0]
        check_tensors(
            found, wanted, f"what is saved in {source.directory} does not fit the fusion: `{edit}` has other sizes"
        )
        self.adapters.append({saved.removeprefix(f"{name}."): tensor for saved, tensor in found.items()})
        self.names.append(name)


class Source:
    """A saved adapter, planned on the model: its edits and their sites, the names of its tensors."""

    def __init__(self, directory: Path, compiled: CompiledModel, other_weights: bool, strict: bool) -> None:
        adapter, self.tensors = read(directory)
        self.directory = directory
        check_base(adapter, compiled.module, other_weights, strict)
        _, found = planned_saved(adapter, directory, compiled, tasks_in(adapter, directory))
        self.placed = {(p.edit, p.site.path): p for p in found.site_edits}
        self.edits = tuple(dict.fromkeys(placed.edit for placed in found.site_edits))
        self.owners: dict[str, str] = {}  # names of what sites share, which has that of the first of them
        for placed in (
            p for region in regions_of(found.site_edits, compiled.analysis.structure) for p in region.site_edits
        ):
            for one in placed.instances:
                if one.owner is not None:
                    self.owners.setdefault(one.owner, f"{placed.edit}/{one.owner}/{one.key}")

    def check_sites(self, wanted: set[tuple[str, str]]) -> None:
        """Raises: P525 where an edit has other sites than its fusion."""
        asked = {edit for edit, _ in wanted}
        other = sorted(wanted ^ {place for place in self.placed if place[0] in asked})
        if other:
            edit, path = other[0]
            at = "the fusion is not" if (edit, path) in self.placed else f"`{edit}` is not"
            raise self.refusal(f"{at} at {path}, nor at {len(other) - 1} more" if other[1:] else f"{at} at {path}")

    def twin(self, edit: str, placed: ir.SiteEdit, one: ir.FormInstance) -> str:
        """The name of the adapter that stands in the place of a fusion. Raises: P525 where the equations differ in more."""
        other = self.placed[edit, placed.site.path]
        if any(form.tasks for form in other.instances):
            raise self.refusal(f"`{edit}` is `per task`")
        equal = len(other.assigns) == len(placed.assigns)
        pairs = zip(placed.assigns, other.assigns, strict=equal)
        found = dict[int, ir.FormInstance]()
        if not equal or not all(a.state == b.state and same(a.value, b.value, found) for a, b in pairs):
            said = [
                f"{which} {a.source.target} {a.source.op} {print_expression(a.source.value)}"
                for which, where in (("the fusion has", placed), ("the adapter", other))
                for a in where.assigns
            ]
            if (pair := found.get(id(one))) is not None and pair.form.name == ADAPTER:
                said = [*unlike(one, pair), *said]
            raise self.refusal("its equations are not those of the fusion, with `adapter` in its place", *said)
        twin = found[id(one)]
        return f"{edit}/{placed.site.path}/{twin.key}" if twin.owner is None else self.owners[twin.owner]

    def refusal(self, message: str, *notes: str) -> PeftcError:
        return PeftcError(Diagnostic("P525", f"the adapter in {self.directory} does not fit: {message}", notes=notes))


def same(one: ir.Term, other: ir.Term, found: dict[int, ir.FormInstance]) -> bool:
    """Whether two terms are the same function but for adapters in the place of fusions, which are noted in `found`."""
    match one, other:
        case ir.Read(), ir.Read():
            return one.state == other.state
        case ir.Constant(), ir.Constant():
            return one.value == other.value
        case ir.FrozenCall(), ir.FrozenCall():
            return one.module == other.module and same(one.input, other.input, found)
        case ir.Arithmetic(), ir.Arithmetic():
            return one.op == other.op and same(one.left, other.left, found) and same(one.right, other.right, found)
        case ir.FormCall(), ir.FormCall() if one.instance.form.name == FUSION and one.input and other.input:
            found[id(one.instance)] = other.instance
            return alike(one.instance, other.instance) and same(one.input, other.input, found)
        case _:
            return False


def alike(fusion: ir.FormInstance, adapter: ir.FormInstance) -> bool:
    """Whether a form is an adapter as the fusion mixes them; sizes are compared with the tensors."""
    return adapter.form.name == ADAPTER and not unlike(fusion, adapter)


def unlike(fusion: ir.FormInstance, adapter: ir.FormInstance) -> list[str]:
    """The arguments by which an adapter is not of those that the fusion mixes, as notes."""
    has, wanted = adapter.form.fill(adapter.args), fusion.form.fill(fusion.args)
    norms = [f"the adapter has `{n}`, and a fusion mixes adapters without" for n in ("norm_in", "norm_out") if has[n]]
    acts = [f"`act` is {has['act']} in the adapter, and {wanted['act']} in the fusion"]
    return norms + (acts if has["act"] != wanted["act"] else [])
