"""peftc, a model-surgery compiler: fine-tuning methods as equations, compiled onto any model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peftc.diagnostics import Diagnostic, PeftcError, PeftcWarning

if TYPE_CHECKING:
    from peftc.adapters import from_pretrained, fuse, load, push, save, warm_start
    from peftc.attachment import AdapterStore, activate, adapter, attach, attached, combine, detach, reference, swap
    from peftc.compiler import compile, design, parse, plan, remove, sites
    from peftc.exchange import convert, export, import_adapter, inspect
    from peftc.explore import rewrite, trace
    from peftc.folding import fold
    from peftc.illustration import show
    from peftc.installation.contents import graphs, parameters, specs
    from peftc.installation.disable import disabled, set_enabled
    from peftc.merging import merge
    from peftc.passes import apply
    from peftc.standalone import save_standalone
    from peftc.training.calibration import calibrate
    from peftc.training.checkpoints import CheckpointCallback, checkpoint_adapters
    from peftc.training.steps import StepCallback, losses, step
    from peftc.training.tasks import add_task, drop_task, set_task, task, tasks
    from peftc.verification import verify

__version__ = "0.1.0"

_HOMES = {
    "peftc.training.calibration": ("calibrate",),
    "peftc.training.checkpoints": ("CheckpointCallback", "checkpoint_adapters"),
    "peftc.compiler": ("compile", "design", "parse", "plan", "remove", "sites"),
    "peftc.explore": ("rewrite", "trace"),
    "peftc.training.tasks": ("add_task", "drop_task", "set_task", "task", "tasks"),
    "peftc.installation.contents": ("graphs", "parameters", "specs"),
    "peftc.installation.disable": ("disabled", "set_enabled"),
    "peftc.training.steps": ("StepCallback", "losses", "step"),
    "peftc.verification": ("verify",),
    "peftc.adapters": ("from_pretrained", "fuse", "load", "push", "save", "warm_start"),
    "peftc.attachment": (
        "AdapterStore",
        "activate",
        "adapter",
        "attach",
        "attached",
        "combine",
        "detach",
        "reference",
        "swap",
    ),
    "peftc.exchange": ("convert", "export", "import_adapter", "inspect"),
    "peftc.folding": ("fold",),
    "peftc.illustration": ("show",),
    "peftc.merging": ("merge",),
    "peftc.passes": ("apply",),
    "peftc.standalone": ("save_standalone",),
}

__all__ = [
    "AdapterStore",
    "CheckpointCallback",
    "Diagnostic",
    "PeftcError",
    "PeftcWarning",
    "StepCallback",
    "activate",
    "adapter",
    "add_task",
    "apply",
    "attach",
    "attached",
    "calibrate",
    "checkpoint_adapters",
    "combine",
    "compile",
    "convert",
    "design",
    "detach",
    "disabled",
    "drop_task",
    "export",
    "fold",
    "from_pretrained",
    "fuse",
    "graphs",
    "import_adapter",
    "inspect",
    "load",
    "losses",
    "merge",
    "parameters",
    "parse",
    "plan",
    "push",
    "reference",
    "remove",
    "rewrite",
    "save",
    "save_standalone",
    "set_enabled",
    "set_task",
    "show",
    "sites",
    "specs",
    "step",
    "swap",
    "task",
    "tasks",
    "trace",
    "verify",
    "warm_start",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that checking a spec does not import torch."""
    from importlib import import_module

    if name == "forms":  # a package, not a public function: `peftc.forms.register`
        return import_module("peftc.forms")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'peftc' has no attribute {name!r}")
