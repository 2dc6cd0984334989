"""Beginning with what another training has found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike

from torch import Tensor, nn

from peftc.adapters.files import path_of, read
from peftc.adapters.loading import check_base, check_tensors
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms.module import FormModule
from peftc.installation.contents import parameters, states
from peftc.installation.journal import copy_all
from peftc.installation.presence import active_installation


def warm_start(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    edits: Mapping[str, str] | None = None,
    task: str | None = None,
    other_weights: bool = False,
    strict: bool = False,
) -> tuple[str, ...]:
    """Gives edits of a compiled model the values that a saved adapter has: a prompt for a new task begins as that of another one (SPoT,
    Vu et al. 2021, arXiv:2110.07904). The spec of the model stays; everything else of the adapter is left out.

    Args: `edits`: from edits of the model to those of the adapter; without it, all that have the same name. `task`: the task
    whose parameters begin so, of edits that are `per task` here and not there. `other_weights`, `strict`: as in `load`.
    Returns: the edits of the model that have new values.
    Raises: P410 (not compiled), P529 (switched off), P520-P522 (the files), P523 and P524 (another base), P525 (tensors that
    do not fit), P532 (no such edit), P534 (no such task). After an error the model is as it was.
    """
    record = active_installation(model)
    adapter, tensors = read(path_of(directory))
    check_base(adapter, model, other_weights, strict)
    own = {edit for part in record.specs for edit in part.edits}
    there = dict.fromkeys(saved.partition("/")[0] for saved in tensors)
    pairs = checked_names(edits, own, there) if edits is not None else {name: name for name in there if name in own}
    if not pairs:
        message = "the adapter has no edit by the name of one of the model"
        help_ = (
            f"the adapter has {join_names(list(there))}, the model {join_names(sorted(own))}: say which with `edits`"
        )
        raise PeftcError(Diagnostic("P532", message, help=help_))
    part = re.compile("(?!)" if task is None else rf"\.tasks\.{re.escape(record.task.of(task))}(?=[./])")
    wanted: dict[str, list[Tensor]] = {}  # several edits may begin as one
    for saved, value in {**parameters(model), **states(model)}.items():
        name, _, rest = saved.partition("/")
        if name in pairs and task is not None and ".tasks." not in rest:
            message = f"`{name}` has parts that are common to all tasks, and would change for all of them"
            raise PeftcError(Diagnostic("P525", message, help="leave it out of `edits`"))
        if name in pairs and (task is None or part.search(rest)):
            rest = re.sub(rf"^{re.escape(name)}(?=\.[^/]*/)", pairs[name], part.sub("", rest))
            wanted.setdefault(f"{pairs[name]}/{rest}", []).append(value)
    found = {saved: tensor for saved, tensor in tensors.items() if saved.partition("/")[0] in pairs.values()}
    for i in range(max(map(len, wanted.values()), default=1)):
        shapes = {saved: values[min(i, len(values) - 1)] for saved, values in wanted.items()}
        alone = task is None and any(".tasks." in n for n in shapes) and not any(".tasks." in n for n in found)
        help_ = f'say which task begins so: task="{record.task.names[0]}"' if alone else None
        check_tensors(
            found, shapes, f"what is saved in {directory} does not fit {join_names(pairs)} of the model", help_
        )
    copy_all(((value, found[saved]) for saved, values in wanted.items() for value in values), partial(reload, model))
    return tuple(pairs)


def reload(model: nn.Module) -> None:
    """Tells forms that their values are others."""
    for form in model.modules():
        if isinstance(form, FormModule):
            form.loaded()


def checked_names(
    edits: Mapping[str, str], own: Iterable[str], there: Iterable[str] | None = None
) -> Mapping[str, str]:
    """From edits of a model to those of an adapter. Raises: P532 where one of them is not there, P545 for anything else."""
    if not isinstance(edits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"`edits` is a dictionary, from edits of the model to those of the adapter; found {edits!r}"
        raise PeftcError(Diagnostic("P545", message, help='edits={"mine": "theirs"}'))
    theirs = edits.values() if there is None else there  # not known yet
    for names, known, where in ((edits, tuple(own), "model"), (edits.values(), tuple(theirs), "adapter")):
        for name in names:
            if name not in known:
                help_ = did_you_mean(name, known) or f"the {where} has {join_names(sorted(known))}"
                raise PeftcError(Diagnostic("P532", f"the {where} has no edit `{name}`", help=help_))
    return edits
