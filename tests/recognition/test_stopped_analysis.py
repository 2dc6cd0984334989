"""Models whose analysis stops: the message has a code and the line of the model's code, and what
can be traced works still.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
LORA = "peft 1  edit e at {} {{ h += lora(x, r=1) }}"


class Block(nn.Module):
    """An attention and an ffn; `obstacle` is what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.empty = nn.LayerNorm(8), nn.Identity()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.q(h)[:, None], self.k(h)[:, None], self.v(h)[:, None]
        x = self.obstacle(x + self.o(F.scaled_dot_product_attention(q, k, v)[:, 0]))
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def obstacle(self, x: Tensor) -> Tensor:
        return x


class ReadsItem(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return x + torch.zeros(int(x.argmax().item()) + 1).sum()  # STOP


class ReadsArray(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.tanh(x.detach().numpy()))  # STOP


class ReadsList(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return torch.tensor(x.tolist())  # STOP


class Extension(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.from_numpy(np.tanh(np.asarray(x.detach())))  # STOP


class CallsExtension(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return x + Extension.apply(x)


class TakesNext(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return x.to(next(iter(self.empty.parameters())).dtype)  # STOP


class Raises(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")  # STOP


class MultipliesOddly(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)  # STOP


class Net(nn.Module):
    def __init__(self, *blocks: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(block() for block in blocks), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("block", [ReadsItem, ReadsArray, ReadsList, CallsExtension])
def test_a_layer_that_cannot_be_traced_says_where_and_the_others_work(block: type[Block]) -> None:
    model = Net(Block, block, Block)
    table = peftc.sites(model, sample={"x": X})
    (untraced,) = [module for module in table.untraced if module.module == "layers.1"]
    assert "test_stopped_analysis.py:" in untraced.reason
    assert "# STOP`" in untraced.reason
    with pytest.raises(peftc.PeftcError, match="P214") as refusal:
        peftc.plan(LORA.format("layer[*].attn.q"), model, sample={"x": X})
    assert "# STOP`" in str(refusal.value)
    assert "traced whole: `layers.{0, 2}`" in str(refusal.value)
    base = model(X)
    for place in ('"layers.0.q"', '"layers.1.up"', '"layers.*.q"', '"head"'):
        peftc.compile(LORA.format(place), model, seed=0, sample={"x": X})
        with torch.no_grad():
            for parameter in peftc.parameters(model).values():
                parameter.fill_(0.3)
        assert not torch.equal(model(X), base), place
        peftc.remove(model)
        assert torch.equal(model(X), base)


@pytest.mark.parametrize("block", [TakesNext, Raises, MultipliesOddly])
def test_a_model_that_does_not_run_says_where(block: type[Block]) -> None:
    with pytest.raises(peftc.PeftcError, match="P509") as refusal:
        peftc.sites(Net(Block, block), sample={"x": X})
    assert "test_stopped_analysis.py:" in str(refusal.value)
    assert "# STOP`" in str(refusal.value)


@pytest.mark.parametrize("sample", [{}, {"x": X[..., :3]}, {"x": None}, {"y": X}, {"x": "text"}])
def test_a_sample_that_does_not_fit_is_refused_with_the_arguments(sample: dict[str, Any]) -> None:
    with pytest.raises(peftc.PeftcError, match="P509") as refusal:
        peftc.sites(Net(Block), sample=sample)
    assert "its forward takes `x`" in str(refusal.value)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_module_without_parameters_has_nothing_to_edit() -> None:
    with pytest.raises(peftc.PeftcError, match="nothing to edit"):
        peftc.sites(Nothing(), sample={"x": X})


class Forwarding(Net):
    """Finds unknown attributes in its first layer."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers: Any = super().__getattr__("layers")
            return getattr(layers[0], name)


class ChangesALeaf(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        self.o.weight.data.mul_(1.0)
        return x


@pytest.mark.parametrize("model", [lambda: Forwarding(Block, Block), lambda: Net(ChangesALeaf, ChangesALeaf)])
def test_odd_code_that_can_be_traced_is(model: Callable[[], nn.Module]) -> None:
    table = peftc.sites(model(), sample={"x": X})
    assert not table.untraced
    assert sum(site.path.endswith("q") for site in table.sites) == 2


def test_an_analysis_that_fails_is_no_bare_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        return next(iter(()))

    monkeypatch.setattr("peftc.recognition.analysis.all_sites", fail)
    with pytest.raises(peftc.PeftcError, match="P512"):
        peftc.sites(Net(Block), sample={"x": X})


class CallsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + down(torch.relu(up(x)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, None, None


class InFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return CallsBoth.apply(x, self.up, self.down)  # STOP


class InList(Net):
    """Its layers are in a list of Python."""

    def __init__(self) -> None:
        super().__init__(Block, Block)
        layers = list(self.layers)
        del self.layers
        vars(self)["layers"] = layers


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InDefaults(Block):
    def __init__(self) -> None:
        super().__init__()
        self.add = Calls(lambda x, block=self: x + block.down(torch.relu(block.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x)


class InClosures(InDefaults):
    """Its function is copied with the modules that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.add = Calls(lambda x: x + self.down(torch.relu(self.up(x))))


@torch.library.custom_op("peftc_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class CallsOperation(Block):
    def obstacle(self, x: Tensor) -> Tensor:
        return doubled(x)  # STOP


def test_an_autograd_function_that_calls_modules_is_named() -> None:
    model = Net(InFunction, InFunction)
    with pytest.raises(peftc.PeftcError, match="P214") as refusal:
        peftc.plan(LORA.format("layer[*].ffn.up"), model, sample={"x": X})
    assert "`CallsBoth`, an autograd function, calls its modules" in str(refusal.value)
    assert "# STOP`" in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (InList, "`layers` of InList is a list, and PyTorch does not know the modules in it: `nn.ModuleList`"),
        (lambda: Net(InDefaults, InDefaults), "`layers.0.add.function` of Calls is a function that holds a module"),
    ],
    ids=["list", "default"],
)
def test_modules_that_pytorch_does_not_know_are_named(model: Callable[[], nn.Module], line: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P201") as refusal:
        peftc.plan(LORA.format("layer[*].ffn.up"), model(), sample={"x": X})
    assert line in str(refusal.value)


def test_a_function_with_the_modules_in_its_closure_is_no_reason() -> None:
    table = peftc.sites(Net(InClosures, InClosures), sample={"x": X})
    assert {module.name for module in table.modules if module.called} >= {"layers.0.up", "layers.1.down"}
    assert not any("is a function" in warning for warning in table.warnings)


class Hides(Block):
    """Its `down` is called where a copy of the model does not reach; `HIDE` is the line."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = self.hide(self.down)

    def hide(self, down: nn.Module) -> Any:
        return lambda x: down(x)  # HIDE

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.call(torch.relu(self.up(x)))

    def call(self, z: Tensor) -> Tensor:
        return self.hidden(z)


class InDefault(Hides):
    def hide(self, down: nn.Module) -> Any:
        def call(x: Tensor, module: nn.Module = down) -> Tensor:
            return module(x)  # HIDE

        return call


ELSEWHERE: dict[int, nn.Module] = {}


class InGlobal(Hides):
    def hide(self, down: nn.Module) -> Any:
        ELSEWHERE[id(self)] = down
        return id(self)

    def call(self, z: Tensor) -> Tensor:
        return ELSEWHERE[self.hidden](z)  # HIDE


class OnlyHidden(Hides):
    """The module is no child."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None]
        x = x + self.o(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + self.call(torch.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        del self.down


class InObject(OnlyHidden):
    def hide(self, down: nn.Module) -> Any:
        return SimpleNamespace(down=down)

    def call(self, z: Tensor) -> Tensor:
        return self.hidden.down(z)  # HIDE


class InPartial(OnlyHidden):
    def hide(self, down: nn.Module) -> Any:
        return partial(down)

    def call(self, z: Tensor) -> Tensor:
        return self.hidden(z)  # HIDE


class InTuple(OnlyHidden):
    def hide(self, down: nn.Module) -> Any:
        return (down,)

    def call(self, z: Tensor) -> Tensor:
        return self.hidden[0](z)  # HIDE


class AsAttribute(OnlyHidden):
    def hide(self, down: nn.Module) -> Any:
        vars(self)["alias"] = down
        return None

    def call(self, z: Tensor) -> Tensor:
        alias: Any = self.alias
        return alias(z)  # HIDE


class OnlyCallsInDefault(InDefault):
    forward = OnlyHidden.forward


class OnlyCallsInGlobal(InGlobal):
    forward = OnlyHidden.forward


@pytest.mark.parametrize("block", [OnlyCallsInDefault, OnlyCallsInGlobal])
def test_a_child_that_a_function_or_a_global_calls_is_no_child_that_nothing_calls(block: type[Block]) -> None:
    model = Net(block, block)
    with pytest.raises(peftc.PeftcError, match="P205") as refusal:
        peftc.plan(LORA.format('"layers.*.down"'), model, sample={"x": X})
    assert "holds the module and calls it, at " in str(refusal.value)
    assert "# HIDE`" in str(refusal.value)
    assert "no forward" not in str(refusal.value)
    base = model(X)
    peftc.compile('peft 1  edit e at "layers.*.down" { w += lowrank(r=1) }', model, seed=0, sample={"x": X})
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.fill_(0.3)
    assert not torch.equal(model(X), base)  # what the message proposes


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (OnlyHidden, "`layers.0.hidden` of OnlyHidden is a function that holds a module"),
        (InTuple, "`layers.0.hidden` of InTuple is a tuple, and PyTorch does not know the modules in it"),
        (InObject, "`layers.0.hidden` of InObject is no child, but holds one"),
        (InPartial, "`layers.0.hidden` of InPartial is no child, but holds one"),
        (AsAttribute, "`layers.0.alias` of AsAttribute is no child, but is a module"),
    ],
)
def test_where_a_module_hides_that_stops_a_trace_is_named(block: type[Block], line: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P214") as refusal:
        peftc.plan(LORA.format("layer[*].ffn.up"), Net(block, block), sample={"x": X})
    assert "a module that is no child" in str(refusal.value)
    assert "# HIDE`" in str(refusal.value)
    assert line in str(refusal.value)


def replacement(x: Tensor) -> Tensor:  # STOP
    return x


@pytest.mark.parametrize("forward", [replacement, partial(replacement)])
def test_a_forward_of_an_instance_that_cannot_be_edited_has_its_line(forward: Any) -> None:
    model = Net(Block, Block)
    model.layers[0].forward = forward
    with pytest.raises(peftc.PeftcError, match="P424") as refusal:
        peftc.compile(LORA.format('"layers.0.q"'), model, sample={"x": X})
    assert "# STOP`" in str(refusal.value)
    assert "modules outside of `layers.0` can be edited" in str(refusal.value)
    peftc.compile(LORA.format('"layers.1.q"'), model, sample={"x": X})


def test_a_model_without_a_sample_is_refused_with_the_arguments() -> None:
    with pytest.raises(peftc.PeftcError, match="P507") as refusal:
        peftc.sites(Net(Block))
    assert "its forward takes `x`, at " in str(refusal.value)
    assert "in Net.forward: `def forward(self, x: Tensor)" in str(refusal.value)


def test_code_that_needs_data_is_not_said_to_fail() -> None:
    model = Net(CallsOperation, CallsOperation)
    assert model(X).shape == (2, 5, 3)
    with pytest.raises(peftc.PeftcError, match="P509") as refusal:
        peftc.compile(LORA.format("layer[*].ffn.up"), model, sample={"x": X})
    assert "its code asks for the data of tensors" in str(refusal.value)
    assert "register_fake" in str(refusal.value)
    assert "# STOP`" in str(refusal.value)
