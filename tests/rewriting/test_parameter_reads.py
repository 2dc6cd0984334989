"""A Linear that is called in one mode, while its weight is read in another: an edit acts in both,
or is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import peftc
from benchmarks.families import build
from peftc.rewriting.legality.bypasses import own_parameters, parameter_reads
from tests.laws.harness import randomise
from tests.specialization.test_modes import mode

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LONG = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MODES = ("train", "eval", "no_grad", "inference_mode")
EDITS = {
    "h": "h += lora(x, r=2, alpha=4)",
    "sequential": "h += adapter(h, r=2)",
    "w": "w += lowrank(r=2)",
}


def by_function(fc: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, fc.weight, fc.bias)


def fastest(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) if torch.is_grad_enabled() else by_function(fc, x)


def of_names(layer: Layer, x: Tensor) -> Tensor:
    parameters = dict(layer.named_parameters())
    return F.linear(x, parameters["fc.weight"], parameters["fc.bias"])


class Kernel:
    """An object that is no module: what it does with a module is unknown."""

    def __call__(self, fc: nn.Linear, x: Tensor) -> Tensor:
        return fc(x) if torch.is_grad_enabled() else F.linear(x, fc.weight, fc.bias)


TABLE = {"linear": Kernel()}
Way = Callable[["Layer", Tensor], Tensor]
WAYS: dict[str, Way] = {
    "call with gradients": lambda s, x: s.fc(x) if torch.is_grad_enabled() else F.linear(x, s.fc.weight, s.fc.bias),
    "function with gradients": lambda s, x: F.linear(x, s.fc.weight, s.fc.bias) if torch.is_grad_enabled() else s.fc(x),
    "call in training": lambda s, x: s.fc(x) if s.training else F.linear(x, s.fc.weight, s.fc.bias),
    "function in training": lambda s, x: F.linear(x, s.fc.weight, s.fc.bias) if s.training else s.fc(x),
    "call of what is trained": lambda s, x: (
        s.fc(x) if s.fc.weight.requires_grad else F.linear(x, s.fc.weight, s.fc.bias)
    ),
    "function in inference mode": lambda s, x: by_function(s.fc, x) if torch.is_inference_mode_enabled() else s.fc(x),
    "function for a long input": lambda s, x: by_function(s.fc, x) if x.shape[1] > 6 else s.fc(x),
    "another function": lambda s, x: fastest(s.fc, x),
    "a method": lambda s, x: s.fast(x),
    "another object": lambda s, x: s.kernel(s.fc, x),
    "one of many": lambda s, x: TABLE["linear"](s.fc, x),
    "the function of its class": lambda s, x: s.fc(x) if torch.is_grad_enabled() else nn.Linear.forward(s.fc, x),
    "all parameters of the child": lambda s, x: s.fc(x) if torch.is_grad_enabled() else F.linear(x, *s.fc.parameters()),
    "all parameters": lambda s, x: s.fc(x) if torch.is_grad_enabled() else of_names(s, x),
    "a functional call": lambda s, x: (
        s.fc(x) if torch.is_grad_enabled() else functional_call(s.fc, dict(s.fc.named_parameters()), (x,))
    ),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.kernel = Kernel()

    def fast(self, x: Tensor) -> Tensor:
        layer = self.fc
        return layer(x) if torch.is_grad_enabled() else F.linear(x, getattr(layer, "weight"), layer.bias)  # noqa: B009

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.inner(self.norm(x))))


def layer_class(way: Way) -> type[Layer]:
    return type("WayLayer", (Layer,), {"inner": way})


PLAIN = layer_class(lambda s, x: s.fc(x))


class Model(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(cls() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(cls: type[nn.Module], text: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model(cls).double()
    model = peftc.compile(f'peft 1\nedit e at "layers.*.fc" {{ {text} }}', model, 0, sample={"x": X})
    randomise(peftc.parameters(model))
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edit", EDITS)
def test_one_effect_on_every_path(way: str, edit: str) -> None:
    """The same effect as on a model that always calls the Linear."""
    plain, model = compiled(PLAIN, EDITS[edit]), compiled(layer_class(WAYS[way]), EDITS[edit])
    for x in (X, LONG):
        for how in MODES:
            with mode(how, plain), mode(how, model):
                assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-10), (how, x.shape)
                with peftc.disabled(plain):
                    assert not torch.allclose(model(x), plain(x), rtol=0, atol=1e-3)
    out = model.train()(X)
    out.sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())


def by_hand(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.out(torch.relu(F.linear(layer.norm(x), layer.fc.weight, layer.fc.bias)))


class Around(nn.Module):
    """A model that reads the weights of its layers itself in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.fast = nn.ModuleList(PLAIN() for _ in range(2)), False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if torch.is_grad_enabled() else by_hand(layer, x)
        return x


class Flagged(Around):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = by_hand(layer, x) if self.fast else layer(x)
        return x


class Typed(Around):
    """Reads a parameter for its dtype, and asks for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(dtype=next(self.parameters()).dtype)
        for layer in self.layers:
            x = layer(x) * (1 if self.training else 1.0)
        return x


class Lengths(Around):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.shape[1] < 6 else x + layer.out(torch.relu(layer.fc(layer.norm(x))))
        return x


class Exists(Around):
    """Asks whether a layer has a child, and for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (1 if self.training else 1.0) if exists(layer.fc) else x
        return x


class ByModule(nn.Module):
    """A module without parameters that gets another module as argument."""

    def forward(self, fc: nn.Linear, x: Tensor) -> Tensor:
        return by_function(fc, x) if self.training else fc(x)


