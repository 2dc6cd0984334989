"""Bottlenecks of other tasks, mixed by an attention, as a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.arguments import integer, number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.module import Draw, FormModule, has_values

NEAR = 1e-6  # first values of V beside its diagonal
FILLED = "filled"


class FusionModule(FormModule):
    """f(x) = Σᵢ aᵢ zᵢ V, aᵢ = softmaxᵢ((x Q + b) · zᵢ K), zᵢ = act(x W_down,i + b_down,i) W_up,i + b_up,i. A bias of K would be the same in
    all scores, and there is none. The adapters are states: saved, and never trained. Before they are there, the value is zero.

    Shapes: x, f (batch, tokens, d); query, key, value (d, d), as weights of a Linear; query_bias (d,); down (n, r, d);
    down_bias (n, r); up (n, d, r); up_bias (n, d). `filled`: whether the adapters are there.
    Raises: P544 while training, where they are not.
    Source: Pfeiffer et al. 2021, arXiv:2005.00247, section 3.2; z without the input, which is added once, the bias, first values
    and penalty as in the authors' code (AdapterHub, `dynamic`).
    """

    query: nn.Parameter
    query_bias: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter | None

    def setup(self) -> None:
        args = self.form_args
        self.state(FILLED, torch.zeros((), dtype=torch.bool))
        self.is_known = False  # to be filled
        self.n, self.act, self.p = integer(args, "n"), str(args["act"]), number(args, "dropout")

    def adapter(self) -> tuple[str, ...]:
        """The names of the tensors of an adapter."""
        return tuple(name for name in self.states() if name != FILLED)

    def filling(self, adapters: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the form that adapters fill, and its values from n adapters."""
        for i, tensors in enumerate(adapters):
            yield from ((self.get_buffer(name)[i], tensors[name]) for name in self.adapter())
        yield self.get_buffer(FILLED), torch.tensor(True)

    def after_load(self) -> None:
        self.is_known = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_load()

    def require_ready(self) -> None:
        """Raises: P544 where there are no adapters."""
        if not self.is_known:
            filled = self.get_buffer(FILLED)
            if has_values(filled) and not bool(filled):
                message = f"`fusion` has none of the {self.n} adapters that it mixes"
                raise PeftcError(Diagnostic("P544", message, help="peftc.fuse(model, directories) reads them"))
            self.is_known = True

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.require_ready()
        down, up = self.get_buffer("down"), self.get_buffer("up").mT.flatten(0, 1)  # (n, r, d) and (n r, d)
        down_bias, up_bias = (self.get_buffer(f"{s}_bias") if self.form_args["bias"] else None for s in ("down", "up"))
        h = x.to(self.query.dtype)
        z = F.linear(h, down.flatten(0, 1), None if down_bias is None else down_bias.flatten())
        z = ACTIVATION[self.act](z).unflatten(-1, (self.n, -1))  # (batch, tokens, n, r)
        asked = F.linear(h, self.query, self.query_bias) @ self.key
        scores = ((asked @ up.mT).unflatten(-1, (self.n, -1)) * z).sum(-1)
        scores = scores if up_bias is None else scores + asked @ up_bias.mT
        a = F.dropout(scores, self.p, self.training).softmax(-1)
        mixed = (a.unsqueeze(-1) * z).flatten(-2) @ up
        mixed = mixed if up_bias is None else mixed + a @ up_bias
        return (mixed if self.value is None else F.linear(mixed, self.value)).to(x.dtype)

    def penalties(self) -> Mapping[str, Tensor]:
        """identity: penalty · ‖I − V‖² (Frobenius)."""
        if self.value is None:
            return {}
        identity = torch.eye(len(self.value), dtype=self.value.dtype, device=self.value.device)
        return {"identity": number(self.form_args, "penalty") * (identity - self.value).square().sum()}

    def draws(self) -> Mapping[str, Draw]:
        draws = super().draws()
        return draws if self.value is None else {**draws, "value": _near_identity}


def _near_identity(values: Tensor, generator: torch.Generator) -> object:
    return values.fill_(NEAR).fill_diagonal_(1.0)
