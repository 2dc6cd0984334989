"""Which attached adapter acts: one for all calls, one inside a block, or one for each row."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from peftc.concurrency.context import NO_ADAPTER, Choice, ChoiceBlock, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equations.definition import TextForm
from peftc.forms.shapes import KeyValue, Vector, Weight
from peftc.installation.completeness import complete_installation
from peftc.installation.disable import prepare_variants
from peftc.installation.record import Installation, InstalledSpec, installation_of
from peftc.modules.base_values import one_value
from peftc.planning import ir

ADAPTER = "{adapter}"  # stands for the name of an adapter


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


def adapter(model: nn.Module, name: str | None = None, *, rows: Sequence[str | None] | None = None) -> ChoiceBlock:
    """Inside the block an attached adapter acts, or another one on each row of a batch.

    Rows of several adapters go through the edits of their own in one forward. The adapters of one
    spec are computed at once, with stacked parameters; adapters of different specs, or of
    different ranks, one spec after the other. A row is as with its adapter alone. `generate` may
    repeat rows (beams).

    Edits of weights are the same for all rows of a batch, as are trained parameters of the base,
    and keys or tokens are added to all rows or to none: rows of different adapters with such edits
    are refused (P536).

    The block acts in the present context, as that of `peftc.task`.

    Args:
        model: a compiled model.
        name: of the adapter; None for no adapter.
        rows: instead of a name: for each row of the batch the name of its adapter, or None.

    Returns:
        A context manager.

    Raises:
        PeftcError: P410 (not compiled), P431 (the block is left in another context), P432 as
            `peftc.disabled`, P436 (an edited module was replaced), P536 (see above), P547 (no
            adapter of that name), P548 (`rows` are no names of adapters, or both `name` and `rows`
            are there).
    """
    record = complete_installation(model)
    if name is not None and rows is not None:
        raise PeftcError(Diagnostic("P548", "an adapter is chosen by its name, or by `rows`", help="leave one out"))
    choice = Choice(adapter=known_name(record, name) if rows is None else adapter_of(record, rows))
    prepare_variants(model, record, record.choice.get().then(choice))
    return ChoiceBlock(model, record.choice, choice)


def adapter_of(record: Installation, rows: Sequence[str | None]) -> str | Rows:
    """The adapter of each row, or the one of all rows. Raises: P536, P547, P548."""
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence) or not rows:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`rows` has the name of an adapter, or None, for each row of the batch; it is {rows!r}"
        raise PeftcError(Diagnostic("P548", message, help="peftc.adapter(model, name) is for all rows"))
    names = [known_name(record, name) for name in rows]
    present = tuple(dict.fromkeys(names))
    if len(present) == 1:
        return present[0]
    require_edits_of_rows(record, present)
    numbers = record.adapter.numbers
    return Rows(torch.tensor([numbers[name] for name in names]), record.adapter.names_of_rows, present)


def require_edits_of_rows(record: Installation, present: Sequence[str]) -> None:
    """Raises: P536 for edits that act on a batch as a whole, where rows have these adapters."""
    for saved, parameter in record.adapter_parameters.items():
        edit = saved.partition("/")[0]
        if record.owner(edit).adapters.keys() & set(present):
            raise PeftcError(one_value(edit, parameter))
    if record.edits_of_batch is None:
        record.edits_of_batch = [(spec, [*dict.fromkeys(edits_of_batch(record, spec))]) for spec in record.specs]
    for group, edits in record.edits_of_batch:
        if edits and group.adapters.keys() & set(present):
            edit = next(name for name in group.adapters if name in present)
            for action, is_for_all in edits:
                if is_for_all or set(present) - {*group.adapters}:
                    help_ = "put the rows with it into a batch of their own"
                    raise PeftcError(Diagnostic("P536", action.replace(ADAPTER, f"`{edit}`"), help=help_))


def edits_of_batch(record: Installation, group: InstalledSpec) -> Iterator[tuple[str, bool]]:
    """What edits of attached adapters do to a batch as a whole, and whether also where all its rows
    have adapters of this spec.
    """
    own = frozenset(group.edits if group.adapters else ())
    for one in (one for one in record.planned.site_edits.representatives if one.edit in own):
        targets = [instance.dims.target for instance in one.instances]
        if any(isinstance(target, Weight | Vector) for target in targets):
            state = f"{one.site.path}.{one.assigns[0].state}"
            yield f"a batch has one weight, and {ADAPTER} edits `{state}`", True
        elif any(isinstance(one.form, TextForm) and one.form.joins_rows for one in one.instances):
            yield f"{ADAPTER} computes means over all rows of a batch, and some have another adapter", True
        elif any(map(is_of_whole_batch, one.assigns)):
            yield f"{ADAPTER} adds keys or tokens to all rows of a batch, and some have another adapter", False


def is_of_whole_batch(assign: ir.Assign) -> bool:
    """Whether an equation adds keys or tokens, or changes keys and values."""
    terms = list(ir.subterms(assign.value))
    return isinstance(assign.value.shape, KeyValue) or any(isinstance(term, ir.Concat) for term in terms)


def known_name(record: Installation, name: str | None) -> str:
    """The name of an adapter, or of the base. Raises: P547."""
    if name is None:
        return NO_ADAPTER
    if not isinstance(name, str) or not name or name not in record.adapter.numbers:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        record.group(name)
    return name
