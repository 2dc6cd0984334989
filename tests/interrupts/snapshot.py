"""Everything an operation may change, as texts to compare."""

from __future__ import annotations

import gc
import hashlib
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from peftc.adapters.files import read
from peftc.installation.record import installation_of, is_installed
from tests.interrupts.operations import run


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def snapshot(model: nn.Module, folder: Path) -> dict[str, str]:
    """The model, its outputs, its adapter on disk, and peftc's patches of other packages."""
    digests: dict[str, str] = {"process": process()}
    for name, module in model.named_modules():
        kinds = [hasattr(c, "_peftc_kind") and "_peftc_kind" in vars(c) for c in type(module).__mro__]
        digests[f"class of {name}"] = (
            f"{type(module).__name__} {kinds} {sorted(map(str, vars(module)))} {module.training}"
        )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digests[name] = f"{digest(parameter)} {parameter.requires_grad} {parameter.grad is None}"
    for name, buffer in model.named_buffers():
        digests[f"buffer {name}"] = digest(buffer)
    if is_installed(model):
        record = installation_of(model)
        default = record.choice.default
        digests["specs"] = "\n".join(f"{part.name}: {part.text}" for part in record.specs)
        digests["choice"] = f"{sorted(default.off)} {default.task} {len(record.choice.blocks())} {record.task.names}"
        digests |= {f"original {name}": digest(value) for name, value in record.originals.items()}
    digests["result"] = digest(run(model))
    digests["config"] = str(getattr(model, "config", None))
    return digests | adapter(folder)


def adapter(folder: Path) -> dict[str, str]:
    if not folder.exists():
        return {}
    _, tensors = read(folder)
    return {f"saved {name}": digest(tensor) for name, tensor in tensors.items()}


def process() -> str:
    """Patches of torch and transformers, and the stacks of modes."""
    parts: list[Any] = [
        nn.Module.to.__qualname__,
        nn.Module.to.__module__,
        torch.backends.mha.get_fastpath_enabled.__module__,
        torch.autograd.Function.__dict__["apply"].__func__.__module__,
        torch.jit.ScriptFunction.__call__.__qualname__,
        AttentionInterface.get_interface.__module__,
        torch.zeros.__class__.__name__,
        torch.arange.__class__.__name__,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        gc.isenabled(),
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    ]
    return " ".join(map(str, parts))


def between(now: dict[str, str], before: dict[str, str], after: dict[str, str]) -> str:
    """Where a state is neither of the two; empty where it is one."""
    if now in (before, after):
        return ""
    nearest = min((before, after), key=lambda other: len(differences(now, other)))
    which = "before" if nearest is before else "after"
    return f"not as {which}: {', '.join(differences(now, nearest)[:4])}"


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
