"""Call patterns: caches of every kind, packed sequences, dtypes, attention implementations switched
after compiling.

The reference is an uncached forward, or a model compiled under that pattern from the start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

import peftc
from peftc.installation.record import installation_of
from peftc.specialization.generated_class import GeneratedClass
from tests import zoo
from tests.matrix import checkerboard
from tests.survival.harness import CACHED, SPECS, close, compiled, text

GENERATING = ("bart", "t5", "llama", "mixtral")


class Rounded(DynamicLayer):
    """A cache layer that rounds its keys and values, like quantised caches."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = rounded(self.keys), rounded(self.values)
        return keys, values


def rounded(value: Tensor) -> Tensor:
    return (value * 8).round() / 8


class QuantisedCache(Cache):
    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=Rounded)


def cache_of(kind: str, model: Any) -> Any:
    config = model.config.get_text_config(decoder=True)
    makers: dict[str, Callable[[], Any]] = {
        "dynamic": DynamicCache,
        "static": lambda: StaticCache(config=config, max_cache_len=16),
        "quantised": QuantisedCache,
    }
    if not model.config.is_encoder_decoder:
        return makers[kind]()
    cross = StaticCache(config=config, max_cache_len=7) if kind == "static" else DynamicCache()
    return EncoderDecoderCache(makers[kind](), cross)


