"""Code of an edited layer assigns attributes: a loss, a map of attention, a state of later calls.
They are what the model's own code assigns, and code outside sees them. What a graph cannot hold is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import peftc
from tests.layers import Attention

D = 8
SHAPES = ((2, 5, D), (3, 4, D), (2, 5, D))
Code = Callable[[Any, Tensor], Tensor]


@dataclass
class State:
    hidden: Any = None
    size: int = 0


class Slots:
    __slots__ = ("hidden",)

    def __init__(self) -> None:
        self.hidden: Any = None


STATE = State()
LAST: list[Any] = []
last: Any = None


class FeedForward(nn.Module):
    last: Any = None

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)
        self.loss, self.seen, self.size, self.code = torch.zeros(()), None, 0, code
        self.register_buffer("mean", torch.ones(12))
        self.values: list[Tensor] = []
        self.entries: dict[str, Tensor] = {}
        self.state, self.slots, self.dropout = State(), Slots(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.code(self, self.up(x))))


class Layer(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.norm, self.attention, self.ffn = nn.LayerNorm(D), Attention(D), FeedForward(code)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.ffn(x)


class Network(nn.Module):
    """Its result has the losses that its layers have left."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(code) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + sum(layer.ffn.loss for layer in self.layers)  # pyright: ignore


def loss(self: Any, hidden: Tensor) -> Tensor:
    self.loss = hidden.pow(2).mean()
    return hidden


