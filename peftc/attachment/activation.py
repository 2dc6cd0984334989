"""Which attached adapter acts: one for all calls, one inside a block, or one for each row."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from peftc.concurrency.context import NO_ADAPTER, Choice, ChoiceBlock, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.completeness import complete_installation
from peftc.installation.disable import prepare_variants
from peftc.installation.record import Installation, installation_of


def attached(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that are attached to a model.

    Args:
        model: a compiled model.

    Raises:
        PeftcError: P410 (not compiled).
    """
    return installation_of(model).adapter.names


def activate(model: nn.Module, name: str | None) -> nn.Module:
    """Lets an attached adapter act outside of `peftc.adapter` blocks, until this is called again.

    It is a property of the model, not of a context: all threads see it, and copies have it. The
    specs that were compiled or loaded go on acting.

    Args:
        model: a compiled model.
        name: of the adapter; None for no adapter.

    Returns:
        The model.

    Raises:
        PeftcError: P410 (not compiled), P432 as `peftc.disabled`, P436 (an edited module was
            replaced), P547 (no adapter of that name).
    """
    record = complete_installation(model)
    if name is not None:
        record.group(name)
    choice = replace(record.choice.default, adapter=name)
    prepare_variants(model, record, choice)
    record.choice.set_default(choice)
    return model


def adapter(
    model: nn.Module, name: str | None = None, *, rows: Sequence[str | None] | None = None
) -> ChoiceBlock:
    """Inside the block an attached adapter acts, or another one on each row of a batch.

    Rows of several adapters go through the edits of their own in one forward. The adapters of one
    spec are computed at once, with stacked parameters; adapters of different specs, or of
    different ranks, one spec after the other. A row is as with its adapter alone. `generate` may
    repeat rows (beams).

    Edits of weights are the same for all rows of a batch, and keys or tokens are added to all rows
    or to none: `rows` refuses both (P536).

    The block acts in the present context, as that of `peftc.task`.

    Args:
        model: a compiled model.
        name: of the adapter; None for no adapter.
        rows: instead of a name: for each row of the batch the name of its adapter, or None.

    Returns:
        A context manager.

    Raises:
        PeftcError: P410 (not compiled), P431 (the block is left in another context), P432 as
            `peftc.disabled`, P436 (an edited module was replaced), P547 (no adapter of that name),
            P548 (`rows` are no names of adapters, or both `name` and `rows` are there).
    """
    record = complete_installation(model)
    if name is not None and rows is not None:
        raise PeftcError(Diagnostic("P548", "an adapter is chosen by its name, or by `rows`", help="leave one out"))
    if rows is None:
        choice = Choice(adapter=known_name(record, name))
    else:
        choice = Choice(adapter=rows_of(record, rows))
    prepare_variants(model, record, record.choice.get().then(choice))
    return ChoiceBlock(model, record.choice, choice)


def rows_of(record: Installation, rows: Sequence[str | None]) -> Rows:
    """The number of the adapter of each row. Raises: P547, P548."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence) or not rows:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`rows` has the name of an adapter, or None, for each row of the batch; it is {rows!r}"
        raise PeftcError(Diagnostic("P548", message, help="peftc.adapter(model, name) is for all rows"))
    names = [known_name(record, name) for name in rows]
    numbers = {name: number for number, name in enumerate((*record.adapter.names, NO_ADAPTER))}
    return Rows(torch.tensor([numbers[name] for name in names]), tuple(numbers), tuple(dict.fromkeys(names)))


def known_name(record: Installation, name: str | None) -> str:
    """The name of an adapter, or of the base. Raises: P547."""
    if name is not None:
        record.group(name)
    return NO_ADAPTER if name is None else name
