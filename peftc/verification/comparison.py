"""A compiled model and the reference model of its spec, called on the same batch."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.forms.module import seeded
from peftc.installation.contents import parameters
from peftc.installation.record import installation_of
from peftc.models.names import error_summary
from peftc.models.samples import copy_sample
from peftc.planning import ir
from peftc.training.tasks import task
from peftc.verification.forward_modes import EVALUATION, ForwardMode, training_mode, without_checkpointing
from peftc.verification.reference.interpreter import Interpreter
from peftc.verification.reference.locations import EditKey, ReferenceUnavailable, key_of
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.reference.outputs import (
    Difference,
    Recorder,
    first_difference,
    model_outputs,
    random_projection,
)

Batch = Mapping[str, Any]
NOISE = (0.5, 0.05, 0.005)  # relative to the size of a parameter; smaller where outputs are not finite

STACKS = {  # token ids, embedded tokens and mask of the decoder of an encoder-decoder model, or of any other stack
    "": ("input_ids", "inputs_embeds", "attention_mask"),
    "decoder": ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
}
PER_TOKEN = ("position_ids", "token_type_ids", "labels", "decoder_position_ids", "cache_position")


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
    """An error inside the block is a `CompiledModelError` if the same call of the base succeeds."""
    try:
        yield
    except PROPAGATED:
        raise
    except Exception as error:
        call_base()
        raise CompiledModelError(f"the compiled model raises {error_summary(error)}") from error


@dataclass
class CallResult:
    """Floating-point outputs, and the gradients of a linear function of them by parameter."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradient_error: str = ""  # why there are no gradients


class Comparison:
    """Calls a copy of a compiled model and the reference model, with equal parameters of edits."""

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

    def selected_task(self) -> AbstractContextManager[object]:
        return task(self.compiled, self.task) if self.task is not None else nullcontext()

    def run_compiled(self, mode: ForwardMode, recorder: Recorder | None = None) -> CallResult:
        """Calls without hooks if there is no recorder: they may disable fast paths."""
        with ExitStack() as stack:
            stack.enter_context(self.selected_task())
            stack.enter_context(mode.applied_to(self.compiled))
            if recorder is not None:
                stack.enter_context(recorder.recording(self.compiled, self.module_names))
            stack.enter_context(self.own_errors(mode))
            return self._result(model_outputs(self.compiled(**copy_sample(self.batch))), mode)

    def own_errors(self, mode: ForwardMode) -> AbstractContextManager[None]:
        def call_base() -> None:
            with unavailable_on_error("the model without its edits does not run: "), mode.applied_to(self.base):
                self.base(**copy_sample(self.batch))

        return compiled_model_errors(call_base)

    def run_reference(self, mode: ForwardMode, recorder: Recorder | None = None) -> CallResult:
        """Evaluates the spec on the base. Raises: ReferenceUnavailable."""
        mode = EVALUATION if mode.inference else mode  # inference mode is for the compiled model
        with ExitStack() as stack:
            stack.enter_context(self.selected_task())
            stack.callback(self.compiled.eval)
            stack.enter_context(training_mode(self.compiled, mode.train))  # its form modules are called
            stack.enter_context(without_checkpointing())
            stack.enter_context(mode.applied_to(self.base))
            if recorder is None:
                stack.enter_context(self.reference.active())
            else:
                stack.enter_context(self.reference.active(recorder.record_edit))
                stack.enter_context(recorder.recording(self.base, self.module_names))
            prompts = Prompts(self.base, self.reference.prompts, self.reference.interpreter, copy_sample(self.batch))
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
        return first_difference(self.run_reference(EVALUATION).outputs, self.run_compiled(EVALUATION).outputs)

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


class Prompts:
    """Prompts of one call of the base. `arguments`: those of the batch, with prompts in front."""

    def __init__(
        self, base: nn.Module, site_edits: Sequence[ir.SiteEdit], interpreter: Interpreter, batch: Mapping[str, Any]
    ) -> None:
        self.base, self.interpreter = base, interpreter
        self.arguments = dict(batch)
        self.is_encoder_decoder = bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
        self.prompt_lengths = {"": 0, "decoder": 0}
        stacks = STACKS.items() if site_edits else ()
        self.lengths = {stack: batch[ids].shape[1] for stack, (ids, _, _) in stacks if ids in batch}
        for site_edit in site_edits:
            self._prepend(site_edit)

    def _prepend(self, site_edit: ir.SiteEdit) -> None:
        stack = "decoder" if self.is_encoder_decoder and site_edit.site.path.startswith("decoder.") else ""
        ids, embeds, mask = STACKS[stack]
        visible = self.arguments.get(mask)
        if len(site_edit.assigns) > 1 or site_edit.lets or any(name in self.arguments for name in PER_TOKEN):
            raise ReferenceUnavailable("the batch has other arguments per token, which would need rows for the prompt")
        if isinstance(visible, Tensor) and not bool((visible != 0).all()):
            raise ReferenceUnavailable("the batch has padding, and a prompt stands before the first token of each row")
        if embeds not in self.arguments:
            if ids not in self.arguments:
                raise ReferenceUnavailable(f"the batch has no `{ids}`")
            self.arguments[embeds] = self.base.get_submodule(site_edit.site.module)(self.arguments.pop(ids))
        value = next(iter(site_edit.assigns)).value
        assert isinstance(value, ir.Concat)
        h = self.arguments[embeds]
        self.interpreter.forget(site_edit.site.root)
        parts = [part for part in value.parts if not isinstance(part, ir.Read)]
        rows = [self.interpreter.evaluate(site_edit, part, h).expand(len(h), -1, -1).to(h.dtype) for part in parts]
        self.prompt_lengths[stack] += (count := sum(part.shape[1] for part in rows))
        self.arguments[embeds] = torch.cat([*rows, h], 1)
        if isinstance(visible, Tensor):
            self.arguments[mask] = torch.cat([visible.new_ones(len(visible), count), visible], 1)

    def without_prompt_rows(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Removes the rows of the prompt, except from outputs of an encoder."""
        stack = "decoder" if self.is_encoder_decoder else ""
        count = self.prompt_lengths[stack]
        length = self.lengths.get(stack, 0) + count
        return {
            name: value[:, count:]
            if count and value.ndim > 1 and value.shape[1] == length and not name.startswith("encoder")
            else value
            for name, value in outputs.items()
        }
