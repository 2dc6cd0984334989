"""What was done to a model: the specs on it, and enough to undo each. Kept in the model; copied and pickled with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from peftc.concurrency.context import ChoiceVar
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms.tasked_module import Chosen
from peftc.planning import ir
from peftc.planning.report.plan import Plan
from peftc.specialization.generated_class import GeneratedClass
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

RECORD = "_peftc"


@dataclass(frozen=True)
class InstalledSpec:
    """One spec on a model: `text` is the expanded spec, canonically printed; `seed` that of its initial values."""

    name: str
    text: str
    plan: Plan
    seed: int

    @property
    def edits(self) -> tuple[str, ...]:
        """The names of its edits and `train` statements."""
        return tuple(edit.name for edit in self.plan.edits)


@dataclass
class Installation:
    """All that was done to a model.

    `trained`: from saved names to base parameters, whose first values are `originals`. `places`: from saved names, without
    the parameter, to dotted names of forms. `task`: the tasks; `choice`: which of them is at work, and which edits
    do not act. `sample`: what the model was fed
    with to find its sites.
    """

    specs: tuple[InstalledSpec, ...]
    regions: list[tuple[str, GeneratedClass]]
    requires_grad: dict[str, bool]
    trained: dict[str, str]
    originals: dict[str, torch.Tensor]
    form_modules: dict[str, str]
    site_edits: list[ir.SiteEdit]
    task: Chosen
    sample: Mapping[str, Any] | None = None

    @property
    def choice(self) -> ChoiceVar:
        return self.task.variable

    def spec(self, name: str) -> InstalledSpec:
        """Raises: P413 where no spec of the model has that name."""
        found = {part.name: part for part in self.specs}
        if name not in tuple(found):
            help_ = did_you_mean(name, found) or f"the model has {join_names(list(found))}"
            raise PeftcError(Diagnostic("P413", f"the model has no spec `{name}`", help=help_))
        return found[name]

    def selected(self, name: str | None) -> tuple[InstalledSpec, ...]:
        """The spec of that name; all of them where it is None."""
        return self.specs if name is None else (self.spec(name),)

    def owner(self, edit: str) -> InstalledSpec:
        """The spec that an edit belongs to."""
        return next(part for part in self.specs if edit in part.edits)


def installation_of(model: nn.Module) -> Installation:
    """The record of a compiled model. Raises P410 for any other."""
    record = getattr(model, "__dict__", {}).get(RECORD)
    if record is None:
        message = f"this {type(model).__name__} has not been compiled by peftc"
        raise PeftcError(Diagnostic("P410", message, help="peftc.compile(spec, model) first"))
    return record


def is_installed(model: object) -> bool:
    return RECORD in getattr(model, "__dict__", {})


def joint_spec(parts: Collection[InstalledSpec]) -> ast.Spec:
    """The one spec that says what all of these say. Of several, what was expected of each alone is left out."""
    specs = [parse_text(part.text, part.name) for part in parts]
    return specs[0] if len(specs) == 1 else joint(specs)


def joint(specs: Iterable[ast.Spec]) -> ast.Spec:
    """The edits and `train` statements of expanded specs, one after the other."""
    every = list(specs)
    statements = [
        replace(s, origin=s.origin or spec.source)
        for spec in every
        for s in spec.statements
        if not isinstance(s, ast.Expect)
    ]
    return replace(every[-1], statements=tuple(statements), header=(), header_trailing=None, closing=())
