"""Checkpoints of training loops that do not save models by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from peftc.adapters.checkpoints import load_tensors, save_checkpoint
from peftc.adapters.files import read
from peftc.adapters.metadata import METADATA
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.record import is_installed


def checkpoint_adapters(accelerator: Any) -> None:
    """Makes `save_state` and `load_state` of accelerate write and read adapters alone.

    The adapter of a compiled model is in the folder `adapter` of the checkpoint (`adapter_1` for
    the second model), in the place of `model.safetensors`. Without this call a checkpoint has all
    weights, and is as exact. Under FSDP and DeepSpeed, where accelerate writes shards, it has all
    weights in any case.

    Args:
        accelerator: an `accelerate.Accelerator`, before or after `prepare`.

    Raises:
        PeftcError: P545 (no accelerator). What it calls raises as `load` and `save`.
    """
    if not hasattr(accelerator, "register_save_state_pre_hook"):
        message = f"`checkpoint_adapters` takes an `Accelerator`, not a {type(accelerator).__name__}"
        raise PeftcError(Diagnostic("P545", message, help="peftc.checkpoint_adapters(accelerator)"))
    accelerator.register_save_state_pre_hook(partial(_save, accelerator))
    accelerator.register_load_state_pre_hook(partial(_load, accelerator))


def _save(accelerator: Any, models: list[nn.Module], weights: list[Any], directory: str) -> None:
    for i, model, folder in _compiled(accelerator, models, directory):
        if i < len(weights):  # which accelerate does not write then
            is_main = accelerator.is_main_process
            save_checkpoint(model, folder, state_dict=weights[i], is_main_process=is_main)
            del weights[i]


def _load(accelerator: Any, models: list[nn.Module], directory: str) -> None:
    for i, model, folder in _compiled(accelerator, models, directory):
        if (folder / METADATA).is_file():
            load_tensors(model, read(folder)[1])
            del models[i]


def _compiled(accelerator: Any, models: list[nn.Module], directory: str) -> Iterator[tuple[int, nn.Module, Path]]:
    """The compiled ones of the models from the last to the first, with their folders."""
    for i in reversed(range(len(models))):
        model = accelerator.unwrap_model(models[i], keep_torch_compile=False)
        if is_installed(model):
            yield i, model, Path(directory) / ("adapter" if i == 0 else f"adapter_{i}")


class CheckpointCallback(TrainerCallback):
    """Lets a trainer of sentence-transformers resume, and take the best, from adapters.

    Its trainers load checkpoints by the class of the whole model, where transformers' `Trainer`
    calls `model.load_state_dict`, which needs no callback.

    `trainer.add_callback(peftc.CheckpointCallback(trainer))`

    Args:
        trainer: whose `_load_from_checkpoint` reads adapters from now on.
    """

    def __init__(self, trainer: Any) -> None:
        trainer._load_from_checkpoint = partial(_load_modules, trainer)


def _load_modules(trainer: Any, checkpoint: str) -> None:
    """Reads the modules of a SentenceTransformer: an adapter, or all their values."""
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    for i, (_, module) in enumerate(model._modules.items()):
        name = "" if i == 0 and getattr(module, "save_in_root", False) else f"{i}_{type(module).__name__}"
        inner = next(filter(is_installed, module.modules()), None)
        if inner is not None:
            load_tensors(inner, read(Path(checkpoint) / name)[1])
        elif any(True for _ in module.parameters()):
            module.load_state_dict(type(module).load(checkpoint, subfolder=name).state_dict())
