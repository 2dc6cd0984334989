"""Copies without data of Linears whose weights are packed: the copy has the matrix, and computes
with it as an nn.Linear does. The code of its class reads data, or asks a library for them.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from peftc.modules.subclasses import subclass


def as_linear(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass under the same name whose forward is F.linear, in the dtype of its input."""
    signature = inspect.signature(cls.forward)
    name = [*signature.parameters][1]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs[name]
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    forward.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return subclass(cls, {"forward": forward})
