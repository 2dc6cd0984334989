"""The module of a form of which training gives up entries, and the rounds in which it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peftc.equation_code.module import EquationModule
from peftc.equations.values import Budget

KEPT = "kept"
IMPORTANCE, UNCERTAINTY = "importance", "uncertainty"


class BudgetModule(EquationModule):
    """A form with `budget(v, target, total, …)`: `kept` says which entries of v are left, and the
    others are zero.

    The importance of a number p is |p · ∂p|, smoothed, times how far off it is, smoothed. That of
    an entry of v is its own, and the mean over its part of each parameter with the dimension of v.
    `peftc.step` changes all this.
    Source: Zhang et al. 2023, arXiv:2303.10512, Eq. 8 to 12.
    """

    def setup(self) -> None:
        super().setup()
        self.dimensions: dict[str, int] = {}
        if self.place.budget is None:
            return
        lines = self.place.parameters
        (size,) = lines[self.budget.name].sizes
        own = (name for name in self.own_names() if not lines[name].fixed and size in lines[name].sizes)
        self.dimensions = {name: lines[name].sizes.index(size) for name in own}
        self.state(KEPT, torch.ones(self.limited.shape, dtype=torch.bool))
        for name in self.dimensions:
            for what in (IMPORTANCE, UNCERTAINTY):
                parameter = self.get_parameter(name)
                self.state(f"{name}_{what}", torch.zeros(parameter.shape, dtype=parameter.dtype))

    @property
    def has_budget(self) -> bool:
        return bool(self.dimensions)

    @property
    def budget(self) -> Budget:
        assert self.place.budget is not None
        return self.place.budget

    @property
    def limited(self) -> torch.nn.Parameter:
        """The parameter of which entries are given up."""
        return self.get_parameter(self.budget.name)

    @property
    def last_round(self) -> int:
        """The last step in which entries are given up."""
        return self.budget.total - self.budget.cooldown

    def has_gradients(self) -> bool:
        return all(self.get_parameter(name).grad is not None for name in self.dimensions)

    def is_trained(self) -> bool:
        """Whether the loss of the batch depends on it: not without an example of its task."""
        return self.limited.grad is not None and bool(self.limited.grad.any())

    def is_smoothed(self) -> bool:
        return any(bool(self.get_buffer(f"{name}_{IMPORTANCE}").any()) for name in self.dimensions)

    def smooth(self) -> None:
        """Takes the present |p · ∂p| into importances, and how far off it is into uncertainties."""
        beta1, beta2 = self.budget.beta1, self.budget.beta2
        for name in self.dimensions:
            parameter = self.get_parameter(name)
            assert parameter.grad is not None
            now = (parameter * parameter.grad).abs()
            mean, spread = self.get_buffer(f"{name}_{IMPORTANCE}"), self.get_buffer(f"{name}_{UNCERTAINTY}")
            mean.mul_(beta1).add_((1 - beta1) * now)
            spread.mul_(beta2).add_((1 - beta2) * (now - mean).abs())

    def scores(self) -> Tensor:
        """The importance of each entry."""
        means: dict[str, Tensor] = {}
        for name, dimension in self.dimensions.items():
            score = self.get_buffer(f"{name}_{IMPORTANCE}") * self.get_buffer(f"{name}_{UNCERTAINTY}")
            means[name] = score.movedim(dimension, 0).flatten(1).mean(1) if score.ndim > 1 else score
        own = means.pop(self.budget.name)
        return own + torch.stack([*means.values()]).sum(0) if means else own

    def keep(self, entries: Tensor) -> None:
        """Gives up all other entries."""
        self.get_buffer(KEPT).copy_(entries)
        self.give_up()

    def give_up(self) -> None:
        """Sets to zero what has been given up, which momentum may have changed."""
        self.limited.masked_fill_(~self.get_buffer(KEPT), 0.0)


@torch.no_grad()
def allocate(forms: Sequence[BudgetModule], step: int) -> None:
    """One round over all sites of an edit: Zhang et al. 2023, algorithm 1.

    The budget falls as a cube from all entries to `target` per site.
    """
    budget, last = forms[0].budget, forms[0].last_round
    entries, least = sum(len(form.limited) for form in forms), budget.target * len(forms)
    finished = is_finished(forms)
    if step > last and finished:
        for form in forms:
            form.give_up()
        return
    if step < last or not (finished or is_smoothed(forms)):
        for form in forms:
            form.smooth()
    is_round, left = step >= last, least
    if step <= budget.warmup and not is_round:
        return
    if step < last:
        remaining = 1 - (step - budget.warmup) / (last - budget.warmup)
        left, is_round = int((entries - least) * remaining**3 + least), step % budget.every == 0
    if is_round and entries > left:
        scores = [form.scores() for form in forms]
        threshold = torch.cat(scores).kthvalue(entries - left)[0]
        for form, score in zip(forms, scores, strict=True):
            form.keep(score > threshold)


def is_finished(forms: Sequence[BudgetModule]) -> bool:
    """Whether no more entries are left than in the end."""
    return sum(int(form.get_buffer(KEPT).sum()) for form in forms) <= forms[0].budget.target * len(forms)


def is_smoothed(forms: Sequence[BudgetModule]) -> bool:
    return any(form.is_smoothed() for form in forms)
