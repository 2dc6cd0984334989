"""`peftc.fold`: into the weights of the base, into a wider ffn, or into a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.ffn_width import fold_and_widen
from peftc.folding.report import FoldReport
from peftc.folding.weights import NOT_SELECTED, Folding
from peftc.forms.module import Pair
from peftc.forms.shapes import KeyValue
from peftc.installation.record import installation_of, refuse_passes
from peftc.models.samples import joint_sample
from peftc.planning import ir
from peftc.planning.on_table import is_prompt
from peftc.rewriting.edits import row_count
from peftc.runtime.positions import starts_of
from peftc.runtime.prompts import insert_rows
from peftc.tracing.module_calls import forward_signature

PAST, MASK, POSITIONS, EMBEDS = "past_key_values", "attention_mask", "position_ids", "inputs_embeds"
USE = "use_cache"


@overload
def fold(
    model: nn.Module,
    *,
    into: Literal["weights"] = "weights",
    only: Iterable[str] | None = None,
    name: str | None = None,
    dequantize: bool = False,
    widen: bool = False,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> FoldReport: ...
@overload
def fold(
    model: nn.Module,
    *,
    into: Literal["state"],
    only: Iterable[str] | None = None,
    name: str | None = None,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> State: ...
def fold(
    model: nn.Module,
    *,
    into: Literal["weights", "state"] = "weights",
    only: Iterable[str] | None = None,
    name: str | None = None,
    dequantize: bool = False,
    widen: bool = False,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> FoldReport | State:
    """Folds what folds into the weights of the base, in place; the other edits go on working.

    W' = W + (α/r) B A for LoRA, and so on for every equation that is affine in what a Linear reads:
    sums in float32 (float64), rounded once. Folded edits are gone from the model; values that
    `train` changed stay. When all edits are folded, the model is one without edits, with the
    `requires_grad` it had before `compile`.

    `into="state"`: a prefix becomes the seed of a cache, a prompt embedded tokens. The `State` that
    is returned makes the arguments of `generate` with them, and the model is without that edit.

    Args:
        model: a compiled model.
        into: "weights" or "state".
        only: the names of the edits to fold, all of which must fold.
        name: of one spec of the model; the edits of others stay.
        dequantize: a quantised weight (torchao) is written out in full and folded into. Without it,
            an edit that would change one is refused.
        widen: a bottleneck that reads `x` beside an ffn without a gate, with the ffn's own
            activation or none, becomes hidden units of the ffn: r of them, or 2r without an
            activation, since act(z) − act(−z) = z for relu, gelu and silu. The configuration
            follows where all ffns grow alike. With `widen` and `only`, what does not fold is
            reported, not raised.
        sample: as in `compile`.
        samples: as in `compile`.

    Returns:
        The edits that were folded, with the entries changed in each parameter, and those refused,
        with the sub-expression that prevents it. With `into="state"`, the state.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P527 (no weights), P529
            (switched off), P530 (NaN or infinite entries), P531 and P532 (`only`), P538 (no state),
            P545 (arguments), P446 (a pass), P546 (no room for the old weights). After an error or
            an interrupt the model is as it was.
    """
    if into not in ("weights", "state"):
        message = f'edits are folded into "weights" or into a "state", not into {into!r}'
        raise PeftcError(Diagnostic("P545", message, help="what is folded into the weights cannot be taken out again"))
    if into == "state" and (dequantize or widen):
        message = f"`{'widen' if widen else 'dequantize'}` is for folds into weights, and a state touches none"
        raise PeftcError(Diagnostic("P545", message, help="leave it out, or fold the other edits in a second call"))
    refuse_passes(installation_of(model), "folding needs to know what is between an edit and its weight")
    sample = joint_sample(sample, samples)
    if into == "state":
        return fold_into_state(model, only, name, sample)
    if widen:
        return fold_and_widen(model, only, name, sample, dequantize)
    return Folding(model, only, name, sample, dequantize).run()


@dataclass
class State:
    """Takes the place of an edit that adds keys and values, or tokens.

    Attributes:
        model: the model, now without the edit.
        folded: the name of the edit.
        refused: the edits that stay, with the reasons.
        seed: keys and values of each layer, for a prefix.
        tokens: embedded tokens, for a prompt.

    Shapes:
        seed: (kv_heads, len, d_head), keys and values of each layer
        tokens: (len, d)
    """

    model: nn.Module
    folded: tuple[str, ...]
    refused: dict[str, str]
    seed: list[Pair] = field(default_factory=list[Pair])
    tokens: Tensor | None = None

    def cache(self, batch: int) -> Cache:
        """A new cache that begins with the seed.

        Args:
            batch: rows of the batch times beams.
        """
        cache = DynamicCache(config=cast(Any, self.model).config)
        for layer, pair in enumerate(self.seed):
            key, value = (part.unsqueeze(0).repeat(batch, 1, 1, 1) for part in pair)
            cache.update(key, value, layer)
        return cache

    def inputs(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, beams: int = 1) -> dict[str, Any]:
        """Arguments of `generate`, or of one forward, that stand in for the edit.

        A cache is used up by one call: call this again for the next. With a prompt, `generate`
        receives embeddings, so it returns only the new tokens, and a forward returns the rows of
        the prompt, too. A seed sets `use_cache`, whatever the configuration says: without it,
        transformers would put all tokens into the cache again at each step.

        Args:
            input_ids: the tokens.
            attention_mask: 0 for padding; by default there is none.
            beams: of `generate`, as `num_beams`.

        Shapes:
            input_ids, attention_mask: (batch, tokens)
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.tokens is not None:
            table: Any = cast(Any, self.model).get_input_embeddings()
            embedded = table(input_ids)
            starts, ones = starts_of(mask), mask.new_ones(len(self.tokens))
            rows = self.tokens.to(embedded.dtype)
            return {EMBEDS: insert_rows(rows, embedded, starts), MASK: insert_rows(ones, mask, starts)}
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        longer = torch.cat([mask.new_ones(len(mask), self.seed[0][0].shape[1]), mask], 1)
        cache = self.cache(len(input_ids) * beams)
        return {"input_ids": input_ids, MASK: longer, POSITIONS: positions, USE: True, PAST: cache}