class Given(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.by = ByModule()

    def inner(self, x: Tensor) -> Tensor:
        return self.by(self.fc, x)


class InTurn(Layer):
    """Calls its children under other names, one of them twice."""

    def apply_to(self, f: nn.Module, x: Tensor) -> Tensor:
        return f(x)

    def inner(self, x: Tensor) -> Tensor:
        for f, scale in zip((self.fc, self.fc), (1.0, 2.0), strict=True):
            x = f(x) * scale
        return self.apply_to(self.fc, x)


class InTurnByWeight(InTurn):
    def apply_to(self, f: nn.Module, x: Tensor) -> Tensor:
        return f(x) if f.training else F.linear(x, f.weight, f.bias)


@pytest.mark.parametrize(
    ("cls", "glob", "refusal"),
    [
        (Around, "layers.*.fc", False),  # the sample runs without gradients: the model's code multiplies
        (Flagged, "layers.*.fc", True),
        (Flagged, "layers.*", True),  # the enclosing code runs its children one by one
        (Flagged, "layers.*.out", False),
        (Typed, "layers.*.fc", False),
        (Exists, "layers.*.fc", False),
        (Lengths, "layers.*", True),
        (Lengths, "layers.*.fc", False),
        (lambda: Model(Given), "layers.*.fc", True),
        (lambda: Model(InTurn), "layers.*.fc", False),
        (lambda: Model(InTurnByWeight), "layers.*.fc", True),
    ],
)
def test_edits_around_such_a_module_are_refused(cls: Callable[[], nn.Module], glob: str, refusal: bool) -> None:
    model = cls().double().eval()
    before = copy.deepcopy(model.state_dict())
    edit = "h += adapter(h, r=2)" if glob.endswith("*") else "w += lowrank(r=2)"
    text = f'peft 1\nedit e at "{glob}" {{ {edit} }}'
    if not refusal:
        peftc.compile(text, model, sample={"x": X})
        return
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(text, model, sample={"x": X})
    (diagnostic,) = excinfo.value.diagnostics
    assert diagnostic.code == "P435"
    assert diagnostic.span is not None
    if (cls, glob) == (Flagged, "layers.*.fc"):
        assert any(note.startswith("at ") and "in by_hand: `" in note for note in diagnostic.notes)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_edit_acts_where_code_multiplies_by_the_weight(with_gradients: bool) -> None:
    model = Around().double().eval()
    base = copy.deepcopy(model)
    peftc.compile('peft 1\nedit e at "layers.*.fc" { w += lowrank(r=2) }', model, sample={"x": X}, seed=0)
    randomise(peftc.parameters(model))
    factors = list(peftc.parameters(model).values())
    with torch.no_grad():
        for layer, down, up in zip(base.layers, factors[::2], factors[1::2], strict=True):
            layer.get_parameter("fc.weight").add_(up @ down)
    with torch.set_grad_enabled(with_gradients):
        torch.testing.assert_close(model(X), base(X), rtol=0, atol=1e-10)


class ReadsWeightDtype(nn.Module):
    """Reading the dtype of a weight, or the values of other weights, is no read of this one's
    values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other, self.weight = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.fc.weight, Tensor) and x.dtype != self.fc.weight.dtype and self.fc.bias is not None:
            x = x.to(self.fc.weight.dtype)
        return F.linear(self.fc(x) * self.weight, self.other.weight)


def exists(value: object) -> bool:
    return value is not None


def width(module: nn.Linear) -> int:
    return module.out_features if exists(module) and isinstance(module, nn.Linear) else 0


def default(value: Any, other: Any) -> Any:
    return value if exists(value) else other


identity = lambda *values: values[0]  # noqa: E731


class Asks(nn.Module):
    """Asks functions of its module whether it has a child, or gives the child to them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.other, self.last = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) if exists(self.fc) else x
        x = x * width(self.out)
        return identity(self.last, default(self.other, nn.Identity()))(self.out(x))


@pytest.mark.parametrize(
    ("cls", "region", "names"),
    [
        (Asks, "fc", []),
        (Asks, "out", [("out", "*")]),
        (Asks, "other", [("other", "*")]),
        (Asks, "last", [("last", "*")]),
        (ReadsWeightDtype, "fc", []),
        (ReadsWeightDtype, "other", [("other", "weight")]),
        (ReadsWeightDtype, "", []),
        (Around, "layers.1.fc", [("fc", "weight"), ("fc", "bias")]),
        (Around, "layers.1", [("fc", "weight"), ("fc", "bias")]),
        (Around, "layers.1.out", []),
        (
            layer_class(WAYS["another function"]),
            "fc",
            [(), ("weight",), ("bias",)],
        ),  # the source of a lambda is unknown
    ],
)
def test_reads_in_code(cls: Any, region: str, names: list[tuple[str, ...]]) -> None:
    model = cls()
    parameters = own_parameters(model.get_submodule(region), region, recurse=True) if region else ["weight"]
    assert [read.names for read in parameter_reads(model, parameters)] == names


def test_an_edit_acts_where_code_multiplies_by_the_transposed_weight() -> None:
    """`x @ self.weight.T` reads the new weight; `self.weight.device` is that of the stored one."""
    model, inputs = build("causal-lm", "falcon")
    model = model.double()
    with torch.no_grad():
        base = model(**inputs).logits
        peftc.compile("peft 2\nedit e at layer[*].attn.q | layer[*].ffn.up { w += lowrank(r=2) }\n", model, seed=0)
        randomise(peftc.parameters(model))
        edited = model(**inputs).logits
        peftc.fold(model)
        folded = model(**inputs).logits
    assert (edited - base).abs().max() > 1e-2
    torch.testing.assert_close(folded, edited, rtol=0, atol=1e-10)
