"""Rewriting passes of a program, installed as the edits of a spec are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.explore import parse_selector
from peftc.forms.module import checked_seed
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.record import InstalledSpec
from peftc.models.samples import joint_sample
from peftc.rewriting.passes.first_run import first_runs
from peftc.rewriting.passes.region import Region
from peftc.syntax import ast


def apply(
    pass_: Callable[[Region], object],
    model: nn.Module,
    *,
    at: str,
    name: str | None = None,
    seed: int | None = None,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> nn.Module:
    """Lets a function rewrite the fx graphs of a model's layers, and installs the result in place.

    The function gets the graph of the layer of each site of `at`, with its hidden states by name,
    and may add any function of torch, replace states, and have parameters and modules of its own.
    The result is installed as the edits of `compile` are: for each call pattern, in training and
    evaluation, with and without a cache. `peftc.remove`, `disabled`, `save` and copies know it
    by its name. Specs and passes act in the order in which they were put on the model.

    The function runs for each type of layer and each call pattern, and twice at first. It must do
    the same each time. It is never saved: `peftc.load(…, passes={name: pass_})` takes it again.

    Args:
        pass_: a function of a `Region`.
        model: a module, which may have specs and passes already.
        at: a selector, as in specs: `"layer[*].ffn"`.
        name: of the pass; by default that of the function.
        seed: of the first values of its parameters, as in `compile`.
        sample: as in `compile`.
        samples: as in `compile`.

    Returns:
        The model, the same object.

    Raises:
        PeftcError: P2xx (the selector, states), P403 (a state that a call has not), P412 (the
            name is in use), P440 (no pass, or it failed), P441 (the graph does not run), P442
            (another shape), P443 (no gradient), P444 (another run differs), P445 (the place),
            P5xx (the model). After an error the model is as it was.
    """
    with paused_gc():
        own_name = pass_name(name, pass_)
        compiled = CompiledModel.active(model, joint_sample(sample, samples))
        analysis = compiled.analysis
        statement = first_runs(own_name, pass_, parse_selector(at), analysis.table, analysis.structure)
        spec = ast.Spec(1, (statement,))
        planned = compiled.plan(spec)
        own_seed = torch.initial_seed() if seed is None else checked_seed(seed)
        check_free(own_name, compiled)
        return compiled.add(InstalledSpec(own_name, spec, planned.deferred_plan, own_seed), planned)


def pass_name(name: str | None, function: object) -> str:
    """Raises: P440 for a name that no edit can have."""
    own = name if name is not None else getattr(function, "__name__", "")
    if not isinstance(own, str) or not own.isidentifier() or not own.isascii():  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`{own}` is not a name of a pass"
        raise PeftcError(Diagnostic("P440", message, help='give it one: `name="tap"`'))
    return own


def check_free(name: str, compiled: CompiledModel) -> None:
    """Raises: P412 for a name of another spec."""
    names = [spec.name for spec in compiled.specs]
    if name in names:
        help_ = f"give it another name; the model has {join_names(names)}"
        raise PeftcError(Diagnostic("P412", f"`{name}` is the name of a spec on the model", help=help_))
