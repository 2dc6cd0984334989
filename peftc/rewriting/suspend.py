"""A compiled model some or all of whose edits do not act for a while."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from torch import nn

from peftc.rewriting.install import put_back
from peftc.rewriting.kind import Kind
from peftc.rewriting.record import Installation, installed

IGNORED = "_keys_to_ignore_on_save"  # transformers' name
_ABSENT = object()


@contextmanager
def suspended(model: nn.Module, name: str | None = None) -> Generator[nn.Module]:
    """Inside the block the edits of the spec `name` (of all where it is None) do not act; what `train` of it has changed
    has its first value. Blocks may stand in each other. `save_pretrained` leaves out what does not act.
    """
    record = installed(model)
    before, saved = record.off, vars(model).get(IGNORED, _ABSENT)
    switch(model, record, before | {edit for part in record.chosen(name) for edit in part.edits})
    leave_out(model, record)
    try:
        yield model
    finally:
        switch(model, record, before)
        vars(model).pop(IGNORED, None)
        vars(model).update({} if saved is _ABSENT else {IGNORED: saved})


def leave_out(model: nn.Module, record: Installation) -> None:
    """Tells transformers not to save what belongs to edits that are switched off."""
    keys = getattr(model, IGNORED, None) or ()
    off = [place for name, place in record.places.items() if name.partition("/")[0] in record.off]
    vars(model)[IGNORED] = {
        *keys,
        *(k for place in off for k in model.get_submodule(place).state_dict(prefix=f"{place}.")),
    }


def switch(model: nn.Module, record: Installation, off: frozenset[str]) -> None:
    """Lets all edits act but those in `off`."""
    standing_in = stand_ins(record, off)
    for (name, kind), other in zip(record.regions, standing_in, strict=True):
        model.get_submodule(name).__class__ = kind.base if other is None else other.cls
    exchange(model, record, off ^ record.off)
    record.off = off


def stand_ins(record: Installation, off: frozenset[str]) -> list[Kind | None]:
    """The kind of each region without the edits in `off`; None where no edit is left."""
    if off not in record.partial:
        made: dict[int, Kind | None] = {}
        for _, kind in record.regions:
            if id(kind) not in made:
                made[id(kind)] = without(kind, off)
        record.partial[off] = [made[id(kind)] for _, kind in record.regions]
    return record.partial[off]


def without(kind: Kind, off: Collection[str]) -> Kind | None:
    left = tuple(edit for edit in kind.edits if edit.edit not in off)
    if len(left) == len(kind.edits):
        return kind
    return Kind(kind.base, kind.inline, left, kind.name, kind.absent) if left else None


def exchange(model: nn.Module, record: Installation, edits: Collection[str]) -> None:
    """Exchanges the values that `train` of these edits has made for those that were there before, or back."""
    for saved, name in record.trained.items():
        if saved.partition("/")[0] in edits:
            parameter, value = model.get_parameter(name), record.originals[name]
            record.originals[name] = parameter.detach().clone()
            with torch.no_grad():
                put_back(parameter, value)
