"""Saves the trained parameters of a model, with all that is needed to load them."""

from __future__ import annotations

from importlib.metadata import version
from os import PathLike
from pathlib import Path

from torch import nn

from peftc.adapters.base import base_of, digest_of
from peftc.adapters.export_form import stored_spec, stored_tensors
from peftc.adapters.files import listing, path_of, write
from peftc.adapters.metadata import Adapter, tensors_name
from peftc.adapters.weight_access import elect_writer, require_values, whole
from peftc.diagnostics import PeftcError
from peftc.forms.fusion_module import Fusion
from peftc.forms.lines_module import Lines
from peftc.forms.sparse_module import SparseValues, refuse_unchosen
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters
from peftc.installation.record import Installation, joint_spec
from peftc.installation.spec_names import with_note
from peftc.syntax.printer import print_spec


def save(model: nn.Module, directory: str | PathLike[str], name: str | None = None) -> Path:
    """Saves the trained parameters of a compiled model, without its base.

    The files are `adapter.json` and `adapter-<hash>.safetensors`, which it names. Tensors are named
    `<edit>/<site>/<form>.<parameter>`, base parameters in `train` statements `<edit>/<dotted
    name>`. Reparametrised prefixes are saved as their rows, unless they have `keep=true`. If the
    process ends early, the directory has the new adapter or what it had before. With sharded
    parameters (FSDP2) every process calls this, and rank 0 writes.

    Args:
        model: a compiled model.
        directory: a new or empty one, or one with an adapter, which is replaced.
        name: saves one spec of the model alone; by default all specs are saved as one.

    Returns:
        The path of the directory.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P526 (cannot be written), P527
            (no weights), P528 (prefix without rows), P529 (switched off), P540 (not calibrated),
            P543 (not pruned), P544 (no adapters to mix).
    """
    target = path_of(directory)
    record = active_installation(model)
    parts = record.selected(name)
    trained = parameters(model, name)
    require_values(trained.items())
    for edit in dict.fromkeys(edit for part in parts for edit in part.edits):
        _require_initialized(model, record, edit)
    source = joint_spec(part.spec for part in parts)
    spec, base = stored_spec(source), base_of(model, record)
    tensors = {key: whole(tensor) for key, tensor in stored_tensors(model, record, name).items()}
    plan = parts[0].plan if len(parts) == 1 else record.planned.plan

    def describe(sha256: str) -> Adapter:
        return Adapter(
            peftc=version("peftc"),
            spec=spec,
            source=print_spec(source),
            plan=plan,
            base=base,
            weights_digest=digest_of(base.tensors),
            seed=parts[0].seed,
            tasks=record.task.names,
            tensors=listing(tensors),
            file=tensors_name(sha256),
            sha256=sha256,
        )

    with elect_writer(trained.values()) as is_writer:
        if is_writer:
            write(target, tensors, describe)
    return target


def _require_initialized(model: nn.Module, record: Installation, edit: str) -> None:
    """Raises: P540 or P544 for an edit that has no selection or adapters yet, for any task."""
    missing: PeftcError | None = None
    for place, where in record.form_modules.items():
        for form in model.get_submodule(where).modules() if place.partition("/")[0] == edit else ():
            try:
                if isinstance(form, SparseValues):
                    form.require_chosen()
                elif isinstance(form, Lines):
                    refuse_unchosen("lines", form.way, form.get_buffer("places"))
                elif isinstance(form, Fusion):
                    form.require_filled()
                else:
                    continue
            except PeftcError as error:
                missing = missing or error
            else:
                return
    if missing is not None:
        with with_note(f"`{edit}` has its initial values: there is nothing to save"):
            raise missing
