"""Initializes edits of a compiled model from a saved adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike

from torch import Tensor, nn

from peftc.adapters.files import path_of, read
from peftc.adapters.loading import check_base, check_tensors, notify_forms
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters, states
from peftc.installation.journal import copy_all


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
    pairs = ((value, selected[name]) for name, values in targets.items() for value in values)
    copy_all(pairs, partial(notify_forms, model))
    return tuple(names)


def check_edit_names(
    edits: Mapping[str, str], own: Iterable[str], saved: Iterable[str] | None = None
) -> Mapping[str, str]:
    """Checks a mapping from edits of a model to those of an adapter; `saved` is None if unknown.

    Raises: P532 for unknown edits, P545 for anything but a mapping.
    """
    if not isinstance(edits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"`edits` is a dictionary, from edits of the model to those of the adapter; found {edits!r}"
        raise PeftcError(Diagnostic("P545", message, help='edits={"mine": "theirs"}'))
    saved = edits.values() if saved is None else saved
    for names, known, owner in ((edits, tuple(own), "model"), (edits.values(), tuple(saved), "adapter")):
        for name in names:
            if name not in known:
                help_ = did_you_mean(name, known) or f"the {owner} has {join_names(sorted(known))}"
                raise PeftcError(Diagnostic("P532", f"the {owner} has no edit `{name}`", help=help_))
    return edits