def fold_into_state(
    model: nn.Module, only: Iterable[str] | None, name: str | None, sample: Mapping[str, Any] | None
) -> State:
    """Takes prefixes and prompts out of a model and returns them as a state.

    A seed has the same number of keys in every layer: the model reads the length of its cache only
    once. `State.inputs` computes positions, so that tokens keep theirs. Raises: P538.
    """
    folding = Folding(model, only, name, sample)
    selected = {edit: sites for edit, sites in folding.places.items() if edit not in folding.others}
    reasons = {edit: reason for edit, sites in selected.items() if (reason := refusal(sites, folding)) is not None}
    edits = [edit for edit in selected if edit not in reasons]
    if not edits:
        notes = tuple(f"`{edit}`: {reason}" for edit, reason in reasons.items())
        raise PeftcError(Diagnostic("P538", "no edit of the model is a state", notes=notes))
    edit, *others = edits
    reasons |= dict.fromkeys(others, f"`{edit}` is the state already")
    refused = {e: reasons.get(e, NOT_SELECTED) for e in folding.names if e != edit}
    sites, state = selected[edit], State(model, (edit,), refused)
    with torch.no_grad():
        if is_prompt(sites[0]):
            like = next(model.get_submodule(sites[0].site.module).parameters())
            state.tokens = torch.cat(_rows(sites[0], folding, like)).detach().clone()
        else:
            state.seed = _seed(sites, folding)
    folding.commit([edit], into_weights=False)
    return state


def refusal(sites: list[ir.SiteEdit], folding: Folding) -> str | None:
    """Why an edit cannot become a state; None if it can."""
    for one in sites:
        *rows, own = value.parts if isinstance((value := one.assigns[0].value), ir.Concat) else (value,)
        is_trained = all(isinstance(row, ir.FormCall) and row.input is None for row in rows)
        if len(one.assigns) != 1 or not rows or not isinstance(own, ir.Read) or not is_trained:
            return "it does more than to put trained rows before `kv`, or before the tokens"
        if any(instance.tasks for instance in one.instances):
            return "it has parameters for each task"
    counting = next((p.edit for p in folding.record.site_edits if any(i.selects_positions for i in p.instances)), None)
    if counting is not None:
        return f"`{counting}` counts the tokens before those of the input, too"
    config = getattr(folding.model, "config", None)
    if is_prompt(sites[0]):
        return None if len(sites) == 1 else "it stands before the tokens of two stacks"
    if getattr(config, "is_encoder_decoder", False):
        return "the caches of an encoder-decoder model are made by its own code"
    # the sites of all layers, in the order in which a cache numbers them
    numbers: list[Any] = [getattr(folding.model.get_submodule(p.site.module), "layer_idx", None) for p in sites]
    count: int = getattr(config, "num_hidden_layers", 0)
    all_layers = POSITIONS in forward_signature(folding.model).parameters and numbers == list(range(count))
    if any(one.site.group.rpartition(".")[2] != "self" for one in sites) or not all_layers:
        return "not every layer has one such prefix, in a cache"
    lengths = {row_count(one.assigns[0].value) for one in sites}
    if len(lengths) > 1:
        return f"layers have prefixes of different lengths ({', '.join(map(str, sorted(lengths)))})"
    cache: Any = DynamicCache(config=config)
    if any(layer.is_sliding for layer in cache.layers) or getattr(config, "alibi", False):
        return "the model forgets, or weighs, keys by their distance, and a prefix has none"
    return None


def _rows(site_edit: ir.SiteEdit, folding: Folding, like: Tensor) -> list[Any]:
    """The rows of the forms, in the order of the equation."""
    value = site_edit.assigns[0].value
    assert isinstance(value, ir.Concat)
    modules = folding.modules(site_edit)
    return [modules[part.instance.key](like) for part in value.parts if isinstance(part, ir.FormCall)]


def _seed(sites: list[ir.SiteEdit], folding: Folding) -> list[Pair]:
    pairs: list[Pair] = []
    for one in sites:
        shape = one.assigns[0].value.shape
        assert isinstance(shape, KeyValue)
        weight = next(folding.model.get_submodule(one.site.module).parameters())
        prefixes: list[Pair] = _rows(one, folding, weight.new_empty(1, shape.kv_heads, 1, shape.d_head))
        key, value = (torch.cat([pair[i][0] for pair in prefixes], 1).detach().clone() for i in (0, 1))
        pairs.append((key, value))
    return pairs
