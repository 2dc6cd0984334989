"""A compiled model and the reference model of its spec, called on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.forms.module import seeded
from peftc.installation.contents import parameters
from peftc.installation.record import installation_of
from peftc.models.configs import error_summary
from peftc.planning import ir
from peftc.training.tasks import task
from peftc.verification.forward_modes import EVALUATION, ForwardMode, without_checkpointing
from peftc.verification.preparation import Batch
from peftc.verification.prompts import Prompts
from peftc.verification.reference.locations import EditKey, ReferenceUnavailable, key_of
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.reference.outputs import Difference, first_difference, model_outputs, random_projection
from peftc.verification.reference.recorder import Recorder

NOISE = (0.5, 0.05, 0.005)  # relative to the size of a parameter; smaller where outputs are not finite


class CompiledModelError(Exception):
    """The compiled model raises an error in a call that its base accepts."""


# Errors that say nothing about the model.
PROPAGATED = (PeftcError, ReferenceUnavailable, CompiledModelError, MemoryError, torch.OutOfMemoryError)


@contextmanager
def unavailable_on_error(context: str = "") -> Generator[None]:
    """Whatever a model's own code raises inside the block becomes `ReferenceUnavailable`."""
    try:
        yield
    except PROPAGATED:
        raise
    except Exception as error:
        raise ReferenceUnavailable(f"{context}{error_summary(error)}") from error


@contextmanager
def compiled_model_errors(call_base: Callable[[], object]) -> Generator[None]:
    """An error inside the block is the compiled model's own if the same call of its base succeeds.

    Raises: CompiledModelError, or ReferenceUnavailable by `call_base`.
    """
    try:
        yield
    except PROPAGATED:
        raise
    except Exception as error:
        call_base()
        raise CompiledModelError(f"the compiled model raises {error_summary(error)}") from error


