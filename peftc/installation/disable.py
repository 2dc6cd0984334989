"""Switching edits of a compiled model off: in a context, or until they are switched on again."""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from torch import nn

from peftc.concurrency.context import ALL, Choice, ChoiceBlock
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.completeness import complete_installation
from peftc.installation.edited_classes import true_parameter
from peftc.installation.record import Installation


def disabled(model: nn.Module, name: str | None = None) -> ChoiceBlock:
    """Inside the block the model computes what the base computes. Parameters of edits are kept.

    The block acts in the present context: other threads and coroutines are not in it. To start a
    thread inside of it, use `contextvars.copy_context().run`. `save_pretrained` writes the base;
    `state_dict()`, `named_parameters()` and copies are complete, and copies are not in the block.

    Args:
        model: a compiled model.
        name: of one spec; the others go on acting. By default all are switched off.

    Returns:
        A context manager.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P431 (the block is left in
            another context), P432 (a module would not see the first value of a base parameter that
            is trained), P436 (an edited module was replaced).
    """
    record = complete_installation(model)
    off = edits_of(record, name)
    prepare_variants(model, record, record.choice.get().then(Choice(off)))
    return ChoiceBlock(model, record.choice, Choice(off))


def set_enabled(model: nn.Module, enabled: bool, name: str | None = None) -> nn.Module:
    """Switches the edits of a spec on or off in all contexts, until this is called again.

    Copies keep the switch; saved adapters do not. Inside of a `disabled` block edits are off.

    Args:
        model: a compiled model.
        enabled: whether the edits act.
        name: of one spec; by default all.

    Returns:
        The model.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P432 and P436 as `disabled`.
    """
    record = complete_installation(model)
    off, edits = record.choice.default.off, edits_of(record, name)
    if not enabled:
        off |= edits
    else:
        by_name = edits_of(record, None) - {ALL} if ALL in off else off
        off = frozenset[str]() if name is None else by_name - edits
    choice = replace(record.choice.default, off=off)
    prepare_variants(model, record, choice)
    record.choice.default = choice
    return model


def edits_of(record: Installation, name: str | None) -> frozenset[str]:
    """The edits of one spec; all of them, and `ALL`, where it is None."""
    names = frozenset(edit for part in record.selected(name) for edit in part.edits)
    return names if name is not None else names | {ALL}


def prepare_variants(model: nn.Module, record: Installation, choice: Choice) -> None:
    """Makes the forwards of a choice ahead of time: compiled code cannot make them."""
    if choice.key:
        off = choice.off
        trained = {n: saved.partition("/")[0] for saved, n in record.trained.items()}
        if names := [n for n, edit in trained.items() if ALL in off or edit in off]:
            check_readable(model, names)
        for generated in {id(generated): generated for _, generated in record.regions}.values():
            generated.without(choice.key)


def check_readable(model: nn.Module, names: Iterable[str]) -> None:
    """Raises: P432 for a parameter that is read from a list, as recurrent modules do."""
    trained = {id(true_parameter(model, n)): n for n in names}
    for name, module in model.named_modules() if trained else ():
        for attribute, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else ()
            if parameter := next((trained[id(p)] for p in cast(Iterable[object], items) if id(p) in trained), None):
                reader = f"{type(module).__name__} `{name}`"
                message = f"`{parameter}` is trained, and {reader} reads it from its `{attribute}`"
                raise PeftcError(Diagnostic("P432", message, help="compare with a copy: peftc.remove(deepcopy(model))"))
