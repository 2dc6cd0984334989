"""The analysis of a model whose repeated layers are copied lazily is that of plain copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.fakes.lazy_layers import lazy_copy
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.modules.lazy_children import attribute_of, lazy_children, prototype_of
from peftc.modules.walk import outline, set_eval
from peftc.observation.recorder import Recorder
from peftc.observation.sample_forward import SampleForward
from peftc.recognition.analysis import analyse
from tests import zoo
from tests.layers import Attention, Layers, Network
from tests.recognition.same_analysis import check_same_analysis, lazy_layers, plain_copies

D = 8
DEEP = {
    "bart": {"encoder_layers": 4, "decoder_layers": 5},
    "t5": {"num_layers": 4, "num_decoder_layers": 4},
    "qwen2": {
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}


class Block(nn.Module):
    def __init__(self, flag: bool = False, number: float = 0) -> None:
        super().__init__()
        self.attn, self.ffn, self.norm = Attention(D), Network(D), nn.LayerNorm(D)
        self.ffn.flag, self.ffn.number = flag, number

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        y: Any = self.ffn(x)
        y = y * 2 if self.ffn.flag else y
        return y if self.ffn.number == 3 else x + y


class Wide(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x + self.attn(x))


def blocks(count: int = 4) -> list[nn.Module]:
    return [Block() for _ in range(count)]


class Tail(nn.Module):
    """Layers in another module, which `forward` may look into."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers(*blocks())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class ByName(Tail):
    """Enters one layer by the name of its part."""

    def forward(self, x: Tensor) -> Tensor:
        third: Any = self.body.layers[2]
        return self.body(x) + third.ffn(x)


class Direct(Tail):
    """Calls the forward of a part, and computes with a weight."""

    def forward(self, x: Tensor) -> Tensor:
        third, last = (self.body.get_submodule(f"layers.{i}") for i in (2, 3))
        x = third.get_submodule("ffn.up").forward(x)[..., :D]
        return self.body(x) @ last.get_parameter("attn.q.weight")


class AllModules(Tail):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * sum(isinstance(module, Network) for module in self.modules())


