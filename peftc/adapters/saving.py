"""Saves the trained parameters of a model, with all that is needed to load them.

Some forms are saved in an export form: a reparametrised prefix or prompt as its rows, a mixture of
adapters as their mean, a masked change as its sparse entries. The saved spec has a direct prefix,
an adapter or a sparse change in their place.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor, nn

from peftc.adapters.base import base_of, digest_of, elect_writer, other_gradients, require_finite, require_values
from peftc.adapters.files import listing, path_of, write
from peftc.adapters.metadata import Adapter, Base, PythonForm, format_of, tensors_name
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.diagnostics.suggestions import join_names
from peftc.equations.table import built_in_texts, registered_forms
from peftc.forms.module import FormModule
from peftc.forms.registry import class_path
from peftc.installation.builder import shared_name
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters, states
from peftc.installation.record import Installation, InstalledSpec, joint_spec
from peftc.installation.spec_names import with_note
from peftc.modules.offload import offloaded_values
from peftc.modules.sharded_tensors import whole
from peftc.planning.ir import SiteEdit
from peftc.semantics.export_forms import has_common_parameters, saved_form, stored_statements
from peftc.semantics.moves import without_moves
from peftc.syntax import ast
from peftc.syntax.printer import print_spec


def save(model: nn.Module, directory: str | PathLike[str], name: str | None = None) -> Path:
    """Saves the trained parameters of a compiled model, without its base.

    The files are `adapter.json` and `adapter-<hash>.safetensors`, which it names. Tensors are named
    `<edit>/<site>/<form>.<parameter>`, base parameters in `train` statements `<edit>/<dotted
    name>`. Reparametrised prefixes are saved as their rows, unless they have `keep=true`. If the
    process ends early, the directory has the new adapter or what it had before. With sharded
    weights (FSDP2, tensor parallelism) every process calls this. The adapter's tensors alone are
    gathered, and rank 0 writes.

    Args:
        model: a compiled model.
        directory: a new or empty one, or one with an adapter, which is replaced.
        name: saves one spec of the model alone, or an attached adapter; by default all specs are
            saved as one, or, in a model without specs, the adapter that is active.

    Returns:
        The path of the directory.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P526 (cannot be written), P527
            (no weights), P528 (prefix without rows), P529 (switched off), P540 (not calibrated),
            P543 (not pruned), P544 (no adapters to mix), P549 (one of several attached adapters has
            to be named), P561 (infinite or NaN values). A
            `PeftcWarning` (P583) tells of other parameters that require gradients.
    """
    return save_as(model, path_of(directory), name)


def save_as(model: nn.Module, target: Path, name: str | None = None, description: Base | None = None) -> Path:
    """As `save`. `description`: of the base, if it is not that of the model."""
    record = active_installation(model)
    with offloaded_values(edit_modules(model, record)):
        return _save(model, record, target, name, description)


def edit_modules(model: nn.Module, record: Installation) -> Iterator[nn.Module]:
    """The modules with parameters of edits, and of the base that edits train."""
    for place in record.form_modules.values():
        yield from model.get_submodule(place).modules()
    for name in record.trained.values():
        yield model.get_submodule(name.rpartition(".")[0])
    yield from record.attached_values.values()


def _save(model: nn.Module, record: Installation, target: Path, name: str | None, description: Base | None) -> Path:
    parts = parts_to_save(record, name)
    trained = {key: value for part in parts for key, value in parameters(model, part.name).items()}
    require_values(trained.items())
    for edit in dict.fromkeys(edit for part in parts for edit in record.edits_of(part)):
        _require_initialized(model, record, edit)
    spec = stored_statements(joint_spec(part.spec for part in parts))
    base = base_of(model, record, parts=parts) if description is None else description
    tensors = {key: whole(tensor) for key, tensor in stored_tensors(model, record, parts).items()}
    require_finite(tensors.items())
    if others := other_gradients(model, record):
        warn(others)
    with elect_writer((*trained.values(), *model.parameters())) as is_writer:
        if is_writer:
            write(target, tensors, partial(describe, record, parts, spec, base, tensors))
    return target


def describe(
    record: Installation,
    parts: tuple[InstalledSpec, ...],
    stored: ast.Spec,
    base: Base,
    tensors: Mapping[str, Tensor],
    sha256: str,
) -> Adapter:
    """The description of an adapter with these tensors, the parameters of the spec `stored`."""
    forms, registered = built_in_texts(stored), registered_forms(stored)
    python_forms = {n: PythonForm(path=class_path(f), version=f.version) for n, f in registered.items()}
    edits = {edit for part in parts for edit in record.edits_of(part)}
    own = [p for p in record.site_edits if p.edit in edits]
    passes = tuple(name for part in parts for name in part.passes)
    return Adapter(
        format_version=format_of(own, forms, python_forms, base.origin, passes),
        peftc=version("peftc"),
        spec=print_spec(without_moves(stored)),
        source=print_spec(joint_spec(part.spec for part in parts)),
        forms=forms,
        python_forms=python_forms,
        passes=passes,
        plan=parts[0].plan if len(parts) == 1 else record.planned.plan,
        base=base,
        weights_digest=digest_of(base.tensors),
        seed=parts[0].seed,
        tasks=record.task.names if stored.per_task and all(part in record.specs for part in parts) else (),
        tensors=listing(tensors),
        file=tensors_name(sha256),
        sha256=sha256,
    )


def _require_initialized(model: nn.Module, record: Installation, edit: str) -> None:
    """Raises: P540 or P544 for an edit that has no selection or adapters yet, for any task."""
    missing: PeftcError | None = None
    for place, where in record.form_modules.items():
        for form in model.get_submodule(where).modules() if place.partition("/")[0] == edit else ():
            try:
                if not isinstance(form, FormModule) or type(form).require_ready is FormModule.require_ready:
                    continue
                form.require_ready()
            except PeftcError as error:
                missing = missing or error
            else:
                return
    if missing is not None:
        with with_note(f"`{edit}` has its initial values: there is nothing to save"):
            raise missing


class Export(NamedTuple):
    """A form that is saved in its export form."""

    name: str  # of the form in the saved adapter
    prefix: str  # of the names of parameters that are not saved
    module: str  # the dotted name of the form module
    position: int  # of the site among those that share the module


def parts_to_save(record: Installation, name: str | None = None) -> tuple[InstalledSpec, ...]:
    """The specs that are saved as one: that of a name, or the attached adapter; by default those
    that are compiled, or the active adapter. Raises: P413, P549 where several are meant.
    """
    if name is not None:
        return (record.adapter_alone(name),) if name in record.adapter.names else record.selected(name)
    parts = tuple(spec for spec in record.specs if not spec.adapters)
    if not record.adapter.names:
        return parts
    active = record.choice.get().adapter
    if active and isinstance(active, str):
        parts = (*parts, record.adapter_alone(active))
    return require_one(record, parts)


def require_one(record: Installation, parts: tuple[InstalledSpec, ...]) -> tuple[InstalledSpec, ...]:
    """Raises: P549 for other than one spec of a model with attached adapters."""
    if len(parts) == 1 or not record.adapter.names:
        return parts
    names = [*(spec.name for spec in record.specs if not spec.adapters), *record.adapter.names]
    message = f"the model has attached adapters, and one file has one of {join_names(names)}"
    raise PeftcError(Diagnostic("P549", message, help='peftc.save(model, directory, name="…")'))


def stored_tensors(model: nn.Module, record: Installation, parts: Iterable[InstalledSpec]) -> dict[str, Tensor]:
    """The trained parameters of some specs and their states, by saved name."""
    parts = tuple(parts)
    edits = {edit for spec in parts for edit in spec.edits}
    site_edits = [site_edit for site_edit in record.site_edits if site_edit.edit in edits]
    exports = [export for site_edit in site_edits for export in _exports(record, site_edit)]
    prefixes = tuple(export.prefix for export in exports)
    values = {k: v for part in parts for k, v in {**parameters(model, part.name), **states(model, part.name)}.items()}
    names = {old: new for site_edit in site_edits for old, new in _saved_names(site_edit).items()}
    tensors: dict[str, Tensor] = {}
    for saved, parameter in values.items():
        if not saved.startswith(prefixes):
            place, _, last = saved.rpartition("/")
            key, _, tensor = last.partition(".")
            form = names.get(f"{place}/{key}")
            tensors[saved if form is None else f"{form}.{tensor}"] = parameter.detach()
    for export in {export.name: export for export in exports}.values():  # sites may be saved together
        module = cast(FormModule, model.get_submodule(export.module))
        with with_note(f"it is of the edit `{export.name.partition('/')[0]}`"):
            tensors |= {f"{export.name}.{n}": tensor for n, tensor in module.collapsed_at(export.position).items()}
    return tensors


def _exports(record: Installation, site_edit: SiteEdit) -> Iterator[Export]:
    names = _saved_names(site_edit)
    for instance in site_edit.instances:
        form = saved_form(instance.form, instance.args)
        if form is None:
            continue
        name = f"{site_edit.edit}/{site_edit.site.path}/{instance.key}"
        for task, suffix in instance.task_suffixes():
            owner = instance.owner_of(task)
            if owner is None:
                module = f"{record.form_modules[name]}{suffix}"
                yield Export(names[name] + suffix, f"{name}{suffix}.", module, instance.index)
                continue
            module = shared_name(owner)
            shared = next(saved for saved, place in record.form_modules.items() if place == module)
            if not has_common_parameters(form):
                yield Export(names[name] + suffix, f"{shared}.", module, instance.index)
                continue
            key = names[name].rpartition("/")[2]
            is_own = instance.owner == f"{site_edit.edit}.{instance.key}"
            exported_owner = f"{site_edit.edit}.{key}" if is_own else instance.owner
            exported = replace(instance, form=form, owner=exported_owner)
            place = f"{shared.partition('/')[0]}/{exported.owner_of(task)}/{key}"
            yield Export(place, f"{shared}.", module, instance.index)
            yield Export(place, f"{name}{suffix}.", module, instance.index)


def _saved_names(site_edit: SiteEdit) -> dict[str, str]:
    """The saved names of an edit's forms at a site: `mixture` becomes `adapter`."""
    counts, names = Counter[str](), dict[str, str]()
    for instance in site_edit.instances:
        form = (saved_form(instance.form, instance.args) or instance.form).name
        counts[form] += 1
        key = form if counts[form] == 1 else f"{form}_{counts[form]}"
        place = f"{site_edit.edit}/{site_edit.site.path}"
        names[f"{place}/{instance.key}"] = f"{place}/{key}"
    return names
