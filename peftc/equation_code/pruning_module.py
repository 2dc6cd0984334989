"""The module of a form of which the largest entries are left, and what its sites have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.code import evaluate
from peftc.equation_code.module import EquationModule
from peftc.equations.definition import TextForm
from peftc.equations.values import Pruning
from peftc.equations.words import KEPT, PRUNED, PRUNED_PARTS
from peftc.forms.module import FormModule
from peftc.forms.selective_module import SelectiveModule
from peftc.syntax import ast


class PruningModule(EquationModule):
    """A form with `pruned(v, z, n)`: `kept` says which entries of v are left, all at first."""

    def setup(self) -> None:
        super().setup()
        self.get_buffer(KEPT).fill_(True)

    @property
    def pruning(self) -> Pruning:
        assert self.place.pruning is not None
        return self.place.pruning

    @property
    def pruned_parameter(self) -> Tensor:
        return getattr(self, self.place.tensor(self.pruning.name))  # of a replica, too

    def join(self, owner: FormModule, index: int, task: str | None = None) -> None:
        super().join(owner, index, task)
        assert isinstance(owner, PrunedSites)
        owner.members[index] = self

    @torch.no_grad()
    def parameter_value(self) -> Tensor:
        """The value of `pruned(v, z, n)`, without noise."""
        return evaluate(self.place, self.pruning.call, {}, self.tensors())

    @torch.no_grad()
    def prune(self, places: Tensor) -> None:
        """Keeps these of the entries, as they are without noise."""
        value = self.parameter_value()
        mask = torch.zeros_like(value, dtype=torch.bool)
        mask.view(-1)[places] = True
        self.get_buffer(KEPT).copy_(mask)
        self.pruned_parameter.copy_(value * mask)

    def penalties(self) -> Mapping[str, Tensor]:
        """The terms of the loss, until entries are pruned."""
        owner = self.owner_module
        assert owner is not None
        return {} if bool(owner.get_buffer(PRUNED)) else super().penalties()


class PrunedSites(SelectiveModule):
    """The sites of a form with `pruned(v, z, n)`, in their order: what they keep is one choice.

    `pruned`: whether it has been made.
    Raises: P543 if it is saved, and nothing has been pruned.
    """

    definition: TextForm
    scored = "nothing"

    def setup(self) -> None:
        self.members: dict[int, PruningModule] = {}

    @property
    def pruning(self) -> Pruning:
        pruning = self.definition.at(self.form_args, self.form_dims).pruning
        assert pruning is not None
        return pruning

    @property
    def criterion(self) -> str:
        return "value"

    @property
    def unit_count(self) -> int:
        return self.pruning.entries

    def sites(self) -> list[PruningModule]:
        return [self.members[i] for i in sorted(self.members)]

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        return self.flat().abs()

    def flat(self) -> Tensor:
        """The present values of all entries, one site after the other."""
        return torch.cat([site.parameter_value().flatten() for site in self.sites()])

    def choose(self, places: Tensor) -> None:
        """Keeps these entries: the others are zero from now on, and z is 1."""
        start = 0
        for site in self.sites():
            count = site.pruned_parameter.numel()
            site.prune(places[(places >= start) & (places < start + count)] - start)
            start += count
        self.get_buffer(PRUNED).fill_(True)

    def collapsed(self) -> Mapping[str, Tensor]:
        if not bool(self.get_buffer(PRUNED)):
            message = f"`{self.definition.name}` has not been cut down to the {self.unit_count} entries that are saved"
            raise PeftcError(Diagnostic("P543", message, help="peftc.calibrate(model) keeps the largest"))
        places = torch.cat([site.get_buffer(KEPT).flatten() for site in self.sites()]).nonzero()[:, 0]
        parts: dict[str, Tensor] = dict(zip(PRUNED_PARTS, (self.flat()[places], places), strict=True))
        saved = self.definition.at(self.form_args, self.form_dims).saved or {}
        return {name: parts[node.name] for name, node in saved.items() if isinstance(node, ast.Attribute)}
