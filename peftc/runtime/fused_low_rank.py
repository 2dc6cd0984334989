"""A Linear and a low-rank term of its input by one kernel, where a token is decoded on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from peftc.runtime.tile_sizes import OUTPUTS, ROWS

_HIGHEST_RANK = 64  # up to which a block of A is no larger than one of the weight
_MOST_PARTS = 7
_LEAST_INPUTS = 512  # of a part


def fused_low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
) -> Tensor | None:
    """`low_rank_linear` in code that `torch.compile` makes; None where the kernel does not serve.

    The kernel reads W once and x once for both products. It serves where W is read for few rows of
    x, which takes as long as the reading: in 16 bits, without gradients. Its sums are in float32.
    What `torch.export` writes has operations of torch alone.
    """
    if not is_served(x, weight, bias, down, up):
        return None
    outputs, inputs = weight.shape
    parts = parts_of_sum(outputs, inputs, multiprocessors_of(x.device.index))
    if parts == 0:
        return None
    from peftc.runtime.triton_kernels import partial_sums

    rows = x.reshape(-1, inputs)
    # A sum that is written out is fused with what uses the result.
    first, *others = partial_sums(rows, weight, down, up, float(factor), parts).unbind(0)
    for part in others:
        first = first + part
    h = first if bias is None else first + bias
    return h.to(x.dtype).view(*x.shape[:-1], outputs)


def is_served(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> bool:
    dtype = weight.dtype
    return (
        dtype in (torch.bfloat16, torch.float16)
        and x.dtype is dtype
        and down.dtype is dtype
        and up.dtype is dtype
        and (bias is None or bias.dtype is dtype)
        and weight.ndim == 2
        and down.ndim == 2
        and down.shape[0] <= _HIGHEST_RANK
        and x.numel() <= ROWS * weight.shape[1]
        and (type(x) is Tensor or type(x) is nn.Parameter)
        and (type(weight) is nn.Parameter or type(weight) is Tensor)
        and (type(down) is nn.Parameter or type(down) is Tensor)
        and (type(up) is nn.Parameter or type(up) is Tensor)
        and weight.is_contiguous()
        and down.is_contiguous()
        and up.is_contiguous()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_exporting()
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
    )


def parts_of_sum(outputs: int, inputs: int, multiprocessors: int) -> int:
    """Of a sum over the inputs: enough for all multiprocessors, none too short. 0 without any."""
    if multiprocessors == 0:
        return 0
    blocks = -(-outputs // OUTPUTS)
    wanted = -(-3 * multiprocessors // (2 * blocks))
    return max(1, min(wanted, inputs // _LEAST_INPUTS, _MOST_PARTS))


@torch.compiler.assume_constant_result
def multiprocessors_of(index: int) -> int:
    """Of a CUDA device that runs the kernel; 0 of another one."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return 0
    properties = torch.cuda.get_device_properties(index)
    return int(properties.multi_processor_count) if properties.major >= 8 else 0
