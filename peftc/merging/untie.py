"""Gives tied matrices tensors of their own, so that an edit of one leaves the other."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.merging.base_model import BaseModel
from peftc.merging.checkpoint import placeholder
from peftc.merging.keys import key_groups, meta
from peftc.merging.layout import Changes
from peftc.models.skeleton import meta_model

OPTION = "tie_word_embeddings"


def untie(base: BaseModel, trained: Collection[str], changes: Changes) -> None:
    """Unties what the model of an untied configuration has apart. Values that `train` has changed
    are common to both uses, and stay tied. Raises: P545 where nothing is tied.
    """
    config: Any = deepcopy(base.source.config)
    options = {OPTION: False}
    for one in {id(c): c for c in (config, config.get_text_config())}.values():
        setattr(one, OPTION, False)
    model: Any = meta_model(replace(base.source, config=config))
    apart = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for group in [names for names in base.names.values() if len(names) > 1]:
        if not set(group).isdisjoint(trained):
            continue
        first = base.first(group[0])
        assert first is not None
        others = [name for name in group if apart.get(name) != apart.get(first)]
        for name in dict.fromkeys(next(n for n in others if apart[n] == apart[other]) for other in others):
            _add_tensor(base, first, [n for n in others if apart[n] == apart[name]], model, changes)
    if not changes.added:
        message = f"no parameters of {base.source.id} can be untied"
        raise PeftcError(Diagnostic("P545", message, help="leave out `untie`"))
    for one in (base.model.config, base.model.config.get_text_config()):
        setattr(one, OPTION, False)
    changes.configuration |= options


def _add_tensor(base: BaseModel, first: str, names: list[str], model: Any, changes: Changes) -> None:
    """A tensor of their own for some names of a parameter, with its values. Its key is a name."""
    old, source = base.parameters[first], base.groups[first]
    shape = {name: meta(old.shape, old.dtype) for name in names}
    key = next((n for n in names if [g.names for g in key_groups(model, {n: shape[n]})[0]] == [(n,)]), None)
    if source.converter is not None or key is None:
        return
    base.checkpoint.add_alias(key, source.keys[0])
    entry = base.checkpoint.entries[key]
    base.shapes[key] = shape[key]
    base.groups[key] = type(source)((key,), (key,), base.model)
    changes.added[key] = (entry.file, (entry.dtype, entry.shape))
    new = nn.Parameter(placeholder(old.shape, old.dtype), old.requires_grad)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        base.model.get_submodule(owner)._parameters[attribute] = new
        base.parameters[name] = new
        base.names[id(old)].remove(name)
        base.names[id(new)].append(name)