def loss_in_training(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.loss = hidden.pow(2).mean()
    return hidden


def value(self: Any, hidden: Tensor) -> Tensor:
    setattr(self, "seen", hidden)  # noqa: B010
    return functional.relu(hidden)


def several(self: Any, hidden: Tensor) -> Tensor:
    self.seen = (hidden, [hidden + 1, {"x": hidden.detach()}])
    return hidden


def size(self: Any, hidden: Tensor) -> Tensor:
    self.size = hidden.shape[1]
    return hidden * self.size


def text(self: Any, hidden: Tensor) -> Tensor:
    self.seen = "three" if hidden.shape[0] == 3 else None
    return hidden


def of_a_child(self: Any, hidden: Tensor) -> Tensor:
    self.down.last = hidden
    return hidden


def total(self: Any, hidden: Tensor) -> Tensor:
    self.loss = self.loss + hidden.pow(2).mean().detach()
    return hidden


def buffer(self: Any, hidden: Tensor) -> Tensor:
    before = self.mean
    self.mean = 0.9 * self.mean + 0.1 * hidden.mean((0, 1)).detach()
    return hidden - before


def value_before(self: Any, hidden: Tensor) -> Tensor:
    before = self.mean
    self.mean = before + hidden.shape[1]
    return hidden * before + self.mean


def first_call(self: Any, hidden: Tensor) -> Tensor:
    if self.seen is None:
        self.seen = hidden.mean((0, 1)).detach()
        return hidden
    return hidden + self.seen


def own_value(self: Any, hidden: Tensor) -> Tensor:
    self.size = 3
    return hidden * self.size


def of_an_object(self: Any, hidden: Tensor) -> Tensor:
    self.state.hidden = hidden
    self.state.size = hidden.shape[1]
    return hidden


def data(self: Any, hidden: Tensor) -> Tensor:
    self.down.weight.data = functional.normalize(self.down.weight.data, dim=1)
    return hidden


def data_in_place(self: Any, hidden: Tensor) -> Tensor:
    self.down.weight.data.mul_(0.5)
    return hidden


def data_of_activations(self: Any, hidden: Tensor) -> Tensor:
    self.mean.data = hidden.detach().mean((0, 1))
    return hidden


def count(self: Any, hidden: Tensor) -> Tensor:
    self.loss = self.loss + 1
    return hidden


ASSIGNMENTS: list[Code] = [
    data,
    data_in_place,
    data_of_activations,
    count,
    of_an_object,
    loss, loss_in_training, value, several, size, text, of_a_child, total, buffer, value_before, first_call, own_value
]  # fmt: skip


def append(self: Any, hidden: Tensor) -> Tensor:
    self.values.append(hidden)
    return hidden


def append_to_new(self: Any, hidden: Tensor) -> Tensor:
    self.values = []
    self.values.append(hidden)
    return hidden


def entry(self: Any, hidden: Tensor) -> Tensor:
    self.entries["hidden"] = hidden
    return hidden


def past_setattr(self: Any, hidden: Tensor) -> Tensor:
    self.__dict__["seen"] = hidden
    return hidden


def parameter(self: Any, hidden: Tensor) -> Tensor:
    self.down.weight = nn.Parameter(self.down.weight * 0.5)
    return hidden


def module(self: Any, hidden: Tensor) -> Tensor:
    self.dropout = nn.Identity()
    return hidden


def new_buffer(self: Any, hidden: Tensor) -> Tensor:
    self.register_buffer("mean", hidden.detach().mean())
    return hidden


def of_slots(self: Any, hidden: Tensor) -> Tensor:
    self.slots.hidden = hidden
    return hidden


def of_a_class(self: Any, hidden: Tensor) -> Tensor:
    FeedForward.last = hidden
    return hidden


def of_a_global_object(self: Any, hidden: Tensor) -> Tensor:
    STATE.hidden = hidden
    return hidden


def append_to_global(self: Any, hidden: Tensor) -> Tensor:
    LAST.append(hidden)
    return hidden


def global_variable(self: Any, hidden: Tensor) -> Tensor:
    global last
    last = hidden
    return hidden


REFUSED: list[Code] = [
    of_slots, of_a_class, of_a_global_object, append_to_global,
    global_variable, append, append_to_new, entry, past_setattr, new_buffer
]  # fmt: skip
SPECS = {
    "hidden": "edit a at layer[*].ffn.hidden { h += adapter(x, r=2, init=lora) }",
    "Linear": "edit a at layer[*].ffn.up { h += lora(x, r=2) }",
    "sub-layer": "edit a at layer[*].ffn { h += adapter(z, r=2, init=lora) }",
}


def network(code: Code) -> Network:
    torch.manual_seed(0)
    return Network(code).double().requires_grad_(False)


def inputs(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def compiled(code: Code, spec: str) -> nn.Module:
    return peftc.compile(f"peft 2\n\n{spec}\n", network(code), seed=0, sample={"x": inputs(SHAPES[0])})


def assert_states_equal(model: nn.Module, base: nn.Module) -> None:
    for own, other in zip(model.layers, base.layers, strict=True):  # pyright: ignore
        assert_equal(vars(own.ffn.state), vars(other.ffn.state))
        for name in ("loss", "seen", "size", "mean", "values", "entries"):
            assert_equal(getattr(own.ffn, name), getattr(other.ffn, name))
        assert_equal(own.ffn.down.weight, other.ffn.down.weight)
        assert_equal(vars(own.ffn.down).get("last"), vars(other.ffn.down).get("last"))


def assert_equal(own: object, other: object) -> None:
    if isinstance(other, str):
        assert own == other
    else:
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("code", ASSIGNMENTS)
def test_assignments_are_those_of_the_model(code: Code, spec: str) -> None:
    model, base = compiled(code, spec), network(code)
    for training in (True, False):
        for shape in SHAPES:
            own, other = inputs(shape).requires_grad_(), inputs(shape).requires_grad_()
            result, expected = model.train(training)(own), base.train(training)(other)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
            assert_states_equal(model, base)
            gradients = (torch.autograd.grad(y.sum(), x)[0] for y, x in ((result, own), (expected, other)))
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
            for one in (model, base):  # of the loss of a call that is over
                for layer in one.layers:  # pyright: ignore
                    layer.ffn.loss = layer.ffn.loss.detach()


@torch.no_grad()
@pytest.mark.parametrize("code", ASSIGNMENTS)
def test_compiled_code_assigns_them(code: Code) -> None:
    torch.compiler.reset()
    model, base = compiled(code, SPECS["hidden"]).eval(), network(code).eval()
    model(inputs(SHAPES[0])), base(inputs(SHAPES[0]))
    run = torch.compile(model, backend="eager", dynamic=False)
    for shape in SHAPES:
        torch.testing.assert_close(run(inputs(shape)), base(inputs(shape)), rtol=0, atol=1e-12)
        assert_states_equal(model, base)


def test_they_have_what_the_edit_changes() -> None:
    model = compiled(loss, "edit a at layer[*].ffn.up { h += lora(x, r=2) }\nedit b at layer[*].ffn.hidden { h *= 2 }")
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    changed = []
    for layer in model.layers:  # pyright: ignore
        layer.ffn.up.register_forward_hook(lambda module, args, output: changed.append(output))  # pyright: ignore
    model(inputs(SHAPES[0]))
    losses = [layer.ffn.loss for layer in model.layers]  # pyright: ignore
    torch.testing.assert_close(losses, [hidden.pow(2).mean() for hidden in changed])


def reset() -> None:
    global last
    FeedForward.last = STATE.hidden = last = None
    LAST.clear()


@pytest.mark.parametrize("code", [parameter, module])
def test_modules_and_parameters_stay(code: Code) -> None:
    with pytest.raises(peftc.PeftcError, match=r"P407.*its code sets the (module|parameter)"):
        compiled(code, SPECS["hidden"])(inputs(SHAPES[0]))


@pytest.mark.parametrize("code", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(code: Code) -> None:
    with pytest.raises(peftc.PeftcError, match=r"puts tensors into what `\w+` holds"):
        compiled(code, SPECS["hidden"])(inputs(SHAPES[0]))
    assert FeedForward.last is STATE.hidden is last is None
    assert not LAST
    model, base = compiled(code, SPECS["Linear"]), network(code)  # whose own code runs
    torch.testing.assert_close(model(inputs(SHAPES[0])), base(inputs(SHAPES[0])))
    assert_states_equal(model, base)
    reset()


class Counter:
    def __init__(self) -> None:
        self.count, self.values = 0, list[Tensor]()

    def advance(self) -> None:
        self.count += 1


class SteppingFeedForward(FeedForward):
    def forward(self, x: Tensor, counter: Counter) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden = torch.tanh(self.up(x))
        counter.advance()
        counter.values.append(hidden)
        return self.down(hidden)


class SteppingLayer(Layer):
    def __init__(self) -> None:
        super().__init__(value)
        self.ffn = SteppingFeedForward(value)

    def forward(self, x: Tensor, counter: Counter) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x + self.attention(self.norm(x))
        return x + self.ffn(x, counter)


class SteppingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SteppingLayer() for _ in range(2))

    def forward(self, x: Tensor, counter: Counter) -> Tensor:
        for layer in self.layers:
            x = layer(x, counter)
        return x


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_method_that_changes_an_argument_is_called_once(spec: str) -> None:
    torch.manual_seed(0)
    base = SteppingNetwork().double()
    sample = {"x": inputs(SHAPES[0]), "counter": Counter()}
    model = peftc.compile(f"peft 2\n\n{spec}\n", deepcopy(base), seed=0, sample=sample)
    own, other = Counter(), Counter()
    for shape in SHAPES:
        torch.testing.assert_close(model(inputs(shape), own), base(inputs(shape), other))
    assert own.count == other.count == 2 * len(SHAPES)
    torch.testing.assert_close(own.values, other.values)
