"""Changes of all entries of weights under a mask that is learnt, as modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.arguments import number
from peftc.forms.module import FormModule
from peftc.forms.selective_module import SelectiveModule

EDGE = 1e-4  # draws are this far from 0 and 1


class MaskedSites(SelectiveModule):
    """The sites of a `masked`, in their order: what is kept of them is one choice. `pruned`: whether it has been made."""

    scored = "nothing"

    def setup(self) -> None:
        self.members: dict[int, MaskedModule] = {}
        self.state("pruned", torch.zeros((), dtype=torch.bool))

    @property
    def criterion(self) -> str:
        return "value"

    @property
    def unit_count(self) -> int:
        count = self.definition.changed_entries(self.form_args, self.form_dims)
        assert count is not None
        return count

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        return self.flat().abs()

    @torch.no_grad()
    def flat(self) -> Tensor:
        """The present values of all entries, one site after the other."""
        return torch.cat([self.members[i].value(drawn=False).flatten() for i in sorted(self.members)])

    def choose(self, places: Tensor) -> None:
        """Keeps these entries: the others are zero from now on, and there are no gates any more."""
        start = 0
        for member in (self.members[i] for i in sorted(self.members)):
            inside = places[(places >= start) & (places < start + member.delta.numel())] - start
            member.prune(inside)
            start += member.delta.numel()
        self.get_buffer("pruned").fill_(True)

    def penalties(self) -> Mapping[str, Tensor]:
        """l0: penalty · E‖f‖₀, over all sites, until the gates are pruned."""
        if bool(self.get_buffer("pruned")):
            return {}
        expected = torch.stack([self.members[i].expected() for i in sorted(self.members)]).sum()
        return {"l0": number(self.form_args, "penalty") * expected}

    def collapsed(self) -> Mapping[str, Tensor]:
        if not bool(self.get_buffer("pruned")):
            message = f"`masked` has not been cut down to the {self.unit_count} entries that are saved"
            raise PeftcError(Diagnostic("P543", message, help="peftc.calibrate(model) keeps the largest"))
        kept = torch.cat([self.members[i].get_buffer("kept").flatten() for i in sorted(self.members)])
        places = kept.nonzero()[:, 0]
        return {"values": self.flat()[places], "places": places}


class MaskedModule(FormModule):
    """f = kept ⊙ z ⊙ Δ; z = min(1, max(0, s (upper − lower) + lower)), s = σ(log u − log(1 − u) + α) with u drawn by torch's
    generator in each forward while training, else s = σ(α). With `structured`, times the same of one α for the whole weight.

    Shapes: f, Δ and α as the weight (out, in) or the bias (d,) that it changes; group (1,). `kept` is all at first; once it has been
    chosen, z is one.
    Source: Guo et al. 2021, arXiv:2012.07463, section 3; s without draws: Louizos et al. 2018, Eq. 13.
    """

    delta: nn.Parameter
    alpha: nn.Parameter
    group: nn.Parameter | None

    def setup(self) -> None:
        self.lower, self.upper = number(self.form_args, "lower"), number(self.form_args, "upper")
        self.state("kept", torch.ones(self.delta.shape, dtype=torch.bool))

    def join(self, owner: FormModule, index: int, task: str | None = None) -> None:
        super().join(owner, index, task)
        assert isinstance(owner, MaskedSites)
        owner.members[index] = self

    def forward(self, like: Tensor) -> Tensor:
        return self.value(drawn=self.training).to(like.dtype)

    def value(self, drawn: bool) -> Tensor:
        z = self.gates(self.alpha, drawn)
        z = z if self.group is None else z * self.gates(self.group, drawn)
        owner = self.owner_module
        assert isinstance(owner, MaskedSites)
        return self.get_buffer("kept") * torch.where(owner.get_buffer("pruned"), 1.0, z) * self.delta

    def gates(self, alpha: Tensor, drawn: bool) -> Tensor:
        """Hard-concrete gates in [0, 1]: drawn, or without a draw."""
        if drawn:
            u = torch.rand_like(alpha).clamp(EDGE, 1 - EDGE)
            alpha = u.log() - (1 - u).log() + alpha
        return (alpha.sigmoid() * (self.upper - self.lower) + self.lower).clamp(0.0, 1.0)

    def expected(self) -> Tensor:
        """E‖f‖₀ = Σ P(z > 0), P = σ(α − log(−lower / upper))."""
        shift = log(-self.lower / self.upper)
        total = (self.alpha - shift).sigmoid().sum()
        return total if self.group is None else total * (self.group - shift).sigmoid()[0]

    @torch.no_grad()
    def prune(self, kept: Tensor) -> None:
        """Keeps these of the entries, as they are without a draw."""
        value = self.value(drawn=False)
        mask = torch.zeros_like(value, dtype=torch.bool)
        mask.view(-1)[kept] = True
        self.get_buffer("kept").copy_(mask)
        self.delta.copy_(value * mask)
