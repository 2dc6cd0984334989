"""Generated code has the model's own names. A name that means several things, one after the other
or at once, never makes it compute another value than the model's code.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.specialization.generated_class import GeneratedClass

Forward = Callable[..., Any]
FORWARDS: list[Forward] = []


class Leaf(torch.autograd.Function):
    """Generated code calls it by a global name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Child(nn.Module):
    """Its variables have the names of those of its callers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        z = y if x is None else y - x
        x = z @ self.weight
        y = x + z
        z = y * x
        return z + y


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child, self.inner = Child(), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Child() for _ in range(3))


def case(forward: Forward) -> Forward:
    FORWARDS.append(forward)
    return forward


def helper(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    x = y + z
    return x - z


# One name, several values -----------------------------------------------------------------------


@case
def assigned_again_and_again(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    y = y + 1
    z = y
    y = y * 2
    z = z + y
    y = z - y
    return y, z, x


@case
def earlier_values_stay_alive(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    first = y
    y = torch.relu(y + 1)
    second = y
    y = torch.tanh(y - first)
    first = second * y
    second = first + y
    return first, second, y


@case
def an_alias_is_assigned_itself(self: Any, x: Tensor) -> Any:
    residual = x
    x = self.inner(x)
    residual = residual + x
    x = x * residual
    residual, x = x, residual
    return x - residual * 2


@case
def swapped(self: Any, x: Tensor) -> Any:
    a, b = self.inner(x).chunk(2, -1)
    a, b = b, a
    b, a = a + b, a - b
    (a, b), c = (b * 2, a), a
    return a, b, c


@case
def a_blank_name_is_read(self: Any, x: Tensor) -> Any:
    _, y = self.inner(x).chunk(2, -1)
    _ = _ + y
    y, _ = _.split(1, -1)
    return y * _


@case
def numbered_names_of_its_own(self: Any, x: Tensor) -> Any:
    y_1 = self.inner(x)
    y = y_1 + 1
    y_2 = y * y_1
    stored = [y]
    y = y_2 + y
    stored.append(y)
    y = y - y_1
    y_1 = y + y_2
    return y, y_1, y_2, stored[0] * stored[1]


@case
def a_nested_expression_before_an_assignment(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    z = (y * 2 + x) - (y := y + 1) * (x := x - 1)
    return z, torch.cat([y * 2, (y := y + x), (x := y * x)], -1), x, y


@case
def a_size_of_a_name_that_is_assigned(self: Any, x: Tensor) -> Any:
    tokens = x.shape[1]
    x = x[:, 1:]
    fewer = x.shape[1]
    x = torch.cat([x, x, x], 1)
    shape = x.shape
    x = x[:, :2].reshape(2, -1)
    return x * tokens - fewer, shape[1], x.new_zeros(shape[0], fewer)


# Names of arguments -----------------------------------------------------------------------------


@case
def an_argument_is_assigned(self: Any, x: Tensor, scale: Tensor | None = None, *rest: Tensor, **more: Tensor) -> Any:
    argument = x
    x = self.inner(x)
    scale = x * 2 if scale is None else scale + x
    rest = (x, scale)
    more = x - scale
    x = argument * scale
    return x + more * rest[0], argument


@case
def children_and_functions_have_the_same_names(self: Any, x: Tensor) -> Any:
    y = self.child(x)
    z = self.child(y, x)
    x = helper(z, y)
    y = self.child(x, helper(y, z))

    def inner(y: Tensor) -> Tensor:
        x = y * 2
        z = x + y
        return z - x

    x = inner(z) + inner(y)
    return x, y, z


# Names of other things --------------------------------------------------------------------------


@case
def names_of_modules_and_of_generated_functions(self: Any, x: Tensor) -> Any:
    nn = self.inner(x)
    dispatch = Leaf.apply(nn)
    variant_1 = dispatch + nn
    autograd_function = Leaf.apply(variant_1)
    respecialize = autograd_function * variant_1
    PASSTHROUGH = respecialize - dispatch
    holds = PASSTHROUGH.to(dtype=x.dtype) * 2
    untraced = holds.new_full((1,), float("inf"))
    return holds + PASSTHROUGH, untraced, nn


@case
def the_name_of_torch(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    from torch import relu, tanh

    torch = relu(y)
    tanh = tanh(torch)
    relu = tanh * torch
    return relu + tanh, torch


@case
def names_of_builtins(self: Any, x: Tensor) -> Any:
    len = self.inner(x)
    slice = len[..., 1:3]
    float = slice.sum(-1, keepdim=True)
    isinstance, type = (len * float).chunk(2, -1)
    getattr = isinstance + type
    zip = getattr.masked_fill(getattr > 0, builtins.float("-inf"))
    ValueError, bool = zip.exp(), len
    return ValueError, bool, x[..., builtins.slice(None, None, 2)]


@case
def a_name_of_a_child(self: Any, x: Tensor) -> Any:
    inner = self.inner(x)
    child = self.child(inner)
    layers = self.layers[1](child, inner)
    self = layers + inner  # the model's own code may lose it
    return self, child


# Loops and branches -----------------------------------------------------------------------------


@case
def a_name_in_every_turn(self: Any, x: Tensor) -> Any:
    seen = [x]
    y = x
    for layer in self.layers:
        z = layer(y, x)
        y = y + z
        seen.append(y)
        x = z
    return sum(seen), x, z, [y - x for y, x in pairwise(seen)]


@case
def a_name_on_both_sides_of_a_branch(self: Any, x: Tensor) -> Any:
    y = torch.relu(self.inner(x))
    z = y * 2
    if y.shape[1] > 2:
        before, z = z, y + 1
        y = before - z
    else:
        y, z = z, y
        if z.shape[1] > 1:
            z = z * y
            y = y + z
    x = y - z
    if x.shape[1] > 3:
        y = x
        x = z
    return x, y, z


@case
def a_value_that_another_path_uses(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    z, n = y * 2, y.shape[1]
    stored = nn.functional.dropout(y)
    y.mul_(y)
    if torch.relu(self.inner(y)).shape[1] > 2:
        z, stored = y, y
    return z, y, n, stored, nn.functional.dropout(y)


@case
def a_name_in_a_block(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    with torch.autocast("cpu", enabled=False):
        z = y
        y = y.float() + 1
        with torch.no_grad():
            x, y = y * z, x
    z = z - x
    return x, y, z


# Writes in place --------------------------------------------------------------------------------


@case
def a_second_name_of_what_is_written(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    z = y
    y = y + 0
    z += x
    w = y
    w *= 2
    y = y - z
    z[:, 0] = 1
    x = z.clone()
    z.mul_(y)
    return w, x, y, z


@case
def results_of_a_map(self: Any, x: Tensor) -> Any:
    one, other = map(torch.relu, (self.inner(x), x))  # each is computed as the tuple is taken apart
    return one - 2 * other


@case
def parts_of_each_of_a_map(self: Any, x: Tensor) -> Any:
    one, other = map(lambda y: y[:, 0], (self.inner(x), x))  # noqa: C417
    first, last = map(lambda y: y[0], (self.inner(x), x))  # noqa: C417
    return one - 2 * other, first - 2 * last


def call(module: nn.Module, tokens: int) -> Any:
    torch.manual_seed(tokens)
    return module(torch.randn(2, tokens, 4))


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("entered", [False, True])
def test_generated_code_computes_what_the_models_code_does(forward: Forward, entered: bool) -> None:
    cls = type("Own", (Holder,), {"forward": forward})
    base, module = cls(), cls()
    inline = frozenset(n for n, m in base.named_modules() if entered and isinstance(m, Child)) | {""}
    kind = GeneratedClass(cls, inline, (), "Own")
    module.__class__ = kind.cls
    for tokens in (3, 1, 2, 5):
        call(module, tokens)  # a new call is traced first, perhaps with random numbers
        torch.testing.assert_close(call(module, tokens), call(base, tokens), rtol=0, atol=1e-6, equal_nan=True)


def hiding_torch(self: Any, x: Tensor, torch: Tensor | None = None) -> Any:
    return self.inner(x).relu()


def hiding_builtins(self: Any, x: Tensor, len: Tensor | None = None) -> Any:
    return self.inner(x)


def hiding_a_variant(self: Any, x: Tensor, variant_1: Tensor | None = None) -> Any:
    return self.inner(x)


def hiding_self(this: Any, x: Tensor, self: Tensor | None = None) -> Any:
    return this.inner(x)


@pytest.mark.parametrize("forward", [hiding_torch, hiding_builtins, hiding_a_variant, hiding_self])
def test_parameters_that_hide_what_generated_code_needs_are_refused(forward: Forward) -> None:
    with pytest.raises(PeftcError, match="P407"):
        GeneratedClass(type("Own", (Holder,), {"forward": forward}), frozenset([""]), (), "Own")


def test_a_parameter_may_have_the_name_of_a_function() -> None:
    def forward(self: Any, x: Tensor, autograd_function: Tensor | None = None) -> Any:
        return Leaf.apply(self.inner(x))

    cls = type("Own", (Holder,), {"forward": forward})
    base, module = cls(), cls()
    module.__class__ = GeneratedClass(cls, frozenset([""]), (), "Own").cls
    assert torch.equal(call(module, 3), call(base, 3))


@pytest.mark.parametrize("name", ["other", "FunctionType"])
def test_a_function_may_be_an_argument(name: str) -> None:
    """Its class has no name among the builtins."""

    class Own(Holder):
        def forward(self, x: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
            return self.inner(x) + other(x)

    class Hiding(Holder):
        def forward(self, x: Tensor, FunctionType: Callable[[Tensor], Tensor]) -> Tensor:
            return self.inner(x) + FunctionType(x)

    cls = Own if name == "other" else Hiding
    base, module = cls(), cls()
    module.load_state_dict(base.state_dict())
    module.__class__ = GeneratedClass(cls, frozenset([""]), (), "Own").cls
    x = next(base.parameters()).new_ones(2, next(base.parameters()).shape[-1])
    for function in (torch.relu, lambda y: -y, base.inner.forward):
        assert torch.equal(module(x, function), base(x, function))
