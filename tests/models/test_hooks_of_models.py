"""Functions that are a model's own code: hooks without which it does not run, and attributes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Features(nn.Module):
    """Collects features of its blocks by hooks, as dense prediction on a ViT does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(2 * D, 3)
        self.features: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            ffn = block.get_submodule("ffn")
            if kind == "method":
                ffn.register_forward_hook(partial(self.keep, i))
            else:
                ffn.register_forward_hook(lambda module, args, out, i=i: self.features.update({i: out}))

    def keep(self, i: int, module: nn.Module, args: Any, out: Tensor) -> None:
        self.features[i] = out

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([self.features[0], self.features[1]], -1))


@pytest.mark.parametrize("kind", ["method", "closure"])
@pytest.mark.parametrize("at", ["layer[*].ffn.up", "layer[*].ffn", "**.linear"])
def test_a_model_runs_on_what_its_hooks_keep(kind: str, at: str) -> None:
    model, sample = Features(kind), {"x": torch.randn(2, 5, D)}
    base = model(**sample)
    model.features.clear()
    peftc.compile(f"peft 1  edit e at {at} {{ h += lora(x, r=2) }}", model, seed=0, sample=sample)
    assert not model.features, "the analysis has run a hook of the model"
    torch.testing.assert_close(model(**sample), base)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(1)
    assert (model(**sample) - base).abs().max() > 1e-3


def test_hooks_of_users_stay_behind() -> None:
    model, sample, calls = Features("method"), {"x": torch.randn(2, 5, D)}, list[str]()
    model.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    peftc.compile("peft 1  edit e at **.linear { h += lora(x, r=2) }", model, seed=0, sample=sample)
    assert not calls


class Logging(Features):
    def __init__(self, file: Any) -> None:
        super().__init__("method")
        self.head.register_forward_hook(lambda module, args, out: file.write(f"{out.shape}"))


def test_a_hook_that_cannot_be_copied_stays_behind(tmp_path: Path) -> None:
    path, sample = tmp_path / "log", {"x": torch.randn(2, 5, D)}
    with path.open("w") as file:
        model = Logging(file)
        peftc.compile("peft 1  edit e at **.linear { h += lora(x, r=2) }", model, seed=0, sample=sample)
        model(**sample)
    assert path.read_text() == "torch.Size([2, 5, 3])"


class MinBlock(nn.Module):
    """As in minGPT: a function in an attribute calls the modules of the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, 16), "act": nn.GELU(), "down": nn.Linear(16, D)})
        m = self.mlp
        self.mlpf = lambda x: m["down"](m["act"](m["up"](x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(self.norm(x))


class MinModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([MinBlock(), MinBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("at", ["layer[*].ffn.{up, down}", "**.linear"])
def test_functions_in_attributes_call_the_modules_of_the_copy(at: str) -> None:
    model, base, sample = MinModel(), MinModel(), {"x": torch.randn(2, 5, D)}
    peftc.compile(f"peft 1  edit e at {at} {{ h += lora(x, r=2) }}", model, seed=0, sample=sample)
    factors = list(peftc.parameters(model).values())
    assert len(factors) == 8
    torch.testing.assert_close(model(**sample), base(**sample))
    with torch.no_grad():
        for factor in factors:
            factor.add_(torch.randn_like(factor))
        weights = [p for name, p in base.named_parameters() if "mlp" in name and name.endswith("weight")]
        for weight, down, up in zip(weights, factors[::2], factors[1::2], strict=True):
            weight.add_(up @ down)
    torch.testing.assert_close(model(**sample), base(**sample))
    peftc.fold(model)
    torch.testing.assert_close(model(**sample), base(**sample))


def test_a_copy_that_calls_the_modules_of_its_original_is_refused(tmp_path: Path) -> None:
    model, sample = MinModel(), {"x": torch.randn(2, 5, D)}
    peftc.compile("peft 1  edit e at **.linear { h += lora(x, r=2) }", model, seed=0, sample=sample)
    for factor in peftc.parameters(model).values():
        nn.init.normal_(factor)
    want = model(**sample)
    other = copy.deepcopy(model)
    for operation in (lambda: other(**sample), lambda: peftc.fold(other)):
        with pytest.raises(peftc.PeftcError, match=r"P452.*`blocks\.0\.mlpf`"):
            operation()
    peftc.save(model, tmp_path)
    second = peftc.load(tmp_path, MinModel(), sample=sample)  # what the message proposes
    assert torch.equal(second(**sample), want)
    with peftc.disabled(second):
        assert torch.equal(second(**sample), MinModel()(**sample))


def test_a_function_may_call_another_compiled_model() -> None:
    teacher, model, sample = Block(), MinModel(), {"x": torch.randn(2, 5, D)}
    peftc.compile("peft 1  edit e at **.linear { h += lora(x, r=3) }", teacher, seed=0, sample=sample)
    cast("Any", model).teach = lambda x: teacher(x)
    peftc.compile("peft 1  edit e at **.linear { h += lora(x, r=2) }", model, seed=0, sample=sample)
    assert model(**sample).isfinite().all()
