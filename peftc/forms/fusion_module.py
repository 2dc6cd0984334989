"""Bottlenecks of other tasks, mixed by an attention, as a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.arguments import number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.fusion import sizes
from peftc.forms.module import Draw, FormModule, constant, has_values, normal
from peftc.forms.registry import Args, Dims

STD = 0.02  # of the first values of Q and K
NEAR = 1e-6  # first values of V beside its diagonal
FILLED = "filled"


class Fusion(FormModule):
    """f(x) = Σᵢ aᵢ zᵢ V, aᵢ = softmaxᵢ((x Q + b) · zᵢ K), zᵢ = act(x W_down,i + b_down,i) W_up,i + b_up,i. A bias of K would be the same in
    all scores, and there is none. The adapters are states: saved, and never trained. Before they are there, the value is zero.

    Shapes: x, f (batch, tokens, d); query, key, value (d, d), as weights of a Linear; query_bias (d,); down (n, r, d);
    down_bias (n, r); up (n, d, r); up_bias (n, d). `filled`: whether the adapters are there.
    Raises: P544 while training, where they are not.
    Source: Pfeiffer et al. 2021, arXiv:2005.00247, section 3.2; z without the input, which is added once, the bias, first values
    and penalty as in the authors' code (AdapterHub, `dynamic`).
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        n, r, d = sizes(args, dims)
        self.query = self.parameter("query", d, d)
        self.query_bias = self.parameter("query_bias", d)
        self.key = self.parameter("key", d, d)
        self.value = self.optional("value", args["value"], d, d)
        shapes = {"down": (n, r, d), "up": (n, d, r)}
        if args["bias"]:
            shapes |= {"down_bias": (n, r), "up_bias": (n, d)}
        for name, size in shapes.items():
            self.state(name, torch.zeros(size, dtype=dtype, device=device))
        self.state(FILLED, torch.zeros((), dtype=torch.bool))
        self.known = False  # to be filled
        self.n, self.act, self.p = n, str(args["act"]), number(args, "dropout")

    def adapter(self) -> tuple[str, ...]:
        """The names of the tensors of an adapter."""
        return tuple(name for name in self.states() if name != FILLED)

    def filling(self, adapters: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the form that adapters fill, and its values from n adapters."""
        for i, tensors in enumerate(adapters):
            yield from ((self.get_buffer(name)[i], tensors[name]) for name in self.adapter())
        yield self.get_buffer(FILLED), torch.tensor(True)

    def loaded(self) -> None:
        self.known = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.loaded()

    def require_filled(self) -> None:
        """Raises: P544 where there are no adapters."""
        if not self.known:
            filled = self.get_buffer(FILLED)
            if has_values(filled) and not bool(filled):
                message = f"`fusion` has none of the {self.n} adapters that it mixes"
                raise PeftcError(Diagnostic("P544", message, help="peftc.fuse(model, directories) reads them"))
            self.known = True

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.require_filled()
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

    def penalty(self) -> Tensor | None:
        """penalty · ‖I − V‖² (Frobenius); None without V."""
        if self.value is None:
            return None
        identity = torch.eye(len(self.value), dtype=self.value.dtype, device=self.value.device)
        return number(self.form_args, "penalty") * (identity - self.value).square().sum()

    def draws(self) -> Mapping[str, Draw]:
        drawn = {"query": normal(STD), "query_bias": constant(0.0), "key": normal(STD)}
        return drawn if self.value is None else drawn | {"value": _near_identity}


def _near_identity(values: Tensor, generator: torch.Generator) -> object:
    return values.fill_(NEAR).fill_diagonal_(1.0)
