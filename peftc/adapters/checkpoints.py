"""`save_pretrained` of a compiled model, and the checkpoints of transformers' `Trainer`.

`save_pretrained` writes an adapter with the parameters as they are trained, so that training can be
resumed: `save` has simpler forms in the place of some. A folder of a transformers model also has

- its `config.json`, whose `transformers_weights` makes `from_pretrained` of transformers refuse the
  folder, which has no weights of a base;
- `model.safetensors.index.json`, by which `Trainer` finds the tensors of the adapter, for
  `resume_from_checkpoint` and `load_best_model_at_end`. It calls `model.load_state_dict` with them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftc.adapters.base import (
    base_of,
    elect_writer,
    other_gradients,
    require_finite,
    require_values,
)
from peftc.adapters.files import path_of, write
from peftc.adapters.hub import upload
from peftc.adapters.loading import check_tensors, notify_forms
from peftc.adapters.metadata import METADATA, Adapter
from peftc.adapters.saving import describe, edit_modules, require_one
from peftc.comparison.moves import Moves
from peftc.concurrency.context import ALL
from peftc.diagnostics import Diagnostic, PeftcError, warn
from peftc.filesystem.atomic import replace_text
from peftc.installation.completeness import complete_installation
from peftc.installation.contents import names_on_model, parameters, states
from peftc.installation.journal import transaction
from peftc.installation.record import Installation, InstalledSpec, joint_spec, place_of_values
from peftc.modules.offload import offloaded_values
from peftc.modules.sharded_tensors import distributed_like, whole
from peftc.semantics.export_forms import without_expectations

CONFIGURATION, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = "transformers_weights"  # the key of a configuration that names the file of weights
NO_WEIGHTS = f"none, since this folder has an adapter ({METADATA}), which `peftc.from_pretrained` loads"
_FOLDERS = ("save_directory", "path")  # what libraries call the folder of `save_pretrained`
_MODEL_FILE = re.compile(r"(model|pytorch_model|diffusion_pytorch_model)\b.*\.(safetensors|bin)(\.index\.json)?")


def save_checkpoint(
    model: nn.Module,
    directory: Any,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    is_main_process: bool = True,
) -> Path:
    """Saves the edits that act, with the configuration of the model: what `save_pretrained` calls.

    With sharded parameters every process calls this; with a state dict, only the one that has it.

    Args:
        model: a compiled model.
        directory: of any other files but weights of a model.
        state_dict: the values to save, by the names of `model.state_dict()`.
        is_main_process: whether this process writes.

    Raises: P436, P526, P527, P561, P566, P573 as `save`; P580 (no values in the state dict).
    """
    target, record = path_of(directory), complete_installation(model)
    with offloaded_values(edit_modules(model, record)):
        return _save_checkpoint(model, record, target, state_dict, is_main_process)


def _save_checkpoint(
    model: nn.Module,
    record: Installation,
    target: Path,
    state_dict: Mapping[str, Tensor] | None,
    is_main_process: bool,
) -> Path:
    parts = require_one(record, acting_specs(record))
    trained = {saved: p for part in parts for saved, p in parameters(model, part.name).items()}
    own = trained | {saved: t for part in parts for saved, t in states(model, part.name).items()}
    names = {saved: on_model for part in parts for saved, on_model in names_on_model(model, part.name).items()}
    _check_base(model, record)
    if state_dict is None:
        require_values(own.items())
    tensors = {
        n: whole(t.detach())
        for n, t in (own if state_dict is None else state_values(record, names, state_dict)).items()
    }
    require_finite(tensors.items())
    base = base_of(model, record, state_dict, parts)
    spec = without_expectations(joint_spec(part.spec for part in parts))
    sharded = (*trained.values(), *model.parameters()) if state_dict is None else ()
    with elect_writer(sharded) as is_writer:
        if is_writer and is_main_process:
            _check_folder(target)
            adapter: list[Adapter] = []

            def description(sha256: str) -> Adapter:
                adapter.append(describe(record, parts, spec, base, tensors, sha256))
                return adapter[-1]

            write(target, tensors, description, beside=True)
            write_configuration(model, target, adapter[-1].file)
    return target


def save_pretrained(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """`model.save_pretrained` with these arguments. Those about the layout of files have no effect.

    Raises: as `save_checkpoint`; P581 for a model of another library, P545 for a variant.
    """
    if "save_directory" not in arguments:
        message = f"`save_pretrained` of {type(model).__name__} does not save an adapter"
        help_ = "compile the model of transformers inside of it, or call `peftc.save`"
        raise PeftcError(Diagnostic("P581", message, help=help_))
    if arguments.get("variant") is not None:
        message = f"an adapter has no variants: nothing would read `{arguments['variant']}` back"
        raise PeftcError(Diagnostic("P545", message, help="save into a folder of another name, without `variant=`"))
    state, main = arguments.get("state_dict"), arguments.get("is_main_process", True)
    target = save_checkpoint(model, arguments["save_directory"], state_dict=state, is_main_process=main)
    if arguments.get("push_to_hub") and main:
        options: dict[str, Any] = {"token": arguments.get("token"), **arguments.get("kwargs", {})}
        upload(target, options.pop("repo_id", target.name), **options)


def acting_specs(record: Installation) -> tuple[InstalledSpec, ...]:
    """The specs of a model that are not switched off in the present context."""
    off = record.choice.get().off
    parts = tuple(part for part in record.specs if not part.adapters and not off.issuperset(part.edits))
    adapter = record.choice.get().adapter
    attached = (record.adapter_alone(adapter),) if adapter and isinstance(adapter, str) else ()
    return () if ALL in off else (*parts, *attached)


def state_values(record: Installation, names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that a state dict has for saved names, by those on the model. Raises: P580."""
    names = {saved: state_name(record, on_model) for saved, on_model in names.items()}
    if missing := [name for name in names.values() if name not in state]:
        message = f"the state dict has no values for {len(missing)} parameters of edits, such as `{missing[0]}`"
        help_ = "pass the state dict of the whole model, or none"
        raise PeftcError(Diagnostic("P580", message, help=help_))
    return {saved: state[name] for saved, name in names.items()}


