"""The spec that a configuration of PEFT stands for, with or without the tensors of an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.adapters.files import path_of
from peftc.compiler import plan_edits, sites
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.diagnostic import printable
from peftc.exchange.adapter_import import misfit, statements_of
from peftc.exchange.edited_model import open_model
from peftc.exchange.peft_format import folder as files
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.parameters import ENDS, parameter_shapes, target_parameters
from peftc.exchange.peft_format.reading import read_peft
from peftc.exchange.peft_format.table import type_of
from peftc.exchange.peft_format.targets import is_named, is_target
from peftc.exchange.selector_text import Selectors
from peftc.semantics.expand import expand
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

_SHOWN = ("r", "lora_alpha", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save", "bias")
_WIDTH = 110  # characters of a line of a comment


def spec_of_config(source: str | PathLike[str], model: str | None = None, trust_remote_code: bool = False) -> str:
    """The text of a spec with the equations of an adapter_config.json, at the modules it names.

    Where the folder has tensors, they tell which modules these are, as in `import_adapter`. Without
    them the modules are those that PEFT takes: by the ends of their names, a regular expression, or
    `all-linear`.

    Args:
        source: a folder with adapter_config.json.
        model: the base; by default the one that the configuration names.

    Raises:
        PeftcError: P501-P506 (the base), P545 (no base), P802 (something that no equation says),
            P803 (damaged files), P804 (what does not fit the base).
    """
    folder = path_of(source)
    values = files.read_config(folder / files.CONFIG)
    name = PeftConfig(values).base if model is None else model
    if name is None:
        raise PeftcError(Diagnostic("P545", "the configuration names no base", help="name it with --model"))
    type_of(PeftConfig(values))
    base = open_model(name, trust_remote_code)
    try:
        if any((folder / file).exists() for file in (files.TENSORS, files.PICKLED)):
            tensors = files.read_tensors(folder, files.TENSORS, files.PICKLED)
        else:
            tensors = expected_tensors(PeftConfig(values), base.module)
        incoming = read_peft(PeftConfig(values), tensors, base.module, base.of_linear)
    finally:
        base.close()
    table = sites(name, trust_remote_code=trust_remote_code)
    text = "\n".join(["peft 2", "", *_comment(values, name), *statements_of(incoming, Selectors(table)), ""])
    spec = parse_text(text)
    try:
        plan_edits(expand(spec, include=None), name, trust_remote_code=trust_remote_code)
    except PeftcError as error:
        raise misfit(error) from error
    return print_spec(spec)


def _comment(values: Mapping[str, Any], base: str) -> Iterator[str]:
    """What the spec comes from."""
    shown = [f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in _SHOWN if values.get(key)]
    words = printable(f"{values.get('peft_type')} of PEFT, for {base}: {', '.join(shown)}.").split()
    line = "#"
    for word in words:
        if len(line) + len(word) >= _WIDTH and line != "#":
            yield line
            line = "#"
        line += f" {word}"
    yield line


def expected_tensors(config: PeftConfig, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that PEFT would make, without values. Raises: P802."""
    make = _MAKERS.get(config.type)
    if make is None:
        reason = "which modules and sizes it has is known with its tensors alone: `peftc import` reads both"
        raise refusal("peft_type", config.type, reason)
    for key in ("layers_to_transform", "layers_pattern"):
        if value := config.values.get(key):
            raise refusal(key, value, "without tensors, the modules are known by `target_modules` alone")
    modules = dict(model.named_modules())
    targets = [name for name, module in modules.items() if is_target(config, name, module, model)]
    parameters = target_parameters(config, model) if config.type == "LORA" else {}
    if not targets and not parameters and make is not _nothing:
        raise refusal("target_modules", config.values.get("target_modules"), "the base has no such module")
    tensors: dict[str, Tensor] = {}
    for name in targets:
        for end, shape in make(config, name, modules[name]):
            tensors[f"{files.PREFIX}{name}.{end}"] = _empty(*shape)
    for prefix, name in parameters.items():
        for end, shape in zip(ENDS, parameter_shapes(config, name, model), strict=True):
            tensors[f"{files.PREFIX}{prefix}.{end}"] = _empty(*shape)
    return {**tensors, **_whole(config, model, targets)}


def _size(config: PeftConfig, name: str, module: nn.Module) -> tuple[int, int]:
    """(out, in) of a Linear. Raises: P802."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor):
        kind = f"`{name}` is a {type(module).__name__}, and without tensors only Linears are known"
        raise refusal("target_modules", config.values.get("target_modules"), kind)
    first, second = weight.shape
    return (second, first) if isinstance(module, Conv1D) else (first, second)


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _lora(config: PeftConfig, name: str, module: nn.Module) -> Shapes:
    (rows, columns), rank = _size(config, name, module), config.rank(name)
    yield "lora_A.weight", (rank, columns)
    yield "lora_B.weight", (rows, rank)
    if config.flag("use_dora"):
        yield "lora_magnitude_vector", (rows,)
    if config.flag("lora_bias"):
        yield "lora_B.bias", (rows,)


def _ia3(config: PeftConfig, name: str, module: nn.Module) -> Shapes:
    (rows, columns), inner = _size(config, name, module), config.values.get("feedforward_modules")
    yield "ia3_l", (1, columns) if inner and is_named(inner, name, "feedforward_modules") else (rows, 1)


def _nothing(config: PeftConfig, name: str, module: nn.Module) -> Shapes:
    """LN tuning: the module itself is trained."""
    yield from ((end, tuple(one.shape)) for end, one in module.named_parameters(recurse=False))


_MAKERS: Mapping[str, Callable[[PeftConfig, str, nn.Module], Shapes]] = {
    "LORA": _lora,
    "IA3": _ia3,
    "LN_TUNING": _nothing,
}


def _whole(config: PeftConfig, model: nn.Module, targets: list[str]) -> dict[str, Tensor]:
    """The parameters of the base that are saved: `modules_to_save`, and biases."""
    bias, own = config.values.get("bias", "none"), tuple(f"{name}.bias" for name in targets)
    saved = tuple(config.saved)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        parts = module.split(".")
        is_saved = any(".".join(parts[: i + 1]).endswith(saved) for i in range(len(parts))) if saved else False
        if is_saved or (bias == "all" and name.endswith(".bias")) or (bias == "lora_only" and name in own):
            tensors[f"{files.PREFIX}{name}"] = _empty(*parameter.shape)
    return tensors


def _empty(*shape: int) -> Tensor:
    """A tensor of a shape that takes no memory."""
    return torch.zeros(()).expand(shape)