class Widths(Tail):
    """The layers get other arguments each."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.body.layers):
            x = layer(x)[:, i > 1 :]
        return x


def alternating() -> nn.Module:
    return Layers(*(kind() for _ in range(3) for kind in (Block, Wide)))


def one_flag() -> nn.Module:
    return Layers(*(Block(flag=i == 2) for i in range(5)))


def numbers() -> nn.Module:
    return Layers(*(Block(number=i) for i in range(6)))


def common_parameter() -> nn.Module:
    layers: list[Any] = blocks()
    layers[3].ffn.up.weight = layers[1].ffn.up.weight
    return Layers(*layers)


def common_module() -> nn.Module:
    layers: list[Any] = blocks()
    layers[3].ffn.up = layers[1].ffn.up
    return Layers(*layers)


def one_layer_twice() -> nn.Module:
    layers: list[Any] = blocks()
    return Layers(*layers, layers[2])


def first_layer_twice() -> nn.Module:
    first, *others = blocks()
    return Layers(first, first, *others)


def one_epsilon() -> nn.Module:
    layers: list[Any] = blocks()
    layers[2].norm.eps = 1e-3
    return Layers(*layers)


def ties_inside() -> nn.Module:
    layers: list[Any] = blocks()
    for layer in layers:
        layer.attn.k.weight = layer.attn.q.weight
    return Layers(*layers)


def overlaps_inside() -> nn.Module:
    layers: list[Any] = blocks()
    for layer in layers:
        layer.attn.q.weight = nn.Parameter(torch.randn(1, D).expand(D, D))
    return Layers(*layers)


def two_lists() -> nn.Module:
    model: Any = Layers(*blocks())
    model.first = nn.ModuleList(list(model.layers)[:2])
    return model


def common_memory() -> nn.Module:
    layers: list[Any] = blocks()
    memory = torch.randn(3 * D, D)
    layers[1].attn.q.weight = nn.Parameter(memory[: D + 1][:D])
    layers[2].attn.q.weight = nn.Parameter(memory[D - 1 :][:D])
    return Layers(*layers)


def plain_list() -> nn.Module:
    model: Any = Layers(*blocks())
    model.attentions = [layer.attn for layer in model.layers]
    return model


def up_and_down() -> nn.Module:
    model: Any = Layers(*blocks())
    for layer in model.layers:
        vars(layer)["siblings"] = model.layers
    return model


def own_lists() -> nn.Module:
    model: Any = Layers(*blocks())
    for layer in model.layers:
        layer.ffn.sizes, layer.ffn.names = [1, 2], {"a": (1, None)}
    model.layers[2].ffn.sizes.append(3)
    return model


def forward_of_an_instance() -> nn.Module:
    layers: list[Any] = blocks()
    plain = layers[2].ffn.forward
    layers[2].ffn.forward = lambda x: plain(x) * 2  # pyright: ignore[reportUnknownLambdaType]
    return Layers(*layers)


def hooks() -> nn.Module:
    layers = blocks()
    layers[2].register_forward_hook(lambda *_: None)
    return Layers(*layers)


def half_frozen() -> nn.Module:
    layers = blocks()
    layers[2].requires_grad_(False)
    return Layers(*layers, nn.Identity())


def other_dtype() -> nn.Module:
    layers: list[Any] = blocks()
    layers[2].ffn.register_buffer("scale", torch.ones(2), persistent=False)
    layers[3].ffn.register_buffer("scale", torch.ones(2), persistent=True)
    return Layers(*layers)


MODELS: list[tuple[Callable[[], nn.Module], int]] = [
    (Tail, 3),
    (ByName, 2),
    (Direct, 1),
    (AllModules, 0),
    (Widths, 2),
    (alternating, 4),
    (one_flag, 3),
    (numbers, 0),
    (own_lists, 2),
    (common_parameter, 0),
    (common_module, 0),
    (one_layer_twice, 0),
    (first_layer_twice, 0),
    (one_epsilon, 2),
    (ties_inside, 0),
    (overlaps_inside, 0),
    (two_lists, 0),
    (common_memory, 0),
    (plain_list, 0),
    (up_and_down, 0),
    (forward_of_an_instance, 2),
    (hooks, 2),
    (half_frozen, 2),
    (other_dtype, 1),
]


@pytest.mark.parametrize(("build", "lazy"), MODELS, ids=[getattr(b, "__name__", "") for b, _ in MODELS])
def test_the_analysis_is_that_of_plain_copies(build: Callable[[], nn.Module], lazy: int) -> None:
    torch.manual_seed(0)
    assert len(check_same_analysis(build(), {"x": torch.randn(2, 5, D)})) == lazy


@pytest.mark.parametrize("build", [build for build, _ in MODELS], ids=[getattr(b, "__name__", "") for b, _ in MODELS])
def test_it_is_on_meta(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = build()
    check_same_analysis(model, {"x": torch.randn(2, 5, D)})


@pytest.mark.parametrize("name", zoo.SPECIES)
def test_so_is_that_of_every_architecture(name: str) -> None:
    model = zoo.build(name, **DEEP.get(name, {"num_hidden_layers": 5}))
    check_same_analysis(model.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "mixtral"])
def test_equal_layers_stay_lazy(name: str) -> None:
    analysis = analyse(zoo.build(name, num_hidden_layers=6))
    assert len(lazy_layers(analysis)) == 5


def observed(model: nn.Module, x: Tensor, run_all: bool) -> SampleForward:
    names = [f"body.layers.{i}" for i in range(4)]
    return Recorder(model, fake_mode(model), names).run(lambda: model(x), run_all)


@pytest.mark.parametrize("build", [ByName, Direct, Widths])
@pytest.mark.parametrize("run_all", [False, True])
def test_what_is_copied_late_is_observed(build: Callable[[], nn.Module], run_all: bool) -> None:
    model, x = build(), torch.randn(2, 5, D)
    lazy = lazy_copy(model)
    assert lazy is not None
    record = observed(lazy, x, run_all)
    with plain_copies():
        plain = analyse(model, {"x": x}).structure.model
    other = observed(plain, x, run_all)
    for name in ("calls", "callers", "external_reads", "weight_products", "token_products", "cross_layer_calls"):
        assert getattr(record, name) == getattr(other, name), name
    assert [*record.calls] == [*other.calls]
    assert not any(vars(m).get("forward") or m._forward_hooks or m._forward_pre_hooks for m in lazy.modules())


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    copies = lazy_copy(model)
    assert copies is not None
    return copies.get_submodule("layers").children()


READS: list[Callable[[dict[str, Any]], Any]] = [
    lambda d: d["ffn"],
    lambda d: "ffn" in d,
    lambda d: d.get("ffn"),
    lambda d: [*d],
    lambda d: len(d),
    lambda d: bool(d),
    lambda d: [*d.items()],
    lambda d: [*d.values()],
    lambda d: [*d.keys()],
    lambda d: [*reversed(d)],
    lambda d: {**d},
    lambda d: dict(d),
    lambda d: d | {},
    lambda d: {} | d,
    lambda d: d == {},
    lambda d: d.copy(),
    lambda d: copy.copy(d),
    lambda d: d.pop("ffn"),
    lambda d: d.setdefault("ffn"),
    lambda d: d.update(ffn=None),
    lambda d: d.__setitem__("ffn", None),
    lambda d: d.__delitem__("ffn"),
]


@pytest.mark.parametrize("read", READS)
def test_children_are_copied_whoever_looks_at_them(read: Callable[[dict[str, Any]], Any]) -> None:
    _, layer, *_ = layers_of(Layers(*blocks()))
    children = vars(layer)["_modules"]
    assert lazy_children(layer) is children
    read(children)
    assert lazy_children(layer) is None
    assert type(vars(layer)["_modules"]) is dict
    assert children == vars(layer)["_modules"]


def test_a_layer_has_attributes_of_its_own() -> None:
    _, second, third, *_ = layers_of(numbers())
    assert attribute_of(third, "ffn.number") == 2
    assert attribute_of(third, "norm.eps") == 1e-5
    with pytest.raises(AttributeError):
        attribute_of(third, "ffn.missing")
    assert lazy_children(third) is not None
    ffn: Any = third.get_submodule("ffn")
    assert ffn.number == attribute_of(third, "ffn.number") == 2
    assert prototype_of(second) is not second
    assert prototype_of(third) is third
    assert third.get_parameter("ffn.up.weight") is not prototype_of(second).get_parameter("ffn.up.weight")


def test_a_layer_has_lists_of_its_own() -> None:
    sizes = [vars(layer.get_submodule("ffn"))["sizes"] for layer in layers_of(own_lists())]
    assert sizes == [[1, 2], [1, 2], [1, 2, 3], [1, 2]]
    assert len({*map(id, sizes)}) == len(sizes)


class NoOperations(TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any) -> Any:
        raise AssertionError


class NoFunctions(TorchFunctionMode):
    def __torch_function__(self, *_: Any) -> Any:
        raise AssertionError


def test_children_are_copied_outside_of_modes() -> None:
    _, layer, *_ = layers_of(Layers(*blocks()))
    with NoOperations(), NoFunctions():
        assert layer.get_submodule("ffn.up")


def test_lazy_children_can_be_copied_and_pickled() -> None:
    model = zoo.build("llama", num_hidden_layers=4)
    lazy = lazy_copy(model)
    assert lazy is not None
    assert [name for name, _ in fake_copy(lazy).named_modules()] == [name for name, _ in model.named_modules()]
    layer: Any = [*layers_of(Layers(*blocks()))][2]
    children = vars(layer)["_modules"]
    assert children.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1] == (vars(layer)["_modules"],)


def test_the_mode_is_that_of_all_modules() -> None:
    lazy = lazy_copy(zoo.build("llama", num_hidden_layers=4).train())
    assert lazy is not None
    set_eval(lazy)
    assert lazy_children(lazy.get_submodule("model.layers.2")) is not None
    assert not any(module.training for module in lazy.modules())


def test_an_outline_copies_nothing() -> None:
    model = zoo.build("llama", num_hidden_layers=4)
    lazy = lazy_copy(model)
    assert lazy is not None
    assert [(n, type(m)) for n, m in outline(lazy)] == [(n, type(m)) for n, m in model.named_modules()]
    assert lazy_children(lazy.get_submodule("model.layers.2")) is not None


def test_a_lazy_copy_keeps_nothing_of_the_model() -> None:
    model: Any = Layers(*blocks())
    weights = [weakref.ref(p) for p in model.parameters()]
    lazy = lazy_copy(model)
    assert lazy is not None
    with torch.no_grad():
        model.layers[2].ffn.up.weight = nn.Parameter(torch.zeros(3, 3))
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert lazy.get_parameter("layers.2.ffn.up.weight").shape == (2 * D, D)
