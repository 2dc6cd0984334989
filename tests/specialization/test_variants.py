"""Variants of generated forwards: the matching one runs, a new call pattern is traced, and no call
runs the wrong variant.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from benchmarks.families import build
from peftc.installation.record import installation_of
from peftc.specialization import guards
from peftc.specialization.generated_class import GeneratedClass
from tests import zoo
from tests.matrix import checkerboard, some

pytestmark = pytest.mark.ahead_of_time

ADAPTER = "peft 1\nedit e at layer[*].ffn { h += adapter(x, r=4, act=relu) }\n"
PREFIX = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"


def kinds(model: nn.Module) -> list[GeneratedClass]:
    return list({id(k): k for _, k in installation_of(model).regions}.values())


def compiled(name: str, spec: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = zoo.build(name, **options)
    return peftc.compile(spec, model, seed=0), zoo.inputs(name, model)


def test_generated_code_is_readable(golden: Callable[[str, str], None]) -> None:
    for name, spec in (("bart", ADAPTER), ("llama", PREFIX)):
        model, _ = compiled(name, spec)
        region = next(iter(peftc.graphs(model).values()))
        golden(f"{name}.py.txt", region.code + "\n")


def test_a_fused_weight_and_output(golden: Callable[[str, str], None]) -> None:
    spec = """peft 1
