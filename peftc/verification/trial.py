"""A copy of a compiled model beside its base, and both in one call: what the copy computes, and what the spec says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.forms.module import seeded
from peftc.installation.record import Installation
from peftc.models.configs import error_summary
from peftc.planning import ir
from peftc.training.tasks import task
from peftc.verification.prompts import Prompts
from peftc.verification.witness.determinism import Deterministic, training, without_checkpoints
from peftc.verification.witness.hooks import Place, Witness, unmarked
from peftc.verification.witness.locations import Unreachable
from peftc.verification.witness.outputs import results, weighed
from peftc.verification.witness.recorder import Recorder

NOISE = (0.5, 0.05, 0.005)  # of the size of a parameter; less where results are not finite


@dataclass(frozen=True)
class Mode:
    """A way to call a model. `scale`: dropout is a factor, else it does nothing."""

    name: str
    train: bool = False
    gradients: bool = False
    inference: bool = False
    scale: bool = False

    @contextmanager
    def of(self, model: nn.Module) -> Generator[None]:
        """Inside the block a model is called in this way."""
        with ExitStack() as stack:
            stack.enter_context(training(model, self.train))
            stack.enter_context(torch.inference_mode() if self.inference else torch.set_grad_enabled(self.gradients))
            stack.enter_context(Deterministic(self.scale) if self.train else nullcontext())
            yield


EVALUATION = Mode("eval")
WITH_GRADIENTS = Mode("eval, with gradients", gradients=True)
TRAINING = Mode("train, dropout 0", train=True, gradients=True)
WITH_DROPOUT = Mode("train, dropout as a factor", train=True, scale=True)
INFERENCE = Mode("inference_mode", inference=True)


class Broken(Exception):
    """The copy raises in a call that the base takes; the text says what."""


def passes(error: Exception) -> bool:
    """Whether an error says nothing about the model: a diagnostic, or a lack of memory."""
    return isinstance(error, (PeftcError, Unreachable, Broken, MemoryError, torch.OutOfMemoryError))


@dataclass
class Run:
    """The floating results of a call, and the gradient of a linear function of them, by parameter; `failure`: why there is none."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    failure: str = ""


