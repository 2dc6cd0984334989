"""Folding prefixes and prompts into a state: what a model is given along with its input, without any edit in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.weights import Folding
from peftc.forms.module import FormModule, Pair
from peftc.forms.shapes import KeyValue, Tokens
from peftc.planning import ir
from peftc.rewriting.positions import picks
from peftc.runtime.call_arguments import starts_of
from peftc.runtime.prompts import insert_rows

PAST, MASK, POSITIONS, EMBEDS = "past_key_values", "attention_mask", "position_ids", "inputs_embeds"
USE = "use_cache"


@dataclass
class State:
    """What takes the place of edits that add keys and values, or tokens: the seed of a cache, or embedded tokens.

    `seed`: keys and values of each layer, (kv_heads, len, d_head) each. `tokens`: (len, d). `refused`: the edits that stay, with
    the reasons.
    """

    model: nn.Module
    folded: tuple[str, ...]
    refused: dict[str, str]
    seed: list[Pair] = field(default_factory=list[Pair])
    tokens: Tensor | None = None

    def cache(self, batch: int) -> Cache:
        """A new cache that begins with the seed, for so many rows: those of the batch times the beams."""
        cache = DynamicCache(config=cast(Any, self.model).config)
        for layer, pair in enumerate(self.seed):
            key, value = (part.unsqueeze(0).repeat(batch, 1, 1, 1) for part in pair)
            cache.update(key, value, layer)
        return cache

    def inputs(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, beams: int = 1) -> dict[str, Any]:
        """The arguments of `generate` (or of one forward) for tokens: with them it computes what it computed with the edits.

        A cache is used up by one call: ask again for the next. With embedded tokens `generate` returns the new tokens alone,
        and a forward gives the rows of the prompt, too. A seed is in the cache, so it is used, whatever the configuration says:
        without `use_cache`, transformers would put all tokens into it again at each step.

        Args: `beams`: of `generate`, as `num_beams`.
        Shapes: input_ids and attention_mask (batch, tokens).
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.tokens is not None:
            table: Any = cast(Any, self.model).get_input_embeddings()
            embedded = table(input_ids)
            starts, ones = starts_of(mask), mask.new_ones(len(self.tokens))
            rows = self.tokens.to(embedded.dtype)
            return {EMBEDS: insert_rows(rows, embedded, starts), MASK: insert_rows(ones, mask, starts)}
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        count = self.seed[0][0].shape[1]
        given = {"input_ids": input_ids, MASK: _longer(mask, count), POSITIONS: positions, USE: True}
        return {**given, PAST: self.cache(len(input_ids) * beams)}


def fold_into_state(
    model: nn.Module, only: Iterable[str] | None, name: str | None, sample: Mapping[str, Any] | None
) -> State:
    """Takes prefixes and prompts out of a model and gives them as a state.

    A seed has the same number of keys in every layer, since the model asks its cache once how many tokens it has seen; and
    positions are counted by hand, so that the tokens keep theirs. Raises: as `fold`; P538 where none of the edits is such a
    state.
    """
    folding = Folding(model, only, name, sample)
    places: dict[str, list[ir.SiteEdit]] = {}
    for placed in folding.record.site_edits:
        places.setdefault(placed.edit, []).append(placed)
    asked = {edit: found for edit, found in places.items() if edit not in folding.others}
    reasons = {edit: reason for edit, found in asked.items() if (reason := _why_not(found, folding)) is not None}
    good = {edit: found for edit, found in asked.items() if edit not in reasons}
    if len(good) > 1:
        first, *more = good
        reasons |= dict.fromkeys(more, f"`{first}` is the state already")
        good = {first: good[first]}
    if not good:
        notes = tuple(f"`{edit}`: {reason}" for edit, reason in reasons.items())
        raise PeftcError(Diagnostic("P538", "no edit of the model is a state", notes=notes))
    ((edit, found),) = good.items()
    with torch.no_grad():
        made = _tokens(found[0], folding) if _is_prompt(found[0]) else _seed(found, folding)
    folding.commit([edit], into_weights=False)
    stays = {e: reasons.get(e, "it was not asked for") for e in folding.names if e != edit}
    if isinstance(made, Tensor):
        return State(model, (edit,), stays, tokens=made)
    return State(model, (edit,), stays, seed=made)