edit w at layer[*].attn.v { w = magnitude(w + lowrank(r=2)) }
edit h at layer[*].attn.q { h += lora(x, r=2) }
"""
    model, inputs = compiled("gpt2", spec)
    golden("gpt2.py.txt", next(iter(peftc.graphs(model).values())).code + "\n")
    base = zoo.build("gpt2")
    assert torch.equal(model(**inputs)[0], base(**inputs)[0])


def test_common_variants_are_there_before_the_first_call() -> None:
    model, inputs = compiled("llama", PREFIX)
    before = [len(k.variants) for k in kinds(model)]
    model(**inputs)
    model.train()
    model(**inputs)
    assert [len(k.variants) for k in kinds(model)] == before


def test_a_new_call_pattern_is_traced_once() -> None:
    model, inputs = compiled("bart", PREFIX)
    halves = {n: v.to(torch.int32) for n, v in inputs.items()}
    odd = {**inputs, "output_attentions": True, "foo": 1}
    count = sum(len(k.variants) for k in kinds(model))
    first = model(**odd)[0]
    more = sum(len(k.variants) for k in kinds(model))
    assert more > count
    assert torch.equal(model(**{**odd, "foo": 2})[0], first)
    model(**inputs)
    model(**halves)
    assert sum(len(k.variants) for k in kinds(model)) == more


@pytest.mark.parametrize("name", some(["bart", "t5", "llama", "bert", "gpt2", "opt"], 2))
def test_passthrough_arguments_need_no_new_variant(name: str) -> None:
    model, inputs = compiled(name, PREFIX + ADAPTER.partition("\n")[2])
    counts = [len(k.variants) for k in kinds(model)]
    for padding in ("left", "right"):
        model(**zoo.inputs(name, model, padding=padding))
    if name in zoo.GENERATING:
        model(**inputs, use_cache=True)
        ids = {n: v for n, v in inputs.items() if n != "decoder_input_ids"}
        model.generate(**ids, max_new_tokens=3, do_sample=False)
        model.generate(**ids, max_new_tokens=3, num_beams=2, do_sample=False)
    assert [len(k.variants) for k in kinds(model)] == counts


def test_length_and_batch_need_no_new_variant() -> None:
    model, _ = compiled("t5", PREFIX + ADAPTER.partition("\n")[2])
    model(**zoo.inputs("t5", model))
    counts = [len(k.variants) for k in kinds(model)]
    for batch, tokens in ((1, 3), (4, 9), (2, 17)):
        model(**zoo.inputs("t5", model, batch=batch, tokens=tokens))
    assert [len(k.variants) for k in kinds(model)] == counts


@pytest.mark.parametrize("name", ["bart", "t5", "llama"])
def test_another_dtype_is_another_variant(name: str) -> None:
    model, inputs = compiled(name, PREFIX + ADAPTER.partition("\n")[2])
    first = model(**inputs)[0]
    second = model.to(torch.float64)(**inputs)[0]
    assert second.dtype == torch.float64
    assert (first - second).abs().max() < 1e-3
    assert model.to(torch.bfloat16)(**inputs)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "padding"), checkerboard(("bart", "t5", "gpt2", "llama"), (None, "left")))
def test_attention_implementations_agree(name: str, padding: Any) -> None:
    model, _ = compiled(name, PREFIX)
    inputs = zoo.inputs(name, model, padding=padding)
    out = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        out.append(model(**inputs)[0])
    keep = inputs["attention_mask"].bool() if padding and name in ("gpt2", "llama") else slice(None)
    assert (out[0] - out[1])[keep].abs().max() < 1e-4


def test_an_implementation_that_cannot_take_a_prefix_is_refused() -> None:
    model, inputs = compiled("llama", PREFIX)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(peftc.PeftcError, match="P402"):
        model(**inputs)


def test_a_guard_that_fails_on_its_own_call_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = compiled("bart", ADAPTER)
    monkeypatch.setattr(guards, "conditions", lambda *_: ["False"])
    counts = [len(k.variants) for k in kinds(model)]
    with pytest.raises(peftc.PeftcError, match="P901"):
        model(**zoo.inputs("bart", model), foo=1)
    assert [len(k.variants) for k in kinds(model)] == counts


def test_a_failed_guard_never_runs_an_existing_variant() -> None:
    """If tracing is forbidden, a new call pattern raises; it never runs an existing variant."""
    model, inputs = compiled("bart", PREFIX + ADAPTER.partition("\n")[2])
    model(**inputs)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise LookupError

    for kind in kinds(model):
        kind.dispatch.__globals__["respecialize"] = forbidden
    model(**inputs)
    with pytest.raises(LookupError):
        model(**inputs, foo=1)
    with pytest.raises(LookupError), torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
    with pytest.raises(LookupError):
        model.to(torch.float64)(**inputs)


def test_a_guard_that_changes_during_the_forward_is_an_error() -> None:
    from peftc.runtime.guards import recheck_guard

    recheck_guard(True, "bool", True)
    recheck_guard(None, "is", None)
    recheck_guard(torch.ones(2, 3), "ndim", 2)
    recheck_guard({"a": 1, "b": 2}, "keys", ["a", "b"])
    with pytest.raises(peftc.PeftcError, match="P408"):
        recheck_guard(torch.ones(2, 3), "ndim", 3)
    with pytest.raises(peftc.PeftcError, match="P408"):
        recheck_guard(None, "ndim", None)
    with pytest.raises(peftc.PeftcError, match="P408"):
        recheck_guard(True, "bool", False)


@pytest.mark.parametrize("name", some(["bart", "t5", "gpt2", "bert"], 2))
def test_copies_and_pickles_are_models_of_their_own(name: str) -> None:
    model, inputs = compiled(name, PREFIX.replace("len=3", "len=3, reparam=mlp(5)") + ADAPTER.partition("\n")[2])
    want = model(**inputs)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs)[0], want)
        with torch.no_grad():
            for p in peftc.parameters(other).values():
                p.add_(0.1)
        assert not torch.equal(other(**inputs)[0], want)
        assert torch.equal(model(**inputs)[0], want)
        peftc.remove(other)
        assert torch.equal(other(**inputs)[0], zoo.build(name)(**inputs)[0])


def test_classes_keep_their_names() -> None:
    model, _ = compiled("bart", ADAPTER)
    layer, plain = model.model.encoder.layers[0], zoo.build("bart").model.encoder.layers[0]
    assert type(layer) is not type(plain)
    assert isinstance(layer, type(plain))
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(layer), attribute) == getattr(type(plain), attribute)


def test_layers_share_one_class_and_keep_their_own_attributes() -> None:
    model, inputs = compiled("llama", PREFIX, num_hidden_layers=4)
    classes = {type(layer.self_attn) for layer in model.model.layers}
    assert len(classes) == 1
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.1 * (i + 1)
    edited = model(**inputs)[0]
    base = zoo.build("llama", num_hidden_layers=4)
    for i, layer in enumerate(base.model.layers):
        layer.self_attn.scaling = 0.1 * (i + 1)
    with peftc.disabled(model):
        assert torch.equal(model(**inputs)[0], base(**inputs)[0])
    assert not torch.equal(edited, base(**inputs)[0])
    peftc.compile(ADAPTER.replace("relu", "relu, init=lora"), base, seed=0)
    assert torch.equal(base(**inputs)[0], peftc.remove(model)(**inputs)[0])


@pytest.mark.parametrize("first", ["sdpa", "eager"])
def test_code_that_uses_attention_weights(first: str) -> None:
    """Only some attention implementations return them."""
    (other,) = {"sdpa", "eager"} - {first}
    model, inputs = build("image-text-to-text", "t5gemma2")
    want: dict[str, torch.Tensor] = {}
    for name in (other, first):
        model.set_attn_implementation(name)
        want[name] = model(**inputs).logits
    peftc.compile("peft 1\nedit a at text.decoder.layer[*].attn.q { h += lora(x, r=2) }\n", model, seed=0)
    assert torch.equal(model(**inputs).logits, want[first])
    model.set_attn_implementation(other)
    assert torch.equal(model(**inputs).logits, want[other])


class Tabular(nn.Module):
    """Computes with the number of rows of a table, which layers have as many as they like."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(rows, 8)), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.up(self.norm(x)).relu())
        return x + h / self.table.shape[0] + self.table.mean(0)


def test_layers_with_tables_of_other_sizes_have_forwards_of_their_own() -> None:
    model, x = nn.Sequential(Tabular(3), Tabular(5), Tabular(3)), torch.randn(2, 4, 8)
    base = model(x)
    spec = "peft 1  edit e at layer[*].ffn { h += adapter(x, r=2, init=lora) }"
    peftc.compile(spec, model, seed=0, sample={"input": x})
    torch.testing.assert_close(model(x), base)
    assert len(kinds(model)) == 2