def stepwise(model: Any, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    """The logits of the decoder's tokens: three at once, then one by one."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, encoded, logits = inputs[name], {}, list[Tensor]()
    for part in (ids[:, :3], *ids[:, 3:].split(1, dim=1)):
        rest = {} if name == "input_ids" else {"input_ids": inputs["input_ids"]}
        out = model(**(encoded or rest), **{name: part}, past_key_values=cache, use_cache=True)
        encoded = {"encoder_outputs": (out.encoder_last_hidden_state,)} if name != "input_ids" else {}
        logits.append(out.logits)
    return torch.cat(logits, 1)


def variants(model: nn.Module) -> int:
    return sum(len(k.variants) for k in {id(k): k for _, k in installation_of(model).regions}.values())


@pytest.mark.ahead_of_time
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_cached_is_uncached(name: str, kind: str) -> None:
    model = compiled(name, "mam")
    inputs, variants_before = zoo.inputs(name, model), variants(model)
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits
        got = stepwise(model, inputs, cache_of(kind, model))
    close(got, want)
    assert variants(model) == variants_before


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_quantised_cache(name: str) -> None:
    """Attention reads what the cache returns. Prefix rows are never stored in the cache."""
    model, base = compiled(name, "mam"), zoo.build(name, torch.float64)
    inputs = zoo.inputs(name, model)
    with torch.no_grad():
        got, exact = (stepwise(model, inputs, cache_of(kind, model)) for kind in ("quantised", "dynamic"))
        assert 1e-6 < (got - exact).abs().max() < 1
        with peftc.disabled(model):
            close(
                stepwise(model, inputs, cache_of("quantised", model)),
                stepwise(base, inputs, cache_of("quantised", base)),
            )
        cache = cache_of("quantised", model)
        stepwise(model, inputs, cache)
    layers = (cache.self_attention_cache if name == "bart" else cache).layers
    tokens = inputs["decoder_input_ids" if name == "bart" else "input_ids"].shape[1]
    assert all(layer.keys.shape[2] == tokens and torch.equal(layer.keys, rounded(layer.keys)) for layer in layers)


def test_packed_sequences() -> None:
    """Two sequences packed in one row, separated by `position_ids` that restart, equal the separate
    sequences.
    """
    for spec in CACHED:
        model = compiled("llama", spec)
        ids = zoo.inputs("llama", model)["input_ids"][:1]
        first, second = ids[:, :3], ids[:, 3:]
        positions = torch.cat([torch.arange(p.shape[1]) for p in (first, second)])[None]
        ends = torch.tensor([0, first.shape[1], ids.shape[1]], dtype=torch.int32)
        longest = max(first.shape[1], second.shape[1])
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        with torch.no_grad():
            want = torch.cat([model(input_ids=p, use_cache=False).logits for p in (first, second)], 1)
            close(model(input_ids=ids, position_ids=positions, use_cache=False).logits, want, spec)
            close(model(input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits, want, spec)


@pytest.mark.ahead_of_time
@pytest.mark.parametrize("name", ["bert", "llama", "mixtral"])
def test_explicit_position_ids(name: str) -> None:
    model = compiled(name, "mam")
    inputs, variants_before = zoo.inputs(name, model), variants(model)
    tokens = inputs["input_ids"].shape[1]
    with torch.no_grad():
        plain = model(**inputs).logits
        close(model(**inputs, position_ids=torch.arange(tokens)[None]).logits, plain)
        shifted = model(**inputs, position_ids=2 * torch.arange(tokens)[None]).logits
    assert (shifted - plain).abs().max() > 1e-4
    assert variants(model) == variants_before


@pytest.mark.parametrize(("spec", "name"), checkerboard(tuple(SPECS), ("bart", "llama")))
def test_an_implementation_switched_after_compiling(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = zoo.inputs(name, model)
    for implementation in ("eager", "sdpa"):
        fresh = zoo.build(name, torch.float64)
        fresh.set_attn_implementation(implementation)
        peftc.compile(text(spec), fresh, seed=0)
        fresh.load_state_dict(model.state_dict())
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, fresh(**inputs).logits), implementation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_branches_on_dtypes(dtype: torch.dtype) -> None:
    """T5 clamps overflow in float16 only."""
    block: Any = zoo.build("t5", dtype).encoder.block[1]
    x = torch.randn(1, 3, 32, dtype=dtype)
    with torch.no_grad():
        block.layer[1].DenseReluDense.wo.weight.mul_(3e4)
        want = block(x)[0]
        block.__class__ = GeneratedClass(type(block), frozenset({""}), (), "Block").cls
        got = block(x)[0]
    assert torch.equal(got, want)
    assert want.isfinite().all()
    assert ("isinf" in type(block)._peftc_kind.source) == (dtype is torch.float16)


# Guard failures
# --------------------------------------------------------------------------------------------------


def attention_call(
    model: Any, inputs: dict[str, Tensor], cross: bool
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The arguments of the last decoder layer's attention as the model calls it, with a filled
    cache.
    """
    layer = model.model.decoder.layers[-1]
    module = layer.encoder_attn if cross else layer.self_attn
    calls: list[Any] = []
    hook = module.register_forward_pre_hook(lambda m, a, k: calls.append((m, a, k)), with_kwargs=True)
    with torch.no_grad():
        model(**inputs, use_cache=True)
    hook.remove()
    return calls[-1]


Change = Callable[[dict[str, Any]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "no encoder states, which a full cache does not need": lambda k: {**k, "key_value_states": None},
    "no cache": lambda k: {**k, "past_key_values": None},
    "no mask": lambda k: {**k, "attention_mask": None},
    "another cache": lambda k: {**k, "past_key_values": DynamicCache()},
    "a keyword of one's own": lambda k: {**k, "of_ones_own": 1},
    "the same again": lambda k: k,
}


@pytest.mark.parametrize("cross", [True, False])
def test_an_unusual_call_computes_what_the_original_code_computes(cross: bool) -> None:
    """A generated forward called as no model calls it still computes what the original code
    computes.
    """
    model = zoo.build("bart")
    module, args, kwargs = attention_call(model, zoo.inputs("bart", model), cross)
    generated: Any = copy.deepcopy(module)
    generated.__class__ = GeneratedClass(type(module), frozenset({""}), (), "Own").cls
    for change in (lambda k: k, *CHANGES.values()):
        edited = change(kwargs)
        with torch.no_grad():
            want, got = (m(*args, **copy.deepcopy(edited)) for m in (module, generated))
        assert torch.equal(got[0], want[0])
    assert len(type(generated)._peftc_kind.variants) > 2


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_call_under_another_context_manager(around: Any) -> None:
    model, base = zoo.build("t5"), zoo.build("t5")
    peftc.compile(text("mam"), model, seed=0)
    inputs = zoo.inputs("t5", model)
    with peftc.disabled(model), around():
        got, want = model(**inputs).logits, base(**inputs).logits
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def generated(body: Callable[..., Tensor], **values: Any) -> Any:
    """A module with a generated forward."""

    class Own(nn.Module):
        def forward(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
            return body(self, x, y, **kwargs)

    module = Own()
    for name, value in values.items():
        setattr(module, name, value)
    module.__class__ = GeneratedClass(Own, frozenset({""}), (), "Own").cls
    return module


def one_is_not_true(self: Any, x: Tensor, y: Any) -> Tensor:
    return x + 1 if y is True else x * 3 if isinstance(y, int) else x * y


def unused(self: Any, x: Tensor, y: Any) -> Tensor:
    return x + 1 if y is not None else x


def dimensions(self: Any, x: Tensor, y: Any) -> Tensor:
    return x + y.ndim


def has_a_key(self: Any, x: Tensor, y: Any) -> Tensor:
    return x + 1 if "a" in y else x


def all_keys(self: Any, x: Tensor, y: Any) -> Tensor:
    for key in y:
        x = x * 2 if key == "a" else x + y[key]
    return x


def gradient(self: Any, x: Tensor, y: Any) -> Tensor:
    return x + 1 if y.requires_grad else x


CASES: dict[Callable[..., Tensor], list[Any]] = {
    one_is_not_true: [1, True, 1, 1.0, torch.tensor(1.0), torch.ones(3), 2],
    unused: [torch.ones(3), None, torch.ones(3), 0, ()],
    dimensions: [torch.ones(3), torch.ones(3, 1), torch.ones(1, 1, 1)],
    has_a_key: [{"a": 1}, {"b": 1}, {}, {"a": torch.ones(3)}],
    all_keys: [{"a": torch.ones(3)}, {"b": torch.ones(3)}, {}, {"a": torch.ones(3), "b": torch.ones(3)}],
    gradient: [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3)],
}


@pytest.mark.parametrize("body", CASES)
def test_arguments_that_need_different_variants(body: Callable[..., Tensor]) -> None:
    for first in CASES[body]:
        module = generated(body)
        x = torch.randn(3)
        for y in (first, *CASES[body]):
            assert torch.equal(module(x, y), body(module, x, y)), type(module)._peftc_kind.source


def test_keywords_compared_by_identity() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x * (2 if kwargs else 1)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return self.inner(x, **kwargs) + (1 if kwargs.get("use_cache") is False else 0)

    module, base, x = Own(), Own(), torch.randn(3)
    module.__class__ = GeneratedClass(Own, frozenset({""}), (), "Own").cls
    for kwargs in ({}, {"use_cache": True}, {"use_cache": False}, {"use_cache": None}, {"position_ids": x}):
        assert torch.equal(module(x, **kwargs), base(x, **kwargs))


def test_strings_of_a_config_through_any_method() -> None:
    from transformers import PretrainedConfig

    def body(self: Any, x: Tensor, y: Any) -> Tensor:
        return x + {"one": 1, "two": 2}[f"{self.config.kind.lower()}"]

    module = generated(body, config=PretrainedConfig(kind="One"))
    x = torch.randn(3)
    assert torch.equal(module(x), x + 1)
    module.config.kind = "TWO"
    assert torch.equal(module(x), x + 2)
