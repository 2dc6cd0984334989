"""Whether a module computes W x + b, as a fold into its parameters takes for granted.

PyTorch's own modules do. A class, or a module, with a `forward` of its own is run on a few vectors:
it may scale the product, or change what it multiplies.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef
from peftc.forms.module import has_values
from peftc.modules.instance_forward import code_class
from peftc.runtime.parameters import dense

_VECTORS = 3


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whatever edits did to it."""
    generated = getattr(type(module), "_peftc_kind", None)
    return type(module) if generated is None else generated.base


def is_edited(module: nn.Module) -> bool:
    """Whether edits are in the forward of the module itself, and not in code that calls it."""
    return hasattr(type(module), "_peftc_kind")


def computes_product(module: nn.Module, weight: WeightRef) -> bool:
    """Whether the forward of a module, or of its class, multiplies by its weight and adds its bias,
    whatever values the weight has: code may limit them.

    A forward that fails on vectors (on ids, of an embedding) counts as one that does not.
    """
    cls = base_class(module) if is_edited(module) else code_class(module)
    if cls.forward.__module__.startswith("torch.nn."):
        return True
    stored = dense(getattr(module, weight.attribute).detach())
    if not has_values(stored) or not stored.is_floating_point():
        return True  # folding refuses it with a reason of its own
    try:
        with torch.no_grad():
            is_plain = type(vars(module)["_parameters"].get(weight.attribute)) is nn.Parameter
            others = (_other_values(stored),) if is_plain else ()  # what packs or computes a matrix gives no others
            return all(_is_product(cls, module, weight, values) for values in (stored, *others))
    except Exception:  # whatever the class's own code raises
        return False


def _is_product(cls: type[nn.Module], module: nn.Module, weight: WeightRef, values: Tensor) -> bool:
    own = cls.__new__(cls)  # whose weight the code may change
    parameters = vars(module)["_parameters"].copy()
    if type(parameters.get(weight.attribute)) is nn.Parameter:
        parameters[weight.attribute] = nn.Parameter(values.clone(), requires_grad=False)
    vars(own).update(vars(module) | {"_parameters": parameters})
    matrix = values.t() if weight.transposed else values
    x = _vectors(own, matrix)
    product = _product(own, matrix, x)
    result = cls.forward(own, x)
    return result.shape == product.shape and is_close(result, product)


def _other_values(stored: Tensor) -> Tensor:
    """Large values of other signs."""
    numbers = torch.arange(stored.numel(), device=stored.device, dtype=torch.float32).reshape(stored.shape)
    return -64 * (stored + numbers.mul(1.3).cos().to(stored.dtype))


def _vectors(module: nn.Module, matrix: Tensor) -> Tensor:
    """Features that differ between the vectors. Shapes: (vectors, d_in); of an embedding, ids."""
    if isinstance(module, nn.Embedding):
        return torch.arange(min(_VECTORS, module.num_embeddings), device=matrix.device)
    width = math.prod(matrix.shape[1:])
    numbers = torch.arange(_VECTORS * width, device=matrix.device, dtype=torch.float32)
    x = numbers.mul(0.7).sin().to(matrix.dtype)
    return x.reshape(_VECTORS, *matrix.shape[1:])


def _product(module: nn.Module, matrix: Tensor, x: Tensor) -> Tensor:
    """The same by PyTorch's own forward, or by the equation."""
    if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.")).forward(module, x)
    return nn.functional.linear(x, matrix, cast("Tensor | None", getattr(module, "bias", None)))


def is_close(result: Tensor, product: Tensor) -> bool:
    """Up to rounding in the dtype of the product."""
    tolerance = 64 * torch.finfo(product.dtype).eps
    difference, size = (result.double() - product.double()).abs().max(), product.double().abs().max()
    return bool(difference <= tolerance * size.clamp(min=torch.finfo(product.dtype).tiny))
