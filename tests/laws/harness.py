"""Compares a compiled model with the same model edited by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from peftc.installation.compiled_model import analyse_base, plan_on
from peftc.installation.record import installation_of
from peftc.semantics.spec_argument import flat_spec
from tests import zoo
from tests.laws.recipe import Recipe
from tests.reference.reference import Reference

TOLERANCE = 1e-10
Inputs = dict[str, Tensor]


def seed_of(key: str) -> int:
    return sum((i + 1) * byte for i, byte in enumerate(key.encode())) % 2**31


@cache
def analysis(name: str) -> Any:
    """Caches a model's analysis: it serves every plan for that model."""
    return analyse_base(zoo.config(name))


@torch.no_grad()
def randomise(parameters: Mapping[str, nn.Parameter]) -> None:
    """Adds 0.3 N(0, 1), seeded by its name, to every edit parameter."""
    for key, parameter in parameters.items():
        generator = torch.Generator().manual_seed(seed_of(key))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter += (0.3 * noise).to(parameter.dtype)


def values(parameters: Mapping[str, nn.Parameter], grad: bool = False) -> dict[str, Tensor]:
    return {key: p.detach().clone().requires_grad_(grad) for key, p in parameters.items()}


@torch.no_grad()
def assign(parameters: Mapping[str, nn.Parameter], new: Mapping[str, Tensor]) -> None:
    for key, parameter in parameters.items():
        parameter.copy_(new[key])


@dataclass(frozen=True)
class Before:
    """A snapshot of everything that `remove` must restore bit for bit."""

    state: Mapping[str, Tensor]
    classes: Mapping[str, type[nn.Module]]
    requires_grad: Mapping[str, bool]
    modules: Mapping[str, frozenset[str]]

    @staticmethod
    def of(model: nn.Module) -> Before:
        return Before(
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            {k: type(m) for k, m in model.named_modules()},
            {k: p.requires_grad for k, p in model.named_parameters()},
            {k: attributes(m) for k, m in model.named_modules()},
        )

    def assert_same(self, model: nn.Module) -> None:
        now = Before.of(model)
        assert list(now.state) == list(self.state)
        assert all(torch.equal(now.state[k], v) for k, v in self.state.items())
        assert now.classes == self.classes
        assert now.requires_grad == self.requires_grad
        difference = {k: now.modules[k] - v for k, v in self.modules.items() if now.modules[k] - v}
        assert not difference, f"remaining attributes: {difference}"


def attributes(module: nn.Module) -> frozenset[str]:
    """The names of a module's own attributes, but for empty tables of hooks: reading makes some."""
    return frozenset(name for name, value in vars(module).items() if not name.endswith("_hooks") or value)


class Case:
    """One recipe on one architecture: the base's outputs, the compiled model, and the reference."""

    def __init__(self, recipe: Recipe, name: str, **overrides: Any) -> None:
        self.recipe, self.name, self.overrides = recipe, name, overrides
        self.model = zoo.build(name, torch.float64, **overrides)
        self.batches = batches(name, self.model)
        self.before = Before.of(self.model)
        with torch.no_grad():
            self.base_logits = [self.model(**inputs)[0] for inputs in self.batches]
        assert peftc.compile(recipe.text, self.model, seed=0) is self.model
        self.parameters = peftc.parameters(self.model)
        self.initial = values(self.parameters)

    @cached_property
    def plan(self) -> Any:
        """The plan of the recipe, from the config only."""
        return plan_on(analysis(self.name), flat_spec(self.recipe.text)).plan

    @cached_property
    def random(self) -> dict[str, Tensor]:
        """Sets the edit parameters to fixed random values."""
        assign(self.parameters, self.initial)
        randomise(self.parameters)
        return values(self.parameters)

    def at_init(self) -> Case:
        return self._at(self.initial)

    def at_random(self) -> Case:
        return self._at(self.random)

    def _at(self, point: Mapping[str, Tensor]) -> Case:
        assign(self.parameters, point)
        self.model.zero_grad()
        self.model.eval()
        return self

    def reference(self, grad: bool = True, **overrides: Any) -> tuple[Reference, dict[str, Tensor]]:
        """A fresh base edited by hand with the current edit parameters, and those parameters."""
        weights = values(self.parameters, grad)
        ref = Reference(self.name, zoo.build(self.name, torch.float64, **{**self.overrides, **overrides}))
        ref.model.requires_grad_(False)
        self.recipe.method(ref, weights | self.fixed)
        return ref, weights

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The buffers of the forms, by the names of parameters."""
        places = installation_of(self.model).form_modules
        return {
            f"{at}.{n}": b for at, where in places.items() for n, b in self.model.get_submodule(where).named_buffers()
        }


def batches(name: str, model: nn.Module) -> list[Inputs]:
    """Without a mask (attention may run with mask None and is_causal), and with padding on either
    side.
    """
    side: zoo.Padding = "left" if "bert" not in name else "right"
    return [zoo.inputs(name, model), zoo.inputs(name, model, padding=side)]


def visible(model: nn.Module, inputs: Inputs, out: Tensor) -> Tensor:
    """The outputs at unpadded positions: rows that attend to nothing differ between kernels."""
    if "attention_mask" not in inputs or getattr(model.config, "is_encoder_decoder", False):
        return out.flatten(0, 1)
    return out[inputs["attention_mask"].bool()]


def loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The visible logits, and a fixed linear function of them."""
    out = visible(model, inputs, model(**inputs)[0])
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return out, (out * direction).sum() / out.shape[0]


def compare(
    case: Case, run: Callable[[nn.Module], tuple[Tensor, Tensor]], ref: Reference, weights: Mapping[str, Tensor]
) -> None:
    """Outputs, and gradients of all edit parameters, agree to 1e-10."""
    got, total = run(case.model)
    total.backward()
    want, expected_loss = run(ref.model)
    expected_loss.backward()
    assert (got - want).abs().max() <= TOLERANCE
    for key, parameter in case.parameters.items():
        expected = weights[key].grad
        assert expected is not None, f"the reference does not use {key}"
        assert parameter.grad is not None, f"{key} has no gradient"
        close(parameter.grad, expected, key)
    moving = sum(p.grad is not None and bool(p.grad.abs().max() > 0) for p in case.parameters.values())
    assert moving > 0.8 * len(case.parameters)  # a narrow relu may be dead at one site, not at most


def close(got: Tensor, want: Tensor, what: str = "", tolerance: float | None = None) -> None:
    bound = (tolerance or TOLERANCE) * max(1.0, want.abs().max().item())
    error = (got - want).abs().max().item()
    assert error <= bound, f"{what}: {error:.3g} > {bound:.3g}"