def _why_not(found: list[ir.SiteEdit], folding: Folding) -> str | None:
    for placed in found:
        value = placed.assigns[0].value
        if len(placed.assigns) != 1 or not isinstance(value, ir.Concat) or not _rows_first(value):
            return "it does more than to put trained rows before `kv`, or before the tokens"
        if any(one.tasks for one in placed.instances):
            return "it has parameters for each task"
    counting = next((p.edit for p in folding.record.site_edits if any(map(picks, p.instances))), None)
    if counting is not None:
        return f"`{counting}` counts the tokens before those of the input, too"
    config = getattr(folding.model, "config", None)
    if _is_prompt(found[0]):
        return None if len(found) == 1 else "it stands before the tokens of two stacks"
    if getattr(config, "is_encoder_decoder", False):
        return "the caches of an encoder-decoder model are made by its own code"
    if any(placed.site.group.rpartition(".")[2] != "self" for placed in found) or _numbers(found, folding) is None:
        return "not every layer has one such prefix, in a cache"
    lengths = {_length(placed) for placed in found}
    if len(lengths) > 1:
        return f"layers have prefixes of different lengths ({', '.join(map(str, sorted(lengths)))})"
    cache: Any = DynamicCache(config=config)
    if any(layer.is_sliding for layer in cache.layers) or getattr(config, "alibi", False):
        return "the model forgets, or weighs, keys by their distance, and a prefix has none"
    return None


def _numbers(found: list[ir.SiteEdit], folding: Folding) -> list[int] | None:
    """The numbers under which the layers are in a cache; None where they are not all of them, or others."""
    modules = [folding.model.get_submodule(placed.site.module) for placed in found]
    numbers: list[Any] = [getattr(module, "layer_idx", None) for module in modules]
    config: Any = getattr(folding.model, "config", None)
    count: int = getattr(config, "num_hidden_layers", 0)
    return numbers if POSITIONS in folding.inputs and numbers == list(range(count)) else None


def _rows_first(value: ir.Concat) -> bool:
    *rows, own = value.parts
    return isinstance(own, ir.Read) and all(isinstance(r, ir.FormCall) and r.input is None for r in rows)


def _is_prompt(placed: ir.SiteEdit) -> bool:
    return isinstance(placed.assigns[0].value.shape, Tokens)


def _length(placed: ir.SiteEdit) -> int:
    return sum(int(cast(int, one.args["len"])) for one in placed.instances)


def _modules(placed: ir.SiteEdit, folding: Folding) -> list[FormModule]:
    """The forms of the rows, in the order of the equation."""
    value = placed.assigns[0].value
    assert isinstance(value, ir.Concat)
    keys = [part.instance.key for part in value.parts if isinstance(part, ir.FormCall)]
    modules = folding.modules(placed)
    return [modules[key] for key in keys]


def _seed(found: list[ir.SiteEdit], folding: Folding) -> list[Pair]:
    pairs: list[Pair] = []
    for placed in found:
        shape = placed.assigns[0].value.shape
        assert isinstance(shape, KeyValue)
        weight = next(folding.model.get_submodule(placed.site.module).parameters())
        like = weight.new_empty(1, shape.kv_heads, 1, shape.d_head)
        made = [cast(Pair, module(like)) for module in _modules(placed, folding)]
        key, value = (torch.cat([pair[i][0] for pair in made], 1).detach().clone() for i in (0, 1))
        pairs.append((key, value))
    return pairs


def _tokens(placed: ir.SiteEdit, folding: Folding) -> Tensor:
    like = next(folding.model.get_submodule(placed.site.module).parameters())
    return torch.cat([cast(Tensor, module(like)) for module in _modules(placed, folding)]).detach().clone()


def _longer(mask: Tensor, count: int) -> Tensor:
    return torch.cat([mask.new_ones(len(mask), count), mask], 1)
