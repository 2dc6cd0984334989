"""Tokens before those of the input, as a user of the base would give them: embedded, with a longer mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftc.planning import ir
from peftc.verification.witness.interpreter import Interpreter
from peftc.verification.witness.locations import Unreachable

SIDES = {  # the arguments of the stack: token ids, embedded tokens, mask
    "": ("input_ids", "inputs_embeds", "attention_mask"),
    "decoder": ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
}
OTHERS = ("position_ids", "token_type_ids", "labels", "decoder_position_ids", "cache_position")


class Prompts:
    """The prompts of a call of `base`: `arguments` are those of the call, `behind` takes their rows out of its results."""

    def __init__(
        self, base: nn.Module, placed: Sequence[ir.SiteEdit], interpreter: Interpreter, batch: Mapping[str, Any]
    ) -> None:
        self.base, self.interpreter = base, interpreter
        self.arguments = dict(batch)
        self.counts = {"": 0, "decoder": 0}
        self.tokens = {side: batch[ids].shape[1] for side, (ids, _, _) in SIDES.items() if ids in batch and placed}
        for one in placed:
            self.join(one)

    @property
    def pair(self) -> bool:
        return bool(getattr(getattr(self.base, "config", None), "is_encoder_decoder", False))

    def join(self, placed: ir.SiteEdit) -> None:
        """Puts the rows of one edit before the tokens of its stack."""
        side = "decoder" if self.pair and placed.site.path.startswith("decoder.") else ""
        ids, embeds, mask = SIDES[side]
        shown = self.arguments.get(mask)
        if len(placed.assigns) > 1 or placed.lets or any(name in self.arguments for name in OTHERS):
            raise Unreachable("what else the call says of its tokens would have to be made longer, too")
        if isinstance(shown, Tensor) and not bool((shown != 0).all()):
            raise Unreachable("the batch has padding, and a prompt stands before the first token of each row")
        if embeds not in self.arguments:
            if ids not in self.arguments:
                raise Unreachable(f"the batch has no `{ids}`")
            module = self.base.get_submodule(placed.site.module)
            self.arguments[embeds] = module(self.arguments.pop(ids))
        value = next(iter(placed.assigns)).value
        assert isinstance(value, ir.Concat)
        h = self.arguments[embeds]
        self.interpreter.forget([placed.site.path], [id(placed)])
        parts = [self.interpreter.term(placed, part, h) for part in value.parts if not isinstance(part, ir.Read)]
        rows = [part.expand(len(h), -1, -1).to(h.dtype) for part in parts]
        self.counts[side] += (count := sum(part.shape[1] for part in rows))
        self.arguments[embeds] = torch.cat([*rows, h], 1)
        if isinstance(shown, Tensor):
            self.arguments[mask] = torch.cat([shown.new_ones(len(shown), count), shown], 1)

    def behind(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results without the rows of the prompt. Those of an encoder that a decoder attends to stay."""
        side = "decoder" if self.pair else ""
        count = self.counts[side]
        length = self.tokens.get(side, 0) + count
        return {
            name: value[:, count:]
            if count and value.ndim > 1 and value.shape[1] == length and not name.startswith("encoder")
            else value
            for name, value in results.items()
        }
