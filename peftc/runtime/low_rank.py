"""A Linear and a low-rank term of its input, with one backward for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from peftc.equation_code.functions import add_to, cast_like
from peftc.runtime.fused_low_rank import fused_low_rank_linear

# From this number of entries on, a sum in place is faster: the result leaves a core's cache.
_LARGE = 1 << 16
# Bound here: a look-up through four modules costs as much as a test itself.
_has_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]
_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
_script_state = torch._C._get_tracing_state  # pyright: ignore[reportPrivateUsage]


def low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float = 1.0
) -> Tensor:
    """x Wᵀ + b + factor · x downᵀ upᵀ, in the dtype of x Wᵀ.

    Shapes:
        x: (…, d_in)
        weight: (d_out, d_in)
        bias: (d_out,)
        down, up: (r, d_in), (d_out, r)
        result: (…, d_out)
    """
    if torch.is_grad_enabled():
        if (x.requires_grad or down.requires_grad or up.requires_grad) and _is_plain(x, weight, bias, down, up):
            result: Any = LowRankLinear.apply(x, weight, bias, down, up, factor)
            return result
        h = F.linear(x, weight, bias)
    else:
        if (
            x.is_cuda
            and is_compiling()
            and (fused := fused_low_rank_linear(x, weight, bias, down, up, factor)) is not None
        ):
            return fused
        h = F.linear(x, weight, bias)
        if h.numel() >= _LARGE and h.is_contiguous() and _is_plain(x, weight, bias, down, up):
            inner = F.linear(x, down)
            h.view(-1, h.shape[-1]).addmm_(inner.view(-1, inner.shape[-1]), up.t(), alpha=factor)
            return h
    return add_to(h, F.linear(F.linear(cast_like(x, down), down), up), factor)


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> bool:
    """Whether the term can be added in place: for plain tensors of one dtype.

    `torch.compile` fuses operations by itself; autocast and transforms of functions have rules for
    operations. What a checkpoint computes again takes the same way, whatever modes are left then.
    """
    dtype = weight.dtype
    return (
        not is_compiling()
        and x.dtype is dtype
        and down.dtype is dtype
        and up.dtype is dtype
        and (bias is None or bias.dtype is dtype)
        and (type(x) is Tensor or type(x) is nn.Parameter)
        and (type(weight) is nn.Parameter or type(weight) is Tensor)
        and (type(down) is nn.Parameter or type(down) is Tensor)
        and (type(up) is nn.Parameter or type(up) is Tensor)
        and not _has_autocast()
        and _transform() is None
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        and not _script_state()
    )


class LowRankLinear(torch.autograd.Function):
    """y = x Wᵀ + b + s · x downᵀ upᵀ. The low-rank terms of y and of the gradient of x are added
    in place: no second tensor of their size is written.

    Backward, with g = ∂L/∂y and u = g up:
        ∂L/∂x = g W + s · u down, ∂L/∂down = s · uᵀ x, ∂L/∂up = s · gᵀ (x downᵀ),
        ∂L/∂W = gᵀ x, ∂L/∂b = Σ g
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, bias, down, up, factor = inputs
        rows = x.reshape(-1, x.shape[-1])
        inner = torch.mm(rows, down.t())
        y = F.linear(rows, weight, bias).addmm_(inner, up.t(), alpha=factor)
        # The result is no view, as autograd tells it: code after it may write into it.
        size = (*x.shape[:-1], weight.shape[0])
        y = y.resize_(size) if y.is_contiguous() else y.reshape(size).clone()
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, down, up, inner = ctx.saved_tensors
        of_x, of_weight, of_bias, of_down, of_up, _ = ctx.needs_input_grad
        g, rows = gradients[0].reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        u = torch.mm(g, up) if of_x or of_down else g
        if torch.is_grad_enabled():  # for a second backward: what was saved has no history
            inner = torch.mm(rows, down.t())
        # With beta = 0 the first operand of `addmm` is its size alone.
        return (
            torch.mm(g, weight).addmm_(u, down, alpha=ctx.factor).view(x.shape) if of_x else None,
            torch.mm(g.t(), rows) if of_weight else None,
            g.sum(0) if of_bias else None,
            torch.addmm(down, u.t(), rows, beta=0, alpha=ctx.factor) if of_down else None,
            torch.addmm(up, g.t(), inner, beta=0, alpha=ctx.factor) if of_up else None,
            None,
        )
