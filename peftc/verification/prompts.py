"""Prompts on the base: embedded tokens before those of the input, and a longer attention mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftc.planning import ir
from peftc.verification.reference.interpreter import Interpreter
from peftc.verification.reference.locations import ReferenceUnavailable

STACKS = {  # token ids, embedded tokens and mask of the decoder of an encoder-decoder model, or of any other stack
    "": ("input_ids", "inputs_embeds", "attention_mask"),
    "decoder": ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
}
PER_TOKEN = ("position_ids", "token_type_ids", "labels", "decoder_position_ids", "cache_position")


class Prompts:
    """The prompts of one call. `arguments`: those of the batch, with prompts in front."""

    def __init__(
        self, base: nn.Module, site_edits: Sequence[ir.SiteEdit], interpreter: Interpreter, batch: Mapping[str, Any]
    ) -> None:
        self.base, self.interpreter = base, interpreter
        self.arguments = dict(batch)
        self.is_encoder_decoder = bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
        self.prompt_lengths = {"": 0, "decoder": 0}
        self.lengths = {
            stack: batch[ids].shape[1] for stack, (ids, _, _) in STACKS.items() if ids in batch and site_edits
        }
        for site_edit in site_edits:
            self._prepend(site_edit)

    def _prepend(self, site_edit: ir.SiteEdit) -> None:
        stack = "decoder" if self.is_encoder_decoder and site_edit.site.path.startswith("decoder.") else ""
        ids, embeds, mask = STACKS[stack]
        visible = self.arguments.get(mask)
        if len(site_edit.assigns) > 1 or site_edit.lets or any(name in self.arguments for name in PER_TOKEN):
            raise ReferenceUnavailable("the batch has other arguments per token, which would need rows for the prompt")
        if isinstance(visible, Tensor) and not bool((visible != 0).all()):
            raise ReferenceUnavailable("the batch has padding, and a prompt stands before the first token of each row")
        if embeds not in self.arguments:
            if ids not in self.arguments:
                raise ReferenceUnavailable(f"the batch has no `{ids}`")
            embedding = self.base.get_submodule(site_edit.site.module)
            self.arguments[embeds] = embedding(self.arguments.pop(ids))
        value = next(iter(site_edit.assigns)).value
        assert isinstance(value, ir.Concat)
        h = self.arguments[embeds]
        self.interpreter.forget([site_edit.site.path], [id(site_edit)])
        parts = [part for part in value.parts if not isinstance(part, ir.Read)]
        rows = [self.interpreter.evaluate(site_edit, part, h).expand(len(h), -1, -1).to(h.dtype) for part in parts]
        self.prompt_lengths[stack] += (count := sum(part.shape[1] for part in rows))
        self.arguments[embeds] = torch.cat([*rows, h], 1)
        if isinstance(visible, Tensor):
            self.arguments[mask] = torch.cat([visible.new_ones(len(visible), count), visible], 1)

    def without_prompt_rows(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Removes the rows of the prompt, except from outputs of an encoder."""
        stack = "decoder" if self.is_encoder_decoder else ""
        count = self.prompt_lengths[stack]
        length = self.lengths.get(stack, 0) + count
        return {
            name: value[:, count:]
            if count and value.ndim > 1 and value.shape[1] == length and not name.startswith("encoder")
            else value
            for name, value in outputs.items()
        }
