"""Edits applied to a zoo model by hand: the reference for compiled models.

    ref = Reference("bart", zoo.build("bart", torch.float64))
    for site in ref.ffns:
        ref.h(site, lambda at, w=part(w, "ffn", site.path, "adapter"): at.h + 4 * adapter(w, at.x))
    ref.model(**inputs)

Weights are given as they are saved: `<edit>/<site path>/<form>.<parameter>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.reference import table
from tests.reference.attention import NAME, AttentionEdits, Prefix, edits_of
from tests.reference.layers import Edit, open_up


class Reference:
    """A model to edit by hand, in place and for good: it needs a model of its own."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.layers = table.layers(name, model)
        self.attentions = table.attentions(name, model)
        self.ffns = table.ffns(name, model)

    # h of a sub-layer

    def h(self, site: table.Sublayer, edit: Edit) -> None:
        """h ← edit(At(h, x, res, norm)), just before the residual sum."""
        module = self.model.get_submodule(site.edit_module)
        open_up(module)
        module.__dict__["edits"].setdefault(site.slot, []).append(edit)

    # Linears

    def linear(self, rows: table.Rows, edit: Callable[[Tensor, Tensor], Tensor]) -> None:
        """h ← edit(h, x) for these rows of a Linear's output."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            start, stop = rows.start, rows.stop or out.shape[-1]
            h = edit(out[..., start:stop], args[0])
            return torch.cat([out[..., :start], h, out[..., stop:]], -1)

        self.model.get_submodule(rows.module).register_forward_hook(hook)

    def input(self, rows: table.Rows, edit: Callable[[Tensor], Tensor]) -> None:
        """x ← edit(x): the input of a Linear."""
        module = self.model.get_submodule(rows.module)
        module.register_forward_pre_hook(lambda _, args: (edit(args[0]),))

    def weight(self, rows: table.Rows, edit: Callable[[Tensor], Tensor]) -> None:
        """w ← edit(w), w (out, in): these rows are recomputed from the edited weight, with the same
        bias.
        """

        def edited_output(h: Tensor, x: Tensor) -> Tensor:
            w, b = self.w(rows)
            return nn.functional.linear(x, edit(w), b)

        self.linear(rows, edited_output)

    def w(self, rows: table.Rows) -> tuple[Tensor, Tensor | None]:
        """The frozen weight (out, in) and bias of these rows."""
        module = self.model.get_submodule(rows.module)
        w = module.weight.T if isinstance(module, Conv1D) else module.weight
        b = module.bias
        return w[rows.start : rows.stop].detach(), None if b is None else b[rows.start : rows.stop].detach()

    def output(self, module: str, edit: Callable[[Tensor, Tensor], Tensor]) -> None:
        """h ← edit(h, x) of a whole module: its (first) output and its (first) input."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            return edit(out, x) if isinstance(out, Tensor) else (edit(out[0], x), *out[1:])

        self.model.get_submodule(module).register_forward_hook(hook, with_kwargs=True)

    # Inside attention

    def inside(self, site: table.Attention) -> AttentionEdits:
        """The edits of one attention; from now on the model computes attention by
        `reference_attention`.
        """
        if self.model.config._attn_implementation != NAME:
            self.model.set_attn_implementation(NAME)
        return edits_of(self.model.get_submodule(site.core))

    def prefix(self, site: table.Attention, prefix: Prefix) -> None:
        self.inside(site).prefixes.append(prefix)

    def heads(self, site: table.Attention, edit: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.inside(site).heads.append(edit)


def part(weights: Mapping[str, Tensor], edit: str, path: str, form: str) -> dict[str, Tensor]:
    """The tensors of one form at one site, by the rest of their names."""
    head = f"{edit}/{path}/{form}."
    tensors = {key.removeprefix(head): value for key, value in weights.items() if key.startswith(head)}
    assert tensors, f"no tensor {head}* among {sorted(weights)}"
    return tensors
