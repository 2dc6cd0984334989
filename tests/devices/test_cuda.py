"""On a CUDA device, a compiled model does what it does on the CPU; skipped where there is none."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import StaticCache

import peftc
from peftc.runtime.low_rank import low_rank_linear
from tests import zoo
from tests.verification.pairs import compiled, sampled_pairs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LORA = "peft 1\n\nedit all at layer[*].attn.q | layer[*].attn.v | layer[*].ffn.up { h += lora(x, r=4, alpha=8) }\n"


def run(model: nn.Module, tensors: dict[str, Tensor], device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The first result of a model, and the gradients of what is trained, on the CPU."""
    model.zero_grad()
    result = model(**{k: v.to(device) for k, v in tensors.items()})[0]
    result.square().mean().backward()
    gradients = {n: p.grad.cpu() for n, p in peftc.parameters(model).items() if p.grad is not None}
    return result.detach().cpu(), gradients


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in peftc.parameters(model).values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(0.05 * noise.to(parameter))


@pytest.mark.parametrize(("recipe", "name"), sampled_pairs())
def test_a_recipe_on_a_device_equals_itself_on_the_cpu(recipe: str, name: str) -> None:
    model = compiled(recipe, name)
    perturb(model)
    tensors = zoo.inputs(name, model)
    result, gradients = run(model, tensors, "cpu")
    moved = copy.deepcopy(model).cuda()
    there, gradients_there = run(moved, tensors, "cuda")
    # Rotary positions are computed in float32, and differ between devices.
    torch.testing.assert_close(there, result, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(gradients_there, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("recipe", "name"), sampled_pairs())
def test_a_recipe_that_is_compiled_on_a_device_has_the_first_values_of_the_cpu(recipe: str, name: str) -> None:
    here, there = compiled(recipe, name), compiled(recipe, name, device="cuda")
    parameters = peftc.parameters(there)
    assert {p.device.type for p in parameters.values()} == {"cuda"}
    torch.testing.assert_close({n: p.detach().cpu() for n, p in parameters.items()}, dict(peftc.parameters(here)))


def test_lora_in_bfloat16_is_saved_loaded_and_folded_on_a_device(tmp_path: Path) -> None:
    base = zoo.build("llama", torch.bfloat16).cuda()
    tensors = {k: v.cuda() for k, v in zoo.inputs("llama", base).items()}
    model = peftc.compile(LORA, copy.deepcopy(base), seed=0)
    with torch.no_grad():
        torch.testing.assert_close(model(**tensors)[0], base(**tensors)[0], rtol=0, atol=0)
    perturb(model)
    peftc.save(model, tmp_path / "adapter")
    other = peftc.load(tmp_path / "adapter", copy.deepcopy(base))
    with torch.no_grad():
        edited = model(**tensors)[0]
        torch.testing.assert_close(other(**tensors)[0], edited, rtol=0, atol=0)
        whole = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(whole(**tensors)[0], edited, rtol=0.05, atol=0.15)
        peftc.fold(other)
        torch.testing.assert_close(other(**tensors)[0], edited, rtol=0.05, atol=0.15)


def test_autocast_on_a_device() -> None:
    model = peftc.compile(LORA, zoo.build("llama").cuda(), seed=0)
    perturb(model)
    tensors = {k: v.cuda() for k, v in zoo.inputs("llama", model).items()}
    exact = model(**tensors)[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = model(**tensors)[0]
        result.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in peftc.parameters(model).values())
    torch.testing.assert_close(result.float(), exact, rtol=0.05, atol=0.1)


def _kernels(run: Callable[[], object]) -> str:
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        run()
    return " ".join(event.key for event in events.key_averages())


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [((1, 1), (2048, 512, 16)), ((3, 5), (300, 200, 5)), ((16, 1), (4096, 72, 64)), ((17, 1), (300, 200, 5))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_linear_with_lora_is_one_kernel_for_few_rows(
    dtype: torch.dtype, rows: tuple[int, int], sizes: tuple[int, int, int]
) -> None:
    """Its sums are in float32: it is closer to the exact result than operations are."""
    inputs, outputs, rank = sizes
    torch.manual_seed(0)
    shapes = ((*rows, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank))
    tensors: Any = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
    x, weight, bias, down, up = (tensor.double() for tensor in tensors)
    exact = x @ weight.mT + bias + 0.5 * (x @ down.mT @ up.mT)
    torch.compiler.reset()
    compiled_linear = torch.compile(low_rank_linear, fullgraph=True)

    def compute() -> Tensor:
        with torch.no_grad():
            return compiled_linear(*tensors, factor=0.5)

    def error(result: Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    compute()
    assert ("sum_part" in _kernels(compute)) == (rows != (17, 1))
    assert error(compute()) <= 1.05 * error(low_rank_linear(*tensors, factor=0.5))


def test_tokens_that_a_kernel_decodes() -> None:
    model: Any = peftc.compile(LORA, zoo.build("llama", torch.bfloat16).cuda(), seed=0).eval()
    perturb(model)
    ids = zoo.inputs("llama", model)["input_ids"].cuda()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        torch.compiler.reset()
        decode = torch.compile(model)
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
        steps = [
            decode(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(ids.shape[1])
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.05, atol=0.15)


def test_a_batch_of_models_is_computed_by_operations() -> None:
    torch.manual_seed(0)
    shapes = ((3, 2, 256), (48, 256), (48,), (3, 4, 256), (3, 48, 4))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def one(*tensors: Any) -> Tensor:
        return low_rank_linear(*tensors, factor=2.0)

    batch = torch.vmap(one, (0, None, None, 0, 0))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(batch)(*tensors), batch(*tensors), rtol=0.02, atol=0.5)
