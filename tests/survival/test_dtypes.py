"""Casts, devices and autocast: edit parameters follow the base's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.matrix import checkerboard
from tests.survival.harness import (
    GENERATING,
    SOME,
    SPECS,
    close,
    compiled,
    freshly_compiled,
    model_inputs,
    same,
    state,
)

pairs = pytest.mark.parametrize(("name", "spec"), SOME)

CASTS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "to": (lambda model: model.to(torch.float64), torch.float64),
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
}


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@pairs
@pytest.mark.parametrize("way", CASTS)
def test_a_cast_takes_everything_along(name: str, spec: str, way: str) -> None:
    model = compiled(name, spec, torch.float32)
    inputs = model_inputs(name, model)
    want = model(**inputs).logits
    act, dtype = CASTS[way]
    if way == "to" and name == "mixtral":
        model.set_experts_implementation("batched_mm")  # the default multiplies no float64
    act(model)
    assert {p.dtype for p in peftc.parameters(model).values()} == {dtype}
    assert {p.dtype for p in model.parameters()} == {dtype}
    out = model(**cast(inputs, dtype))
    assert out.logits.dtype == dtype
    tokens = inputs["attention_mask"].bool() if name in ("llama", "mixtral", "bert") else slice(None)
    close(out.logits.float()[tokens], want[tokens], tolerance={"to": 1e-4, "half": 0.02, "bfloat16": 0.2}[way])
    out.loss.backward()
    assert {p.grad.dtype for p in peftc.parameters(model).values() if p.grad is not None} == {dtype}
    assert all(p.grad is not None for p in peftc.parameters(model).values())


@pairs
def test_edits_of_a_half_precision_base_stay_in_float32(name: str, spec: str) -> None:
    """Edit parameters are float32, and their output has the dtype of the base."""
    model = freshly_compiled(name, spec, torch.bfloat16)
    edits = {p.dtype for n, p in peftc.parameters(model).items() if not n.startswith("norms/")}
    assert edits == {torch.float32}
    assert model.dtype == torch.bfloat16
    inputs = model_inputs(name, model)
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))
    assert model(**inputs).logits.dtype == torch.bfloat16
    assert dtypes == {torch.bfloat16}


@pairs
def test_autocast(name: str, spec: str) -> None:
    """The same numbers up to bfloat16 rounding, and the base's dtypes under autocast."""
    model, base = compiled(name, spec, torch.float32), zoo.build(name).requires_grad_(False)
    inputs = model_inputs(name, model)
    tokens = inputs["attention_mask"].bool() if name in ("llama", "mixtral", "bert") else slice(None)
    want = model(**inputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = model(**inputs), base(**inputs)
    assert out.logits.dtype == plain.logits.dtype
    close(out.logits.float()[tokens], want[tokens], tolerance=0.2)
    out.loss.backward()
    gradients = {n: p.grad for n, p in peftc.parameters(model).items()}
    assert all(g is not None and g.dtype == torch.float32 for g in gradients.values())
    assert torch.equal(model(**inputs).logits, want)
    with torch.autocast("cpu", torch.bfloat16), peftc.disabled(model):
        assert torch.equal(model(**inputs).logits, plain.logits)


@pytest.mark.parametrize(("name", "spec"), checkerboard(GENERATING, ("lora", "mam")))
def test_generating_under_autocast_and_in_half_precision(name: str, spec: str) -> None:
    model = compiled(name, spec, torch.float32)
    prompt = {k: v for k, v in model_inputs(name, model).items() if k in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with torch.autocast("cpu", torch.bfloat16):
        one = model.generate(**prompt, **options)
    two = model.bfloat16().generate(**prompt, **options)
    assert one.shape[0] == two.shape[0] == 2


@pairs
def test_to_meta_and_empty(name: str, spec: str) -> None:
    """Meta tensors, then values restored from a state dict."""
    model = compiled(name, spec)
    inputs = model_inputs(name, model)
    want, saved = model(**inputs).logits, state(model)
    model.to("meta")
    assert all(p.is_meta for p in model.parameters())
    if name != "bart":  # reads values, so it does not run on meta tensors
        shapes = model(**{k: v.to("meta") for k, v in inputs.items() if k not in ("labels", "attention_mask")})
        assert shapes.logits.shape == want.shape
    buffers = dict(zoo.build(name, torch.float64).named_buffers())
    model.to_empty(device="cpu")
    assert not any(model.load_state_dict(saved))
    for key, buffer in buffers.items():  # no state dict contains non-persistent buffers
        model.get_buffer(key).copy_(buffer)
    assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("spec", SPECS)
def test_remove_after_a_cast_restores_the_cast_base(spec: str) -> None:
    model = compiled("bart", spec, torch.float32).bfloat16()
    base = zoo.build("bart").bfloat16()
    assert same(state(peftc.remove(model)), state(base))


class Offsets(nn.Linear):
    """Adds the numbers of the tokens to its input, on the device and in the dtype of its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(input.size(1), device=self.weight.device).to(self.weight.dtype)
        return super().forward(input.to(self.weight.dtype) + numbers[:, None])


def model_of_offsets() -> nn.Module:
    model = nn.Sequential(Offsets(8, 8), Offsets(8, 8))
    x = torch.randn(2, 5, 8)
    peftc.compile('peft 1\n\nedit a at "0" | "1" { w += lowrank(r=2) }\n', model, sample={"input": x})
    model(x)  # what is generated is for this device and dtype
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_input", [torch.float32, torch.float64], ids=str)
def test_code_that_reads_the_dtype_of_a_weight_follows_a_cast(dtype: torch.dtype, of_input: torch.dtype) -> None:
    model = model_of_offsets().to(dtype)
    base = peftc.remove(copy.deepcopy(model))
    x = torch.randn(2, 5, 8).to(of_input)
    assert model(x).dtype == dtype
    assert torch.equal(model(x), base(x))  # B is zero


def test_code_that_reads_the_device_of_a_weight_follows_a_move() -> None:
    model = model_of_offsets().to("meta")
    assert model(torch.randn(2, 5, 8, device="meta")).is_meta
