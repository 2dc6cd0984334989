"""`torch.compile` of compiled models: whole graphs, the same numbers, and no more compilations than
the base needs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import EncoderDecoderCache, StaticCache

import peftc
from peftc.modules.form_hooks import HOOKED_FORMS
from tests import zoo
from tests.matrix import some
from tests.survival.harness import GENERATING, SPECS, close, compiled, text

pytestmark = pytest.mark.ahead_of_time

Step = tuple[str, Callable[[nn.Module], Any]]
SHALLOW: dict[str, dict[str, int]] = {  # compiling is slow, and all layers compile alike
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
    "llama": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=32):
        warnings.simplefilter("ignore")  # warnings of torch's compiler
        yield
    torch._dynamo.reset()


def steps(name: str, model: nn.Module) -> Iterator[Step]:
    """Typical calls of a model in order; each returns logits."""
    plain, longer = zoo.inputs(name, model), zoo.inputs(name, model, tokens=11)
    masked, labels = zoo.inputs(name, model, padding="left"), zoo.inputs(name, model, labels=True)
    yield "prefill", lambda m: m(**plain).logits
    yield "another length", lambda m: m(**longer).logits
    if name != "vit":
        yield "masked", lambda m: m(**masked).logits
    yield "training", lambda m: m.train()(**labels).logits
    yield "evaluation again", lambda m: m.eval()(**plain).logits
    if name in GENERATING:
        yield "no cache", lambda m: m(**masked, use_cache=False).logits
        yield "decoding", lambda m: decoded(m, plain)
        yield "static cache", lambda m: decoded(m, plain, static(m))


def static(model: Any) -> Any:
    """A static cache for a model."""
    config = getattr(model, "_orig_mod", model).config
    cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=16)
    if not config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, StaticCache(config=config.get_text_config(decoder=True), max_cache_len=7))


def decoded(model: Any, inputs: dict[str, Tensor], cache: Any = None) -> Tensor:
    """The logits of two tokens, one after the other, after a prefill."""
    out = model(**inputs, past_key_values=cache, use_cache=True)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    encoded = {"encoder_outputs": (out.encoder_last_hidden_state,)} if name != "input_ids" else {}
    logits = [out.logits]
    for i in range(2):
        logits.append(
            model(**encoded, **{name: inputs[name][:, i : i + 1]}, past_key_values=out.past_key_values).logits
        )
    return torch.cat(logits, 1)


@cache
def base_frames(name: str) -> dict[str, int]:
    model = zoo.build(name, **SHALLOW.get(name, {}))
    return {label: frames for label, _, frames in run(name, model, torch.compile)}


def run(name: str, model: Any, compiler: Callable[..., Any]) -> Iterator[tuple[str, Tensor, int]]:
    """The outputs in whole graphs, and the number of compilations so far."""
    counter = CompileCounterWithBackend("eager")
    fast = compiler(model, backend=counter, fullgraph=True)
    for label, call in steps(name, model):
        yield label, call(fast), counter.frame_count


@pytest.mark.parametrize(
    ("name", "spec"), some([("llama", "mam"), ("bart", "mam"), ("mixtral", "weights"), ("vit", "mam")], 4)
)
def test_one_graph_the_same_numbers_and_no_more_compilations(name: str, spec: str) -> None:
    model = compiled(name, spec, torch.float32, **SHALLOW.get(name, {}))
    expected = base_frames(name)
    torch._dynamo.reset()
    calls = dict(steps(name, model))
    for label, got, frames in run(name, model, torch.compile):
        assert frames <= expected[label], f"{label}: compiled {frames} times, the base {expected[label]}"
        with torch.no_grad():
            want = calls[label](model)
        close(got, want, label, tolerance=1e-5)


@pytest.mark.parametrize(("name", "spec"), [*zip(("bart", "llama", "vit"), SPECS, strict=False)])
def test_autograd_in_whole_graphs(name: str, spec: str) -> None:
    model = compiled(name, spec, torch.float32).train()
    inputs = zoo.inputs(name, model, labels=True)
    model(**inputs).loss.backward()
    want = {n: p.grad.clone() for n, p in peftc.parameters(model).items() if p.grad is not None}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss.backward()
    assert want
    for n, p in peftc.parameters(model).items():
        close(p.grad, want[n], n, tolerance=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    model = compiled("llama", "mam", torch.float32, num_hidden_layers=1)
    inputs = zoo.inputs("llama", model)
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True)(**inputs).logits, model(**inputs).logits, tolerance=1e-5)


@pytest.fixture(params=[False, True])
def hooked_forms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether a form of this process has had a hook."""
    before = HOOKED_FORMS[:]
    HOOKED_FORMS[:] = [True] * request.param
    yield
    HOOKED_FORMS[:] = before


@pytest.mark.usefixtures("hooked_forms")
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_layers_compiled_one_by_one(name: str) -> None:
    """Regional compilation: one compilation serves all layers of a kind, also after another form of
    the process had a hook. (If all layers share one reparametrised prefix, each has its own rows of
    it and its own compilation.)
    """
    spec = text("mam").replace(", reparam=mlp(5)", "")
    model, base = peftc.compile(spec, zoo.build(name), seed=0), zoo.build(name)
    inputs = zoo.inputs(name, model)
    want, counts = model(**inputs).logits, []
    for each in (base, model):
        counter = CompileCounterWithBackend("eager")
        for module in each.modules():
            if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer")):
                module.compile(backend=counter, fullgraph=True)
        with torch.no_grad():  # with frozen embeddings, gradients start after the first layer, which compiles twice
            got = each(**inputs).logits
        counts.append(counter.frame_count)
    close(got, want, tolerance=1e-5)
    assert 0 < counts[1] <= counts[0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_more_classes_of_models_than_dynamo_recompiles() -> None:
    """Each class has a `__call__` with a code object of its own, by which dynamo counts."""
    models, x = list[nn.Module](), torch.randn(1, 3, 8)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for k in range(3):
            model = type(f"Residual{k}", (Residual,), {})()
            peftc.compile('peft 1\nedit e at "linear" { h += lora(x, r=2) }', model, sample={"x": x}, seed=0)
            models.append(model)  # a model that is gone does not count
            assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_a_new_call_pattern_inside_compile_is_an_error_with_help() -> None:
    model = compiled("llama", "mam", torch.float32)
    inputs = zoo.inputs("llama", model)
    odd = {**inputs, "unheard_of": 1}
    with pytest.raises(Exception, match="make it once without"):
        torch.compile(model, backend="eager", fullgraph=True)(**odd)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(**odd).logits, model(**inputs).logits)
    torch._dynamo.reset()  # the graph break has traced the variant
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(**odd).logits, model(**inputs).logits)


def test_generate_compiles_the_model_with_a_static_cache() -> None:
    model = compiled("llama", "mam", torch.float32)
    ids = zoo.inputs("llama", model, padding="left")
    want = model.generate(**ids, max_new_tokens=4, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    got = model.generate(**ids, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(got, want)