class Trial:
    """`copy`: a compiled model, free to be changed; `base`: the same without edits; `own`: the parameters that the copy trains."""

    def __init__(
        self, copy: nn.Module, base: nn.Module, record: Installation, own: Mapping[str, nn.Parameter], witness: Witness
    ) -> None:
        self.copy, self.base, self.record, self.witness = copy, base, record, witness
        self.own = {name: p for name, p in own.items() if p.requires_grad and p.is_floating_point()}
        self.start = {name: p.detach().clone() for name, p in self.own.items()}
        self.names = {name for name, _ in base.named_modules()}
        self.unreached: dict[Place, str] = dict(witness.unreached)
        self.tasks: tuple[str | None, ...] = record.task.names if len(record.task.names) > 1 else (None,)
        self.task = self.tasks[0]

    # Calls -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def tasked(self) -> Generator[None]:
        """Inside the block the copy works for the present task, where it has several."""
        with task(self.copy, self.task) if self.task is not None else nullcontext():
            yield

    def compiled(self, batch: Mapping[str, Any], mode: Mode, recorder: Recorder | None = None) -> Run:
        """What the copy computes. Without a recorder nothing is attached to it: hooks may choose another way through the code.

        Raises: Broken; Unreachable where the base does not run in this way, either.
        """
        recording = recorder.recording(self.copy, self.names) if recorder is not None else nullcontext()
        with self.tasked(), mode.of(self.copy), recording, self.telling(batch, mode):
            return differentiated(results(self.copy(**batch)), mode, self.backward)

    @contextmanager
    def telling(self, batch: Mapping[str, Any], mode: Mode) -> Generator[None]:
        """Errors inside the block, where the copy is called, are its own if the base runs in the same way."""
        try:
            yield
        except Exception as error:  # whatever the model's own code raises
            if passes(error):
                raise
            try:
                with mode.of(self.base):
                    self.base(**batch)
            except Exception as own:  # likewise
                if passes(own):
                    raise
                raise Unreachable(f"the model without its edits does not run so: {error_summary(own)}") from own
            raise Broken(f"the compiled model raises {error_summary(error)}") from error

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        return {n: _gradient(p) for n, p in self.own.items()}

    def expected(self, batch: Mapping[str, Any], mode: Mode, recorder: Recorder | None = None) -> Run:
        """What the spec says, computed on the base. Raises: Unreachable where an equation finds no values to read, or where the base
        does not run with hooks.
        """
        with self.tasked(), ExitStack() as stack:
            stack.callback(self.copy.eval)
            stack.callback(self.unmark)
            stack.enter_context(without_checkpoints())
            if recorder is not None:
                self.witness.mark = recorder.mark
            self.copy.train(mode.train)  # its forms are called
            stack.enter_context(mode.of(self.base))
            stack.enter_context(self.witness.acting())
            if recorder is not None:
                stack.enter_context(recorder.recording(self.base, self.names))
            prompts = Prompts(self.base, self.witness.prompts, self.witness.interpreter, batch)
            try:
                outputs = prompts.behind(results(self.base(**prompts.arguments)))
            except Exception as error:  # of code that is hooked in a way it was not made for
                if passes(error):
                    raise
                raise Unreachable(error_summary(error)) from error
            return differentiated(outputs, mode, self.derivatives)

    def derivatives(self, loss: Tensor) -> dict[str, Tensor]:
        unused = torch.autograd.grad(loss, list(self.own.values()), allow_unused=True)
        found = cast("tuple[Tensor | None, ...]", unused)
        pairs = zip(self.own.items(), found, strict=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}

    def unmark(self) -> None:
        self.witness.mark = unmarked

    def without_gradients(self) -> None:
        for parameter in self.copy.parameters():
            parameter.grad = None

    # Values of parameters --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Gives parameters their values at the start, or others."""
        for name, value in (values or self.start).items():
            self.own[name].copy_(value)

    @torch.no_grad()
    def perturb(self, names: Iterable[str], size: float = NOISE[0], seed: str = "") -> None:
        """Adds noise as large as the parameter, or as a matrix of that many inputs where it is zero."""
        for name in names:
            parameter = self.own[name]
            least = 1 / sqrt(parameter.shape[-1]) if parameter.ndim else 1.0
            scale = size * max(least, parameter.double().square().mean().sqrt().item())
            noise = torch.randn(parameter.shape, generator=seeded(f"{seed}{name}"))
            parameter += (scale * noise).to(parameter.device, parameter.dtype)

    def randomise(self, batch: Mapping[str, Any]) -> None:
        """Moves all parameters away from where they are, as far as results stay finite."""
        for size in NOISE:
            self.reset()
            self.perturb(self.own, size)
            with suppress(Broken):  # by values that are too large
                if all(bool(value.isfinite().all()) for value in self.compiled(batch, EVALUATION).outputs.values()):
                    return

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.own.items()}

    def parameters_of(self, placed: ir.SiteEdit) -> list[str]:
        """The parameters of an edit at a site; those that it shares with others where it has none of its own."""
        own = f"{placed.edit}/{placed.site.path}/"
        found = [name for name in self.own if name.startswith(own) and self.concerns(name)]
        owners = {owner for instance in placed.instances for owner in instance.owners()}
        return found or [name for name in self.own if name.count("/") > 1 and name.split("/")[1] in owners]

    def concerns(self, name: str) -> bool:
        """Whether a parameter is of the present task."""
        others = [f".tasks.{other}." for other in self.record.task.names if other != self.task]
        return self.task is None or not any(other in name for other in others)

    def sharing(self, placed: ir.SiteEdit, names: Collection[str]) -> list[Place]:
        """The edit at its site, and all others that have one of these parameters."""
        chosen = set(names)
        everyone = [other for other in self.record.site_edits if chosen & set(self.parameters_of(other))]
        return [(other.edit, other.site.path) for other in (placed, *everyone)]


def differentiated(outputs: dict[str, Tensor], mode: Mode, gradients: Callable[[Tensor], dict[str, Tensor]]) -> Run:
    """The results of a call with their gradients, if the mode has them; or the reason why torch has none, such as values that the
    model overwrites.
    """
    run = Run(outputs)
    if mode.gradients and (loss := weighed(outputs)) is not None:
        try:
            run.gradients = gradients(loss)
        except RuntimeError as error:
            if passes(error):
                raise
            run.failure = error_summary(error)
    return run


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
