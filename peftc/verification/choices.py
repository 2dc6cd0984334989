"""What a form has to be given before it computes anything: entries that are chosen from data, adapters of other tasks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.contents import states
from peftc.training.calibration import calibrate
from peftc.training.tasks import task, tasks
from peftc.verification.batches import Batch
from peftc.verification.witness.determinism import training
from peftc.verification.witness.outputs import results as results_of
from peftc.verification.witness.outputs import weighed

UNCHOSEN, UNFILLED = "P540", "P544"


def choose(model: nn.Module, batch: Batch) -> None:
    """Makes a copy compute, where training is refused because something has not been chosen, or not been read."""
    names = tasks(model)
    for name in names if len(names) > 1 else (None,):
        with task(model, name) if name is not None else nullcontext():
            code = refusal(model, batch)
            if code == UNCHOSEN:
                chosen(model, batch)
            elif code == UNFILLED:
                fill(model)


def chosen(model: nn.Module, batch: Batch) -> None:
    """Chooses by one batch. Raises: P509 where the model cannot be calibrated on it."""
    try:
        calibrate(model, [batch], loss=loss)
    except (PeftcError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the model's own code raises
        message = f"nothing can be chosen by the batch: this {type(model).__name__} does not train on it"
        raise PeftcError(Diagnostic("P509", message, notes=(f"{type(error).__name__}: {error}",))) from error


def refusal(model: nn.Module, batch: Batch) -> str | None:
    """The code with which a call in training mode is refused, if it is one of the two."""
    try:
        with training(model, True), torch.no_grad():
            model(**batch)
    except PeftcError as error:
        if error.diagnostics[0].code in (UNCHOSEN, UNFILLED):
            return error.diagnostics[0].code
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # of a model that does not run in training; the checks say so
        return None
    return None


def loss(model: nn.Module, batch: Any) -> Tensor:
    value = weighed(results_of(model(**batch)))
    assert value is not None
    return value


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random values in place of those that are read from files."""
    generator = torch.Generator().manual_seed(0)
    for value in states(model).values():
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator) / max(1, value.shape[-1]) ** 0.5
            value.copy_(drawn.to(value.device, value.dtype))
        elif value.dtype == torch.bool:
            value.fill_(True)
