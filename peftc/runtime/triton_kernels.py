"""Kernels for CUDA devices, in Triton: imported where there is such a device, and not before."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import register_vmap, triton_op, wrap_triton

from peftc.runtime.tile_sizes import OUTPUTS, ROWS

INPUTS = 128  # of a block of the weight
WARPS, MOST_STAGES = 4, 4


@triton.jit
def sum_part(
    x,
    weight,
    down,
    up,
    sums,
    rows,
    outputs,
    inputs,
    rank,
    factor,
    length,  # of a part
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANK: tl.constexpr,
):
    """One part of the inputs, for one block of outputs: x Wᵀ + factor · x downᵀ upᵀ.

    Both products read x once. The inputs can be split: the result is linear in x.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, RANK)
    has_output, has_row, has_inner = output < outputs, row < rows, inner < rank
    weight += output[:, None].to(tl.int64) * inputs
    low = tl.zeros((RANK, ROWS), tl.float32)
    sum = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, length, INPUTS):
        input = part * length + start + tl.arange(0, INPUTS)
        has_input = input < inputs
        w = tl.load(weight + input[None, :], mask=has_output[:, None] & has_input[None, :], other=0.0)
        a = tl.load(down + inner[:, None] * inputs + input[None, :], has_inner[:, None] & has_input[None, :], 0.0)
        t = tl.load(x + row[:, None] * inputs + input[None, :], has_row[:, None] & has_input[None, :], 0.0).T
        sum = tl.dot(w, t, sum)
        low = tl.dot(a, t, low)
    b = tl.load(up + output[:, None] * rank + inner[None, :], has_output[:, None] & has_inner[None, :], 0.0)
    sum += factor * tl.dot(b, low.to(b.dtype))
    place = sums + (part * rows + row[None, :]) * outputs + output[:, None]
    tl.store(place, sum, mask=has_output[:, None] & has_row[None, :])


def launch(kernel: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float, parts: int) -> Tensor:
    """Runs the kernel, which may be wrapped. Shapes are those of `partial_sums`."""
    rows, (outputs, inputs), rank = x.shape[0], weight.shape, down.shape[0]
    padded_rank = max(16, triton.next_power_of_2(rank))
    sums = x.new_empty((parts, rows, outputs), dtype=torch.float32)
    length = triton.cdiv(triton.cdiv(inputs, parts), INPUTS) * INPUTS
    kernel[(triton.cdiv(outputs, OUTPUTS), parts)](
        x,
        weight,
        down,
        up,
        sums,
        rows,
        outputs,
        inputs,
        rank,
        factor,
        length,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        RANK=padded_rank,
        num_warps=WARPS,
        num_stages=_stages(padded_rank, x),
    )
    return sums


def _stages(rank: int, x: Tensor) -> int:
    """Blocks that are loaded ahead: as many as the shared memory of a multiprocessor holds."""
    if not x.is_cuda:  # an interpreter has no such memory
        return 1
    memory = triton.runtime.driver.active.utils.get_device_properties(x.device.index)["max_shared_mem"]
    return max(1, min(MOST_STAGES, memory // ((OUTPUTS + rank + ROWS) * INPUTS * x.element_size())))


@triton_op("peftc::partial_sums", mutates_args=())
def partial_sums(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float, parts: int) -> Tensor:
    """x Wᵀ + factor · x downᵀ upᵀ, in float32, as the sum over the first dimension of the result.

    Shapes:
        x: (rows, d_in), contiguous as all others are; at most 16 rows
        weight: (d_out, d_in)
        down, up: (r, d_in), (d_out, r)
        result: (parts, rows, d_out)
    """
    return launch(wrap_triton(sum_part), x, weight, down, up, factor, parts)


def _batched_sums(
    info: Any, dimensions: Any, x: Any, weight: Any, down: Any, up: Any, factor: float, parts: int
) -> Any:
    """Batches of tensors are computed by operations."""

    def sums(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        whole = (x @ weight.mT + factor * (x @ down.mT @ up.mT)).float()
        return torch.nn.functional.pad(whole[None], (0, 0, 0, 0, 0, parts - 1))

    return torch.vmap(sums, dimensions[:4], randomness=info.randomness)(x, weight, down, up), 0


register_vmap("peftc::partial_sums", _batched_sums)
