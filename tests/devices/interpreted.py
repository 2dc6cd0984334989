"""Runs the Triton kernels on the CPU, by Triton's interpreter, and prints relative errors as JSON.

TRITON_INTERPRET=1 PYTHONPATH=.venv/triton python -m tests.devices.interpreted
"""

import json
import math
from typing import Any

import torch
from torch import Tensor, nn

from peftc.runtime import fused_low_rank, triton_kernels

FACTOR = 1.5


@torch.library.custom_op("tests::partial_sums", mutates_args=())
def partial_sums(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float, parts: int) -> Tensor:
    """The operation of the package, with a kernel that is interpreted."""
    return triton_kernels.launch(triton_kernels.sum_part, x, weight, down, up, factor, parts)


@partial_sums.register_fake
def _(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float, parts: int) -> Tensor:
    return x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)


def operands(rows: tuple[int, ...], inputs: int, outputs: int, rank: int) -> list[Tensor]:
    """x, W, b, A and B, with NaNs behind each. In float16: the interpreter has no bfloat16."""
    shapes = ((*rows, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank))
    tensors: list[Tensor] = []
    for shape in shapes:
        size = math.prod(shape)
        memory = torch.full((size + 8192,), math.nan, dtype=torch.float16)
        memory[:size] = torch.randn(size)
        tensors.append(memory[:size].view(shape))
    return tensors


def error(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> float:
    exact = x.double() @ weight.double().mT + FACTOR * (x.double() @ down.double().mT @ up.double().mT)
    exact = exact if bias is None else exact + bias.double()
    return float((result.double() - exact).norm() / exact.norm())


def kernel_errors() -> dict[str, float]:
    errors: dict[str, float] = {}
    sizes = ((1, 128, 64, 16, 1), (5, 512, 96, 4, 2), (16, 300, 200, 20, 3), (3, 5, 7, 2, 1), (2, 1000, 64, 33, 7))
    for rows, inputs, outputs, rank, parts in sizes:
        x, weight, _, down, up = operands((rows,), inputs, outputs, rank)
        sums = triton_kernels.launch(triton_kernels.sum_part, x, weight, down, up, FACTOR, parts)
        assert sums.shape == (parts, rows, outputs)
        errors[f"{rows} x {inputs} x {outputs}, r {rank}, {parts} parts"] = error(
            sums.double().sum(0), x, weight, None, down, up
        )
    return errors


def compiled_errors() -> dict[str, float]:
    """Of code that `torch.compile` makes, as on a device with 132 multiprocessors."""

    def linear(*tensors: Any) -> Tensor:
        result = fused_low_rank.fused_low_rank_linear(*tensors, factor=FACTOR)
        assert result is not None
        return result

    triton_kernels.partial_sums = partial_sums
    fused_low_rank.multiprocessors_of = torch.compiler.assume_constant_result(lambda index: 132)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    errors: dict[str, float] = {}
    with torch.no_grad():
        for rows in ((1, 1), (2, 3), (16, 1), (7,)):
            for has_bias in (True, False):
                x, weight, bias, down, up = operands(rows, 2048, 48, 8)
                own = bias if has_bias else None
                result = compiled(x, weight, own, down, up)
                assert result.shape == (*rows, 48)
                assert result.dtype is torch.float16
                errors[f"{rows}, bias: {has_bias}"] = error(result, x, weight, own, down, up)
    return errors


class Linear(nn.Module):
    """With the kernel, or else x."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        result = fused_low_rank.fused_low_rank_linear(x, weight, bias, down, up, FACTOR)
        return x if result is None else result


def exported_operations() -> list[str]:
    """Of `torch.export`, in both of its ways. Call this after `compiled_errors`."""
    tensors = tuple(operands((2, 3), 512, 48, 8))
    with torch.no_grad():
        programs = [torch.export.export(Linear(), tensors, strict=strict) for strict in (False, True)]
    return [str(node.target) for program in programs for node in program.graph.nodes if node.op == "call_function"]


def refusals() -> list[str]:
    """What the kernel is not for."""
    x, weight, bias, down, up = operands((2, 3), 512, 48, 8)

    class Other(nn.Parameter):
        pass

    cases: dict[str, tuple[Any, ...]] = {
        "none": (x, weight, bias, down, up),
        "rows": (x.repeat(1, 6, 1), weight, bias, down, up),
        "rank": (x, weight, bias, down.repeat(9, 1), up.repeat(1, 9)),
        "dtype of x": (x.float(), weight, bias, down, up),
        "dtype of an adapter": (x, weight, bias, down.float(), up.float()),
        "float32": tuple(tensor.float() for tensor in (x, weight, bias, down, up)),
        "rows of a larger weight": (x, torch.randn(48, 600).half()[:, :512], bias, down, up),
        "factors for each row": (x, weight, bias, down.expand(2, 8, 512), up.expand(2, 48, 8)),
        "a class of its own": (x, Other(weight), bias, down, up),
    }
    return [name for name, case in cases.items() if not fused_low_rank.is_served(*case)]


if __name__ == "__main__":
    torch.manual_seed(0)
    errors = {"kernel": kernel_errors(), "compiled": compiled_errors()}
    print(json.dumps({**errors, "exported": exported_operations(), "refused": refusals()}))
