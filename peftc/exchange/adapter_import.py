"""`peftc.import_adapter`: an adapter of another program as one of peftc's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn

from peftc.adapters.base import base_of
from peftc.adapters.files import path_of
from peftc.adapters.loading import check_tensors, notify_forms
from peftc.adapters.origin import absolute_name
from peftc.adapters.saving import save_as
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.module import EquationModule, tensor_named
from peftc.exchange.adapterhub import folder as hub_folder
from peftc.exchange.adapterhub import fusion as hub_fusion
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.reading import read_parts
from peftc.exchange.adapterhub.site_parts import fill_sites, form_texts, site_edits_of
from peftc.exchange.edited_model import Base, Model, open_model
from peftc.exchange.peft_format import folder as peft_folder
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.parameters import parameter_parts
from peftc.exchange.peft_format.reading import Incoming, read_peft
from peftc.exchange.selector_text import Selectors
from peftc.exchange.spec_text import IncomingEdit, ModulePart, edits_of, trained_text, unfit
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.record import Installation, InstalledSpec, installation_of, is_installed
from peftc.models.names import error_summary
from peftc.planning.ir import SiteEdit
from peftc.semantics.expand import expand
from peftc.syntax.parser import parse_text
from peftc.task_modules.tasked_module import Tasked


class ImportedAdapter(NamedTuple):
    """The outcome of `peftc.import_adapter`.

    Attributes:
        output: the folder of the adapter.
        spec: its text.
        tensors: how many it has.
        notes: what of the source matters while training alone, and did not come.
    """

    output: str
    spec: str
    tensors: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((self.spec, *self.notes, f"wrote {self.output} ({self.tensors} tensors)"))


def import_adapter(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    model: Model | None = None,
    trust_remote_code: bool = False,
) -> ImportedAdapter:
    """Writes an adapter of PEFT or AdapterHub as one of peftc's, with the same function and bits.

    The spec has the equations of the adapter's type at the modules for which there are tensors;
    modules that are saved whole are in `train` statements. `load` compiles it as any other.

    Args:
        source: a folder with adapter_config.json and tensors, that PEFT or the library `adapters`
            wrote, or one of its setups, adapter_setup.json with an AdapterFusion; or a hub id. A
            pickle (adapter_model.bin, pytorch_adapter.bin) is read as tensors alone, which runs no
            code.
        output: a new folder, or one with an adapter, which is replaced.
        model: the base, by default the one that the configuration names. Its weights need not be
            there; where they are, the adapter has samples of them, as `save` takes them.
        trust_remote_code: as in `plan`.

    Returns:
        The spec, and what was written.

    Raises:
        PeftcError: P501-P506 (the base), P526 (the output), P545 (arguments), P561 (infinite or NaN
            values), P802 (something that no equation says), P803 (damaged files), P804 (tensors
            that do not fit the base). After an error nothing is written.
    """
    folder = source_folder(source)
    if hub_fusion.is_setup(folder):
        return _import_from_adapterhub(hub_fusion.read_setup(folder), model, trust_remote_code, output)
    values = peft_folder.read_config(folder / peft_folder.CONFIG)
    if hub_folder.is_of_adapterhub(values):
        return _import_from_adapterhub(hub_folder.read_hub_adapter(folder, values), model, trust_remote_code, output)
    tensors = peft_folder.read_tensors(folder, peft_folder.TENSORS, peft_folder.PICKLED)
    config = PeftConfig(values)
    base = open_base_of(config.base, model, trust_remote_code)
    try:
        return write_adapter(
            base, read_peft(config, tensors, base.module, base.of_linear), path_of(output), output_name(output)
        )
    finally:
        base.close()


def _import_from_adapterhub(
    adapter: HubAdapter, model: Model | None, trust_remote_code: bool, output: str | PathLike[str]
) -> ImportedAdapter:
    base = open_base_of(adapter.base, model, trust_remote_code)
    try:
        compiled = CompiledModel.active(base.module)
        read = read_parts(adapter, compiled.analysis, base.module)
        selectors = Selectors(compiled.analysis.table)
        edits = site_edits_of(read.parts, selectors)
        texts = form_texts(edits) + [edit.text for edit in edits] + trained_text(list(read.heads), selectors, "head")

        def finish(module: nn.Module) -> None:
            fill_sites(module, edits)
            _fill_saved(module, read.heads)

        count = len({id(tensor) for part in read.parts for tensor in part.tensors.values()}) + len(read.heads)
        result = write_text(base, compiled, texts, finish, path_of(output), output_name(output), count)
        return result._replace(notes=tuple(adapter.notes))
    finally:
        base.close()


def source_folder(source: str | PathLike[str]) -> Path:
    """A folder, or that of the hub cache, after a download. Raises: P803."""
    path = path_of(source)
    if path.is_dir():
        return path
    name = str(source)
    if name.count("/") != 1 or path.exists():
        raise peft_folder.damaged(f"there is no folder {name}, and it is no hub id")
    try:
        return Path(snapshot_download(name, allow_patterns=[*peft_folder.FILES, *hub_folder.FILES]))
    except (OSError, HFValidationError) as error:
        raise peft_folder.damaged(f"the hub did not return `{name}`", error_summary(error)) from error


def open_base_of(named: str | None, model: Model | None, trust_remote_code: bool) -> Base:
    chosen = named if model is None else model
    if chosen is None:
        raise PeftcError(Diagnostic("P545", "the configuration names no base", help="name it: `--model`, or `model=`"))
    if is_installed(chosen):
        raise PeftcError(Diagnostic("P545", "the model has edits already", help="give the base without edits"))
    if isinstance(chosen, nn.Module) and any(p.is_meta for p in chosen.parameters()):
        raise PeftcError(Diagnostic("P545", "the model has no values", help="give the path of its configuration"))
    return open_model(chosen, trust_remote_code)


def output_name(output: str | PathLike[str]) -> str:
    return path_of(output).resolve().name or "adapter"


def write_adapter(base: Base, incoming: Incoming, target: Path, name: str) -> ImportedAdapter:
    """Compiles the spec onto the base, fills it, and saves it. The base is as before, then."""
    compiled = CompiledModel.active(base.module)
    selectors = Selectors(compiled.analysis.table)
    edits = edits_of(_parts(incoming, selectors), selectors, incoming.name)
    texts = _texts(incoming, edits, selectors)
    count = sum(part.count for edit in edits for part in edit.parts.values())
    count += len(incoming.common) + len(incoming.saved)
    finish = partial(_fill, edits=edits, saved=incoming.saved, common=incoming.common)
    return write_text(base, compiled, texts, finish, target, name, count, incoming.tasks)


def statements_of(incoming: Incoming, selectors: Selectors) -> list[str]:
    """The forms, edits and `train` statements of an adapter. Raises: P804."""
    return _texts(incoming, edits_of(_parts(incoming, selectors), selectors, incoming.name), selectors)


def _parts(incoming: Incoming, selectors: Selectors) -> list[ModulePart]:
    at_sites = [] if incoming.at_sites is None else incoming.at_sites(selectors.table)
    return [*incoming.parts, *parameter_parts(incoming.of_parameters, selectors.table), *at_sites]


def _texts(incoming: Incoming, edits: list[IncomingEdit], selectors: Selectors) -> list[str]:
    parts = (part for edit in edits for part in edit.parts.values())
    forms = dict.fromkeys(part.form.strip() for part in parts if part.form)
    trained = trained_text(list(incoming.saved), selectors, "saved")
    return [*(f"{form}\n" for form in forms), *(edit.text for edit in edits), *trained]


def write_text(
    base: Base,
    compiled: CompiledModel,
    texts: list[str],
    finish: Callable[[nn.Module], None],
    target: Path,
    name: str,
    count: int,
    tasks: tuple[str, ...] = (),
) -> ImportedAdapter:
    """Compiles statements onto the base, lets `finish` fill `count` tensors, and saves them."""
    text = "\n".join(["peft 2", "", *texts, ""])
    try:
        spec = expand(parse_text(text), include=None)
        planned = compiled.plan(spec, tasks)
        installed = InstalledSpec(name, spec, planned.deferred_plan, 0)
        compiled.add(installed, planned, tasks=tasks, finish=finish, draw=False)
    except PeftcError as error:
        raise misfit(error) from error
    try:
        record = installation_of(base.module)
        save_as(base.module, target, description=_description(base, record))
        return ImportedAdapter(str(target), installed.text, count)
    finally:
        compiled.remove()


def misfit(error: PeftcError) -> PeftcError:
    """What keeps the spec of an adapter from its base: P804, or an error of the base itself."""
    first = error.diagnostics[0]
    if first.code.startswith(("P5", "P8")):  # of the base, or of the adapter
        return error
    if first.code == "P317":  # a number above the limit of the model
        return PeftcError(Diagnostic("P804", first.message))
    notes = (f"{one.code}: {one.message}" for one in error.diagnostics[:3])
    return unfit("the adapter does not fit the model", *notes)


def _description(base: Base, record: Installation) -> Any:
    """The base without samples where its weights are not known."""
    described = base_of(base.module, record)
    unknown = (
        set(described.tensors)
        if not base.has_weights
        else set()
        if base.checkpoint is None
        else base.checkpoint.converted_names()
    )
    tensors = {
        name: tensor.model_copy(update={"sample": ()}) if name in unknown else tensor
        for name, tensor in described.tensors.items()
    }
    return described.model_copy(update={"id": absolute_name(base.id), "tensors": tensors})


@torch.no_grad()
def _fill(
    model: nn.Module, edits: list[IncomingEdit], saved: Mapping[str, Tensor], common: Mapping[str, Tensor]
) -> None:
    """Gives parameters the tensors themselves, in their dtypes. Raises: P804."""
    record = installation_of(model)
    by_name = {edit.name: edit for edit in edits}
    left = {(edit.name, module) for edit in edits for module in edit.parts}
    filled = dict[int, Tensor]()  # by what they are for, which several sites may have in common
    for site_edit in record.site_edits:
        parts = by_name[site_edit.edit].parts
        module = "" if "" in parts else site_edit.site.module
        part = parts.get(module)
        if part is None:
            raise unfit(f"`{site_edit.edit}` is at `{site_edit.site.module}`, for which the adapter has no tensors")
        left.discard((site_edit.edit, module))
        for name, parameter, tensor in _values(model, record, site_edit, part):
            before = filled.setdefault(id(parameter), tensor)
            if before is not tensor and not before.equal(tensor):
                raise unfit(f"`{part.module}.{name}` has other values than the same tensor of other modules")
            _set(parameter, tensor, f"{part.module}.{name}")
        for instance in site_edit.instances if common else ():
            place = record.form_modules.get(f"{site_edit.edit}/{instance.owner}/{instance.key}")
            if place is None:
                continue
            form = cast(EquationModule, model.get_submodule(place))
            for name, tensor in common.items():
                _set(tensor_named(form, name.partition(".")[2]), tensor, name)
    if left:
        raise unfit(f"`{min(left)[1]}` is not among the modules that the edits change")
    _fill_saved(model, saved)
    notify_forms(model)


def _values(
    model: nn.Module, record: Installation, site_edit: SiteEdit, part: ModulePart
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The parameters of a site, and tensors for them, with the names of the tensors."""
    for instance in site_edit.instances:
        places = (f"{site_edit.edit}/{owner}/{instance.key}" for owner in (site_edit.owner_path, instance.owner))
        place = next((record.form_modules[one] for one in places if one in record.form_modules), None)
        form = None if place is None else model.get_submodule(place)
        tensors = part.by_site.get(site_edit.site.path, part.tensors)
        for name, tensor in tensors.items() if form is not None else ():
            key, _, attribute = name.partition(".")
            if key != instance.key:
                continue
            if not isinstance(form, Tasked):
                yield name, tensor_named(cast(EquationModule, form), attribute), tensor
                continue
            for number, task in enumerate(form.tasks):
                own = tensor[number] if name in part.by_task else tensor
                yield name, tensor_named(cast(EquationModule, form.form(task)), attribute), own


@torch.no_grad()
def _fill_saved(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives parameters of the base the tensors themselves. Raises: P804."""
    for place in installation_of(model).trained.values():
        name = next((name for name in _aliases(model, place) if name in saved), None)
        if name is None:
            raise unfit(f"`{place}` would be trained, and the adapter has no values for it")
        _set(model.get_parameter(place), saved[name], place)


def _aliases(model: nn.Module, name: str) -> list[str]:
    parameter = model.get_parameter(name)
    return [other for other, one in model.named_parameters(remove_duplicate=False) if one is parameter]


def _set(parameter: Tensor, tensor: Tensor, name: str) -> None:
    """Raises: P561 for infinite or NaN values, P804 for another shape."""
    shapes = [[size for size in shape if size != 1] for shape in (parameter.shape, tensor.shape)]
    kernel = tensor.ndim == 4 and list(tensor.flatten(1).shape) == list(parameter.shape)
    if shapes[0] != shapes[1] and not kernel:
        raise unfit(f"`{name}` is {list(tensor.shape)} in the adapter, and {list(parameter.shape)} is expected")
    check_tensors({name: tensor}, {name: tensor})
    parameter.data = tensor.detach().reshape(parameter.shape).contiguous().clone()
