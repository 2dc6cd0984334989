"""Prepares a verification: a copy of the model, a short batch, and values for every form."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.forms.module import has_values
from peftc.installation.contents import states
from peftc.models.media import run_on_sample
from peftc.models.skeleton import sample_inputs
from peftc.training.calibration import calibrate
from peftc.training.tasks import task, tasks
from peftc.verification.forward_modes import training_mode
from peftc.verification.reference.outputs import model_outputs, random_projection

Batch = Mapping[str, Any]
UNSELECTED, UNFILLED = "P540", "P544"


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of a model with its weights. Raises: P601."""
    missing = [name for name, tensor in model.named_parameters() if not has_values(tensor)]
    if missing:
        message = f"`{missing[0]}` has no values, only a shape: nothing can be computed with it"
        help_ = "load all weights; a model whose weights are offloaded is verified before it is dispatched"
        raise PeftcError(Diagnostic("P601", message, help=help_))
    try:
        other = copy.deepcopy(model)
    except Exception as error:  # copying an attribute of a module may raise anything
        message = f"this {type(model).__name__} cannot be copied, and it is not verified in place"
        raise PeftcError(Diagnostic("P601", message, notes=(f"{type(error).__name__}: {error}",))) from error
    for (name, module), (_, same) in zip(model.named_modules(), other.named_modules(), strict=True):
        if type(module) is not type(same):
            message = f"the copy of `{name}` is not a {type(module).__name__}, so it may compute something else"
            raise PeftcError(Diagnostic("P601", message))
    return other


@shielded
def without_autocast() -> Generator[None]:
    """Turns autocast off: its cached casts of parameters would outlive changes of their values."""
    with ExitStack() as stack:
        for device in ("cpu", torch.accelerator.current_accelerator()):
            if device is not None and torch.is_autocast_enabled(str(device)):
                stack.enter_context(torch.autocast(str(device), enabled=False))
        yield


def require_runnable(base: nn.Module, batch: Batch) -> None:
    """Raises: P509 if a model does not run on a batch, or returns nothing but NaN."""
    try:
        with torch.no_grad():
            outputs = model_outputs(base(**batch))
    except Exception as error:  # the model's own code may raise anything
        message = f"this {type(base).__name__} does not run on the batch"
        raise PeftcError(Diagnostic("P509", message, notes=(f"{type(error).__name__}: {error}",))) from error
    if outputs and all(bool(value.isnan().all()) for value in outputs.values()):
        message = f"without any edit, all outputs of this {type(base).__name__} for the batch are NaN"
        raise PeftcError(Diagnostic("P509", message, help="look for NaN entries in the weights of the base"))


# Inputs -------------------------------------------------------------------------------------------


def sample_batch(model: nn.Module, sample: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`sample`, else random inputs like those of the tracer. Raises: P507 for unknown inputs."""
    if sample is not None:
        return dict(sample)
    fake = fake_copy(model)
    generator = torch.Generator().manual_seed(0)
    try:
        batch = {name: _random_like(value, model, generator) for name, value in sample_inputs(fake).items()}
        with torch.no_grad():
            model(**batch)
        return batch
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # P507, or what the model's own code raises: it may need an image or a sound
        pass
    with fake_mode(fake):
        inputs, _ = run_on_sample(fake, None, lambda arguments: fake(**arguments))
    return {name: _random_like(value, model, generator) for name, value in inputs.items()}


def _random_like(value: Any, model: nn.Module, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    if not isinstance(value, FakeTensor):  # integers that came with an image, such as placeholder tokens and sizes
        return value
    # Token ids without special tokens, most of which have the smallest ids.
    count = next(filter(None, map(_vocabulary_size, model.modules())), 2)
    config: Any = getattr(model, "config", None)
    special = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask"))
    first = 1 + max((id for id in special if isinstance(id, int) and id < count // 2), default=0)
    return torch.randint(first if first < count else 0, count, value.shape, generator=generator).to(value.device)


def _vocabulary_size(module: nn.Module) -> int | None:
    try:
        return getattr(module.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # a model of several towers, or a module of torch
        return None


# Forms that cannot compute yet --------------------------------------------------------------------


def fill_forms(model: nn.Module, batch: Batch) -> None:
    """Selects entries and fills adapters where a form refuses to train without them."""
    names = tasks(model)
    for name in names if len(names) > 1 else (None,):
        with task(model, name) if name is not None else nullcontext():
            code = _training_refusal(model, batch)
            if code == UNSELECTED:
                try:
                    calibrate(model, [batch], loss=_loss)
                except (PeftcError, MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # the model's own code may raise anything
                    kind = type(model).__name__
                    message = f"a selection needs gradients, and this {kind} does not train on the batch"
                    raise PeftcError(
                        Diagnostic("P509", message, notes=(f"{type(error).__name__}: {error}",))
                    ) from error
            elif code == UNFILLED:
                _fill_states(model)


def _training_refusal(model: nn.Module, batch: Batch) -> str | None:
    try:
        with training_mode(model, True), torch.no_grad():
            model(**batch)
    except PeftcError as error:
        if error.diagnostics[0].code in (UNSELECTED, UNFILLED):
            return error.diagnostics[0].code
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # the model does not run in training mode, which the checks report
        pass
    return None


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss = random_projection(model_outputs(model(**batch)))
    assert loss is not None
    return loss


@torch.no_grad()
def _fill_states(model: nn.Module) -> None:
    """Random values for states that are otherwise read from files."""
    generator = torch.Generator().manual_seed(0)
    for value in states(model).values():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator) / max(1, value.shape[-1]) ** 0.5
            value.copy_(noise.to(value.device, value.dtype))
        elif value.dtype == torch.bool:
            value.fill_(True)
