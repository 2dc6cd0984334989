"""The structure of a model without peftc: the modules whose softmax output enters a product, and
those named feed-forward.

The checks compare peftc's refusals with it: `there is no attention here` is right only if no
softmax reaches a product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.families.forward import run

_SOFTMAX = {torch.softmax, F.softmax, torch.Tensor.softmax, torch._softmax, torch.special.softmax}
_PRODUCT = {torch.matmul, torch.Tensor.matmul, torch.bmm, torch.Tensor.bmm, torch.einsum, torch.functional.einsum}
_PRODUCT |= {torch.Tensor.__matmul__, torch.baddbmm}
_FUSED = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_FEED_FORWARD = re.compile(
    r"(^|_)(mlp|ffn?|feed_forward|feedforward|fc1|fc_in|wi|wi_0|lin1|dense_h_to_4h|intermediate|moe|experts|feed_forward_\w+|pwconv1"
    r"|ffn\w*|mlp\w*|linear_in|block_sparse_moe|positionwise_feed_forward|channel_mixer|dense_relu_dense)$"
)


@dataclass(frozen=True)
class Observation:
    attending: frozenset[str]  # innermost modules in whose forward a softmax is multiplied with values
    feed_forward: frozenset[str]  # modules of repeated blocks whose name says so
    projecting: bool  # an attending module holds modules with matrices: its q, k, v are no bare parameters
    repeated: bool  # some container holds two modules of one class

    def has(self, step: str) -> bool:
        return {
            "attn": bool(self.attending),
            "projection": self.projecting,
            "ffn": bool(self.feed_forward),
            "layer": self.repeated,
        }[step]


def observe(model: nn.Module, inputs: Mapping[str, Any]) -> Observation:
    """Observes one forward of the base model."""
    attention = _Attention()
    with _paths(model, attention), attention:
        run(model, inputs)
    projecting = any(_projects(model.get_submodule(_outermost(name))) for name in attention.modules)
    return Observation(frozenset(attention.modules), frozenset(_feed_forward(model)), projecting, _repeats(model))


def _outermost(name: str) -> str:
    """The largest part of a repeated block around a module: `layer.0.attention` for
    `layer.0.attention.core`.
    """
    parts = name.split(".")
    blocks = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: blocks[-1] + 2]) if blocks else name


def _projects(module: nn.Module) -> bool:
    return any(getattr(getattr(m, "weight", None), "ndim", 0) >= 2 for m in module.modules())


class _Attention(TorchFunctionMode):
    """Follows softmax outputs through casts and dropout into a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.modules: set[str] = set()
        self.weights: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _FUSED:
            self._note()
            return out
        tensors = [a for a in _flat(args) if isinstance(a, torch.Tensor)]
        if func in _SOFTMAX:
            if isinstance(out, torch.Tensor) and out.ndim >= 3:
                self.weights[id(out)] = out
        elif func in _PRODUCT:
            if any(id(a) in self.weights for a in tensors):
                self._note()
        elif (
            isinstance(out, torch.Tensor)
            and tensors
            and id(tensors[0]) in self.weights
            and (
                out.numel() == tensors[0].numel() or func is torch.Tensor.__getitem__
            )  # attention sinks are sliced off
        ):
            self.weights[id(out)] = out
        return out

    def _note(self) -> None:
        self.modules.add(self.path[-1] if self.path else "")


def _flat(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from _flat(arg)
        else:
            yield arg


@contextmanager
def _paths(model: nn.Module, attention: _Attention) -> Iterator[None]:
    """While the block runs, `attention.path` is the stack of modules being called. Leaf modules
    (dropout, softmax) count as their parents.
    """
    handles = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            continue
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: attention.path.append(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: attention.path.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _feed_forward(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_modules():
        *inside, last = name.split(".")
        if any(step.isdigit() for step in inside) and _FEED_FORWARD.search(last.lower()):
            yield name


def _repeats(model: nn.Module) -> bool:
    for module in model.modules():
        kinds = [type(m) for m in module.children() if any(True for _ in m.parameters())]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(kinds) != len(set(kinds)):
            return True
    return False
