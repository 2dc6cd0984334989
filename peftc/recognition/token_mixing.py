"""Whether a computation mixes tokens: by products of activations, convolutions, scans, or in a child that stays a leaf."""

from __future__ import annotations

import contextlib

import torch
from torch import fx, nn
from torch.nn.modules.padding import _ConstantPadNd  # pyright: ignore[reportPrivateUsage]

from peftc.observation.sample_forward import first_tensor
from peftc.recognition.attention.patterns import is_activation, is_scores
from peftc.recognition.graph import nodes
from peftc.recognition.residual_stream import Stream

_SCANS = frozenset(
    {"cumsum", "cumprod", "logcumsumexp", "roll", "rfft", "irfft", "fft", "fft2", "fftn", "unfold", "conv1d", "conv2d"}
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.LSTM, nn.GRU)


def weighted(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node computes with a parameter of two or more dimensions (those of one entry do not count)."""
    if node.op == "get_attr":
        value = nodes.example(node)
        return isinstance(value, nn.Parameter) and sum(n > 1 for n in value.shape) >= 2
    module = nodes.module_of(node, root)
    return module is not None and any(p.ndim >= 2 for p in module.parameters())


def made_of_weights(node: fx.Node, root: nn.Module) -> bool:
    """Whether a value is a parameter of two or more dimensions, or made of such alone."""
    return not is_activation(node) and any(weighted(n, root) for n in nodes.upstream(node, lambda n: False))


def mixes(body: set[fx.Node], stream: Stream, root: nn.Module) -> bool:
    """Whether one token's part of a sub-layer's result depends on other tokens."""
    return any(not stream.holds(node) and mixing(node, root) for node in body)


def mixes_neighbours(body: set[fx.Node], stream: Stream, root: nn.Module) -> bool:
    """Whether all mixing in a sub-layer is by convolutions and shifts, which a feed-forward part may have, too."""
    return not any(not stream.holds(n) and mixing(n, root) and not is_neighbours(n, root) for n in body)


def is_neighbours(node: fx.Node, root: nn.Module) -> bool:
    module = nodes.module_of(node, root)
    if module is not None:
        return isinstance(module, (_ConstantPadNd, nn.Conv1d, nn.Conv2d))
    return getattr(node.target, "__name__", "") in ("conv1d", "conv2d")


def mixing(node: fx.Node, root: nn.Module) -> bool:
    module = nodes.module_of(node, root)
    if module is not None:
        return mixing_module(node, module)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    value = nodes.example(node)
    counts = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return (name.removeprefix("fft_") in _SCANS and not counts) or is_scores(node)


def mixing_module(node: fx.Node, module: nn.Module) -> bool:
    """A convolution, a shift, or a leaf without weights that is seen to do it (a Fourier transform)."""
    if any(isinstance(m, _CONVOLUTIONS) and kernel(m) != 1 for m in module.modules()):
        return True
    if isinstance(module, _ConstantPadNd):
        return any(module.padding[2:])  # the first two are of features
    if not type(module).__module__.startswith("torch.") and not module.state_dict() and not any(module.children()):
        return seen_mixing(module, nodes.shape(nodes.first_input(node)))
    return False


def seen_mixing(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a change of the last token changes what a module without weights gives for the first."""
    if len(shape) != 3 or shape[1] < 2:
        return False
    before = torch.ones(shape).cumsum(-1)
    after = before.clone()
    after[:, -1] += 1
    with torch.no_grad(), contextlib.suppress(Exception):  # of what takes more than one tensor
        one, other = (first_tensor(module(x)) for x in (before, after))
        return one is not None and other is not None and not torch.equal(one[1][:, 0], other[1][:, 0])
    return False


def kernel(module: nn.Module) -> int:
    size = getattr(module, "kernel_size", 0)
    sizes = size if isinstance(size, tuple) else (size,)
    return max((int(s) for s in sizes), default=0)
