"""A compiled model some or all of whose edits do not act: in a context, or until they are switched on again."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from peftc.concurrency.context import ALL, Choice, ChoiceBlock
from peftc.installation.overlay import check_readable
from peftc.installation.presence import complete_installation
from peftc.installation.record import Installation


def disabled(model: nn.Module, name: str | None = None) -> ChoiceBlock:
    """Inside the block the model computes what the base computes; parameters of edits are kept.

    That holds in the present context alone: other threads and coroutines have their own. A thread that is to have it is
    started with `contextvars.copy_context().run`. `save_pretrained` writes the base; `state_dict()`, `named_parameters()` and
    copies are those of the model, with all that it has. Copies are not in the block.

    Args: `name`: of one spec; the others go on acting.
    Raises: P410 for a model that is not compiled, P413 where it has no spec of that name, P431 for a block that is left in another
    context, P432 for a base parameter that is trained and whose first value a module would not see, P436 where an edited module
    was replaced.
    """
    record = complete_installation(model)
    off = edits_of(record, name)
    prepare(model, record, record.choice.get().then(Choice(off)))
    return ChoiceBlock(model, record.choice, Choice(off))


def set_enabled(model: nn.Module, enabled: bool, name: str | None = None) -> nn.Module:
    """Switches the edits of a spec on or off for all contexts, until this is called again. Copies are switched as the model is.

    Inside of a `disabled` block they do not act in any case. A saved adapter does not say it.

    Args: `name`: of one spec; all without it.
    Raises: P410 for a model that is not compiled, P413 where it has no spec of that name, P432 and P436 as `disabled`.
    """
    record = complete_installation(model)
    now, edits = record.choice.default.off, edits_of(record, name)
    if enabled:
        every = edits_of(record, None) - {ALL} if ALL in now else now
        off = frozenset[str]() if name is None else every - edits
    else:
        off = now | edits
    choice = replace(record.choice.default, off=off)
    prepare(model, record, choice)
    record.choice.default = choice
    return model


def edits_of(record: Installation, name: str | None) -> frozenset[str]:
    """Those of one spec; `ALL` and those that there are where it is None."""
    names = frozenset(edit for part in record.selected(name) for edit in part.edits)
    return names if name is not None else names | {ALL}


def prepare(model: nn.Module, record: Installation, choice: Choice) -> None:
    """Makes the forwards of a choice, so that compiled code has them."""
    if choice.key:
        off = choice.off
        trained = {n: saved.partition("/")[0] for saved, n in record.trained.items()}
        if names := [n for n, edit in trained.items() if ALL in off or edit in off]:
            check_readable(model, names)
        for kind in {id(kind): kind for _, kind in record.regions}.values():
            kind.without(choice.key)
