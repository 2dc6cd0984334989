"""Linears whose weights are packed: whole numbers, or several values in each, which the code of
their class alone reads.

Such a weight has neither the shape nor the dtype of the matrix (out, in) that it stands for.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError

PACKED = "_peftc_packed"  # an attribute of a weight without data that stands for a packed one
_BITSANDBYTES = frozenset({"Params4bit", "Int8Params"})  # classes of parameters, which transformers dequantises

_REPACKS = "support_avx512bf16_for_cpu"  # an attribute of bitsandbytes' Linears of 4 bits


def packed_shape(module: nn.Module) -> tuple[int, int] | None:
    """(out, in) of the matrix that a packed weight stands for; None for any other module.

    A packed weight has no floating-point dtype, or one column (bitsandbytes with another
    `quant_storage`). Weights of tensor classes, as torchao's, have the shape of their matrix.
    """
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return None
    weight: Any = vars(module)["_parameters"].get("weight")
    if weight is None:
        return None
    sizes = module.out_features, module.in_features
    is_column = weight.ndim == 2 and weight.shape[1] == 1 < sizes[1] and weight.numel() < sizes[0] * sizes[1]
    return sizes if not weight.is_floating_point() or is_column or is_stand_in(weight) else None


def is_stand_in(weight: object) -> bool:
    """Whether a weight without data stands for a packed one."""
    return PACKED in getattr(weight, "__dict__", ())


def unpacked_weight(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix (out, in) that a packed weight stands for, as its library dequantises it.

    Raises: P437 if no library is known that does.
    """
    weight: Any = vars(module)["_parameters"]["weight"]
    if not is_unpackable(weight):
        raise PeftcError(unknown_packing("weight", module))
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        module.state_dict()  # brings the order back that a kernel for CPUs has changed
    if type(weight).__name__ in _BITSANDBYTES:
        dequantize = import_module("transformers.integrations.bitsandbytes").dequantize_bnb_weight
        value = dequantize(weight, getattr(module, "state", None))
    else:
        value = weight.dequantize()
    return value.detach() if dtype is None else value.detach().to(dtype)


def is_unpackable(weight: Tensor) -> bool:
    """Whether a library is known that dequantises a packed weight, or its class does."""
    return type(weight).__name__ in _BITSANDBYTES or type(weight).dequantize is not Tensor.dequantize


def unknown_packing(name: str, module: nn.Module) -> Diagnostic:
    """P437: the values of a packed weight cannot be read."""
    weight: Any = vars(module)["_parameters"]["weight"]
    stored = f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}"
    message = f"`{name}` is packed ({stored}), and only the code of {type(module).__name__} reads it"
    help_ = "edit `h` or `x` there, as in `h += lora(x, r=8)`, or quantise the base by bitsandbytes or torchao"
    return Diagnostic("P437", message, help=help_)


def repacking(modules: Iterable[tuple[str, nn.Module]]) -> Diagnostic | None:
    """P438 where a kernel of bitsandbytes for CPUs repacks weights of 4 bits, or has; else None."""
    for name, module in modules:
        if _REPACKS not in module.__dict__:
            continue
        weight: Any = vars(module)["_parameters"].get("weight")
        is_repacked = getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False)
        if weight is not None and weight.device.type == "cpu" and (vars(module)[_REPACKS] or is_repacked):
            message = f"bitsandbytes repacks `{name}.weight` in evaluation, and no gradient passes it from then on"
            note = "its product for CPUs with AVX512-BF16 has no backward"
            help_ = f"to train, set `{_REPACKS} = False` on its Linears before the first call"
            return Diagnostic("P438", message, notes=(note,), help=help_)
    return None


def packed_shapes(modules: Iterable[nn.Module]) -> dict[int, tuple[int, int]]:
    """The shapes (out, in) that packed weights stand for, by the `id` of the parameter."""
    modules = list(modules)
    kinds = {kind for kind in {type(module) for module in modules} if issubclass(kind, nn.Linear)} - {nn.Linear}
    shapes = [(module, packed_shape(module)) for module in modules if type(module) in kinds] if kinds else []
    return {id(vars(module)["_parameters"]["weight"]): shape for module, shape in shapes if shape is not None}


def packed_names(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The shapes (out, in) that packed weights stand for, by the names of the parameter."""
    shapes = ((name, packed_shape(module)) for name, module in model.named_modules(remove_duplicate=False))
    return {f"{name}.weight".lstrip("."): shape for name, shape in shapes if shape is not None}


def packed_dtype(modules: Iterable[nn.Module]) -> torch.dtype:
    """The dtype of what goes through packed Linears: that of the model's other parameters."""
    modules = list(modules)
    packed = packed_shapes(modules)
    parameters = (p for module in modules for p in module.parameters(recurse=False))
    dtypes = (p.dtype for p in parameters if p.is_floating_point() and id(p) not in packed)
    return next(dtypes, torch.float32)