def state_name(record: Installation, saved: str) -> str:
    """The name in the model's state dict of a parameter, or state, with a saved name."""
    if saved in record.trained:
        return record.trained[saved]
    value, _, adapter = saved.rpartition("/")
    if value in record.adapter_parameters:
        return f"{place_of_values(value)}.{adapter}"
    place, _, last = saved.rpartition("/")
    form, _, tensor = last.partition(".")
    return f"{record.form_modules[f'{place}/{form}']}.{tensor}"


def is_adapter(state: Mapping[str, object]) -> bool:
    """Whether a state dict has the tensors of an adapter: only their names have slashes."""
    return bool(state) and all("/" in name for name in state)


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Reads the parameters of a compiled model from the tensors of an adapter that it has saved.

    Names are those that the specs of the model say that they had (`moved`). Raises: P525 for an
    adapter of other edits, P561 for values that are not finite.
    """
    record = complete_installation(model)
    parts = acting_specs(record) if record.adapter.names else record.specs
    own = {n: t for part in parts for n, t in {**parameters(model, part.name), **states(model, part.name)}.items()}
    for part in require_one(record, parts):
        names = Moves.of(part.spec).renamed(tensors, own)
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
    help_ = "compile the spec that the checkpoint was saved with: `peftc.specs(model)` is that of the model"
    check_tensors(tensors, own, "the checkpoint has other edits than the model", help_)
    with transaction() as (journal, _):
        for name, tensor in own.items():
            journal.copy(tensor, distributed_like(tensors[name].reshape(tensor.shape), tensor))
        notify_forms(model)


def check_gradients(model: nn.Module, record: Installation) -> None:
    """Raises: P583 for parameters that are trained and that no adapter has."""
    if others := other_gradients(model, record):
        raise PeftcError(others)


def _check_base(model: nn.Module, record: Installation) -> None:
    """Warns of running statistics that are not saved (P584). Raises: P583."""
    check_gradients(model, record)
    norms = [n for n, m in model.named_modules() if isinstance(getattr(m, "running_mean", None), Tensor) and m.training]
    if norms:
        message = f"{len(norms)} norms change their running statistics in training: `{norms[0]}` is saved without"
        warn(Diagnostic("P584", message, help="keep them in evaluation: `module.eval()` after `model.train()`"))


def _check_folder(target: Path) -> None:
    """Raises: P526 for a folder with weights: programs would read these, and not the adapter."""
    if (name := file_of_weights(target)) is not None:
        message = f"{target} has the weights of a model, `{name}`, which would be loaded without the adapter"
        raise PeftcError(Diagnostic("P526", message, help="name another folder, or remove these weights"))


def file_of_weights(folder: Path) -> str | None:
    """A file of a folder with weights of a model, or an index of them."""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    models = filter(_MODEL_FILE.fullmatch, names)
    return next((name for name in models if name != INDEX or "metadata" in _json(folder / name)), None)


def check_base_folder(arguments: Mapping[str, Any]) -> None:
    """Checks where `save_pretrained` writes a base. Raises: P526 for a folder with an adapter."""
    target = path_of(next((arguments[name] for name in _FOLDERS if name in arguments), "."))
    if (target / METADATA).is_file():
        message = f"{target} has an adapter, and programs would load the base beside it without the adapter"
        raise PeftcError(Diagnostic("P526", message, help="name another folder, or remove the adapter"))


def write_configuration(model: nn.Module, target: Path, tensors: str | None = None) -> None:
    """Writes what tells programs of a library which model this is, and that it has no weights.

    `tensors`: the file to which `Trainer` is led. Raises: P526.
    """
    try:
        if isinstance(model, PreTrainedModel):
            config = copy.deepcopy(model.config)
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(target)
            replace_text(target / CONFIGURATION, _text(_json(target / CONFIGURATION) | {WEIGHTS: NO_WEIGHTS}))
            if model.can_generate():
                model.generation_config.save_pretrained(target)  # pyright: ignore[reportOptionalMemberAccess]
            if tensors is not None:
                (target / INDEX).touch()
                index = {"peftc": NO_WEIGHTS, "weight_map": dict.fromkeys(model.state_dict(), tensors)}
                replace_text(target / INDEX, _text(index))
        elif hasattr(model, "save_config"):  # diffusers
            model.save_config(target)  # pyright: ignore[reportCallIssue]
    except OSError as error:
        message = f"the configuration cannot be saved at {target}"
        raise PeftcError(Diagnostic("P526", message, notes=(f"{error}",))) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}


def _text(values: object) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"