@dataclass
class CallResult:
    """Floating-point outputs, and the gradients of a linear function of them by parameter.

    `gradient_error`: why there are no gradients.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradient_error: str = ""


class Comparison:
    """Calls a compiled model and its reference model, with the same values of the edits'
    parameters.

    Args:
        compiled: a copy, free to be changed.
        reference: hooks on a copy of its base.
        batch: the arguments of every call.
    """

    def __init__(self, compiled: nn.Module, reference: ReferenceModel, batch: Batch) -> None:
        self.compiled, self.reference, self.base, self.batch = compiled, reference, reference.base, batch
        self.record = installation_of(compiled)
        trainable = parameters(compiled).items()
        self.parameters = {name: p for name, p in trainable if p.requires_grad and p.is_floating_point()}
        self.initial_values = self.values()
        self.module_names = {name for name, _ in self.base.named_modules()}
        self.unavailable: dict[EditKey, str] = dict(reference.unavailable)
        names = self.record.task.names
        self.tasks: tuple[str | None, ...] = names if len(names) > 1 else (None,)
        self.task = self.tasks[0]

    # Calls ----------------------------------------------------------------------------------------

    def selected_task(self) -> AbstractContextManager[object]:
        return task(self.compiled, self.task) if self.task is not None else nullcontext()

    def run_compiled(self, mode: ForwardMode, recorder: Recorder | None = None) -> CallResult:
        """Calls the compiled model.

        Without a recorder it has no hooks, since hooks may disable fast paths of the model's code.

        Raises: CompiledModelError; ReferenceUnavailable if the base does not run in this mode,
        either.
        """
        with ExitStack() as stack:
            stack.enter_context(self.selected_task())
            stack.enter_context(mode.applied_to(self.compiled))
            if recorder is not None:
                stack.enter_context(recorder.recording(self.compiled, self.module_names))
            stack.enter_context(self.own_errors(mode))
            return self._result(model_outputs(self.compiled(**self.batch)), mode)

    def own_errors(self, mode: ForwardMode) -> AbstractContextManager[None]:
        def call_base() -> None:
            with unavailable_on_error("the model without its edits does not run: "), mode.applied_to(self.base):
                self.base(**self.batch)

        return compiled_model_errors(call_base)

    def run_reference(self, mode: ForwardMode, recorder: Recorder | None = None) -> CallResult:
        """Evaluates the spec on the base.

        Raises: ReferenceUnavailable if an equation has no values to read, or the base does not run
        with hooks.
        """
        with ExitStack() as stack:
            stack.enter_context(self.selected_task())
            stack.callback(self.compiled.eval)
            self.compiled.train(mode.train)  # its form modules are called
            stack.enter_context(without_checkpointing())
            stack.enter_context(mode.applied_to(self.base))
            if recorder is None:
                stack.enter_context(self.reference.active())
            else:
                stack.enter_context(self.reference.active(recorder.record_edit))
                stack.enter_context(recorder.recording(self.base, self.module_names))
            prompts = Prompts(self.base, self.reference.prompts, self.reference.interpreter, self.batch)
            with unavailable_on_error():
                outputs = prompts.without_prompt_rows(model_outputs(self.base(**prompts.arguments)))
            return self._result(outputs, mode)

    def _result(self, outputs: dict[str, Tensor], mode: ForwardMode) -> CallResult:
        result = CallResult(outputs)
        if mode.gradients and (loss := random_projection(outputs)) is not None:
            self.compiled.zero_grad(set_to_none=True)
            try:
                loss.backward()
            except PROPAGATED:
                raise
            except RuntimeError as error:  # for instance, the model overwrites a value that the backward pass needs
                result.gradient_error = error_summary(error)
            else:
                gradients = ((n, p, p.grad) for n, p in self.parameters.items())
                result.gradients = {n: torch.zeros_like(p) if g is None else g.clone() for n, p, g in gradients}
        return result

    def output_difference(self) -> Difference | None:
        expected = self.run_reference(EVALUATION)
        return first_difference(expected.outputs, self.run_compiled(EVALUATION).outputs)

    # Values of parameters -------------------------------------------------------------------------

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def reset(self, values: Mapping[str, Tensor] | None = None) -> None:
        for name, value in (values or self.initial_values).items():
            self.parameters[name].copy_(value)

    @torch.no_grad()
    def perturb(self, names: Iterable[str], size: float = NOISE[0], seed: str = "") -> None:
        """Adds noise relative to the size of a parameter, or of a new matrix if that is larger."""
        for name in names:
            parameter = self.parameters[name]
            least = 1 / sqrt(parameter.shape[-1]) if parameter.ndim else 1.0
            scale = size * max(least, parameter.double().square().mean().sqrt().item())
            noise = torch.randn(parameter.shape, generator=seeded(f"{seed}{name}"))
            parameter += (scale * noise).to(parameter.device, parameter.dtype)

    def randomize(self) -> None:
        """Perturbs all parameters by the largest noise for which outputs are finite."""
        for size in NOISE:
            self.reset()
            self.perturb(self.parameters, size)
            with suppress(CompiledModelError):  # values may be too large for the model
                if all(bool(value.isfinite().all()) for value in self.run_compiled(EVALUATION).outputs.values()):
                    return

    def parameters_of(self, site_edit: ir.SiteEdit) -> list[str]:
        """The parameters that an edit owns at a site, else those that it shares."""
        prefix = f"{site_edit.edit}/{site_edit.site.path}/"
        other_tasks = [f".tasks.{other}." for other in self.record.task.names if self.task not in (None, other)]
        owned = [n for n in self.parameters if n.startswith(prefix) and not any(task in n for task in other_tasks)]
        owners = {owner for instance in site_edit.instances for owner in instance.owners()}
        return owned or [name for name in self.parameters if name.count("/") > 1 and name.split("/")[1] in owners]

    def edits_sharing(self, site_edit: ir.SiteEdit, names: Collection[str]) -> list[EditKey]:
        """The edit at its site, and all others that use one of these parameters."""
        others = [other for other in self.record.site_edits if set(names) & set(self.parameters_of(other))]
        return [key_of(site_edit), *map(key_of, others)]
