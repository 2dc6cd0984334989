"""Activations of forms that are code, by their names in specs."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATION: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "none": lambda z: z,
}
EPSILON = 1e-5  # of the layer norms, as in nn.LayerNorm
