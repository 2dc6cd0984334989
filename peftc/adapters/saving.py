"""Saving what was trained, with all that is needed to put it back."""

from __future__ import annotations

from importlib.metadata import version
from os import PathLike
from pathlib import Path

from torch import nn

from peftc.adapters.base import base_of
from peftc.adapters.export_form import stored_spec, stored_tensors
from peftc.adapters.files import listing, path_of
from peftc.adapters.metadata import Adapter, tensors_name
from peftc.adapters.readable_weights import require_values
from peftc.adapters.sharded import turn, whole
from peftc.adapters.weight_sample import digest_of
from peftc.adapters.writing import write
from peftc.diagnostics import PeftcError
from peftc.forms.fusion_module import Fusion
from peftc.forms.lines_module import Lines
from peftc.forms.sparse_module import SparseValues, refuse_unchosen
from peftc.installation.contents import parameters
from peftc.installation.presence import active_installation
from peftc.installation.record import Installation, joint_spec
from peftc.installation.spec_conflicts import noted
from peftc.syntax.printer import print_spec


def save(model: nn.Module, directory: str | PathLike[str], name: str | None = None) -> Path:
    """Saves what a compiled model has trained: `adapter.json`, and `adapter-<hash>.safetensors`, which it names. The base is not
    saved.

    Tensors are named `<edit>/<site>/<form>.<parameter>`, base parameters that `train` unfroze `<edit>/<dotted name>`.
    Reparametrised prefixes are saved as the rows they make, unless they have `keep=true`. Whatever ends the
    process, the directory has the new adapter afterwards, or what was there before. Where parameters are sharded (FSDP2) every process calls this, and one of them writes.

    Args: `directory`: a new one, an empty one, or one with an adapter, which is replaced. `name`: of one spec of the model,
    to save it alone; else all specs are saved, as one.
    Raises: P410 (not compiled), P413 (no spec of that name), P526 (not there), P527 (no weights), P528 (prefix without rows), P529
    (switched off), P540, P543 and P544 for edits that are nothing yet: not calibrated, not pruned, without the adapters they mix.
    """
    target = path_of(directory)
    record = active_installation(model)
    parts = record.selected(name)
    chosen = parameters(model, name)
    require_values(chosen)
    for edit in dict.fromkeys(edit for part in parts for edit in part.edits):
        _require_begun(model, record, edit)
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

    with turn(chosen.values()) as mine:
        if mine:
            write(target, tensors, describe)
    return target


def _require_begun(model: nn.Module, record: Installation, edit: str) -> None:
    """Raises: P540 or P544 where nothing has been chosen for an edit, of no task, or it has none of the adapters that it mixes."""
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
        with noted(f"`{edit}` is what it began as: there is nothing to save"):
            raise missing
