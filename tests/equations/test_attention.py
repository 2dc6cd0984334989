"""`causal_attention(q, k, v, heads)`: what a form reads of other tokens, in a call and a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import peftc
from tests import zoo

SEEN = """peft 2
form seen(x, r, n) {
    param q[r, d(x)] = normal
    param k[r, d(x)] = normal
    param v[r, d(x)] = normal
    param up[d(out), r] = normal
    f = up @ causal_attention(q @ x, k @ x, v @ x, n)
}
edit e at layer[*].ffn { h += seen(x, r=4, n=2) }"""
LADDER = "peft 1\nedit side at output.layer[*] { h = ladder(h, x, reduction=4, heads=2, replace=true) }"
IDS = torch.tensor([[5, 6, 11, 7, 3, 8, 9], [4, 4, 5, 11, 7, 8, 2]])


def compiled(spec: str = SEEN, name: str = "llama", **options: Any) -> Any:
    """A compiled model whose edit changes much."""
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(spec, model, seed=0, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 2)
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **how: Any) -> Tensor:
    return model(input_ids=ids, **how).logits


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(peftc.PeftcError) as error:
        act()
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "P423"
    return diagnostic.message


def by_hand(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor) -> Tensor:
    """One row, one token and one head at a time."""
    result, e = torch.zeros_like(v), q.shape[-1] // heads
    for row in range(len(q)):
        for token in range(q.shape[1]):
            seen = [i for i in range(token + 1) if mask[row, i] or i == token]
            for h in range(heads):
                own = slice(h * e, (h + 1) * e)
                scores = torch.stack([q[row, token, own] @ k[row, i, own] / e**0.5 for i in seen]).exp()
                result[row, token, own] = sum(
                    s * v[row, i, own] for s, i in zip(scores / scores.sum(), seen, strict=True)
                )
    return result


@pytest.mark.parametrize("padding", ["left", "right", None])
def test_a_token_sees_those_before_it(padding: zoo.Padding | None) -> None:
    model, base = compiled(), zoo.build("llama", torch.float64).eval()
    inputs = zoo.inputs("llama", model, padding=padding)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    parameters = peftc.parameters(model)
    for i, layer in enumerate(base.get_submodule("model.layers").children()):
        own = {name.rpartition(".")[2]: p.detach() for name, p in parameters.items() if f"layer[{i}]" in name}

        def hook(_module: nn.Module, args: tuple[Tensor], h: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            q, k, v = (args[0] @ own[name].T for name in "qkv")
            return h + by_hand(q, k, v, 2, mask) @ own["up"].T

        layer.get_submodule("mlp").register_forward_hook(hook)
    with torch.no_grad():
        difference = model(**inputs).logits - base(**inputs).logits
    assert difference[mask].abs().max() < 1e-10


@pytest.mark.parametrize("spec", [SEEN, LADDER])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_generation_with_a_cache_is_generation_without(name: str, spec: str) -> None:
    model = compiled(spec.replace("layer[*].ffn", "decoder.layer[*].ffn"), name)
    inputs = zoo.inputs(name, model, padding="left")
    inputs.pop("decoder_input_ids", None)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        cached, whole = (model.generate(**inputs, **how, num_beams=beams, use_cache=use) for use in (True, False))
        assert torch.equal(cached, whole)
    base: Any = zoo.build(name, torch.float64)
    assert not torch.equal(model.generate(**inputs, **how), base.generate(**inputs, **how))


@pytest.mark.parametrize("spec", [SEEN, LADDER])
@pytest.mark.parametrize("sizes", [(7,), (4, 1, 1, 1), (1, 2, 4)])
def test_a_cache_is_filled_in_parts(spec: str, sizes: tuple[int, ...]) -> None:
    model = compiled(spec)
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    for masked in (False, True):
        whole = logits(model, attention_mask=mask) if masked else logits(model)
        parts: list[Tensor] = []
        cache, at = None, 0
        for size in sizes:
            end = at + size
            with torch.no_grad():
                how = {"attention_mask": mask[:, :end]} if masked else {}
                out = model(input_ids=IDS[:, at:end], past_key_values=cache, use_cache=True, **how)
            cache, at = copy.deepcopy(out.past_key_values), end
            parts.append(out.logits)
        shown = mask.bool() if masked else torch.ones_like(mask).bool()
        assert (torch.cat(parts, 1) - whole)[shown].abs().max() < 1e-10


def test_a_static_cache_keeps_them_too() -> None:
    model = compiled()
    cache = StaticCache(model.config, max_cache_len=12)
    with torch.no_grad():
        parts = [model(input_ids=IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model), rtol=0, atol=1e-10)


def filled(model: Any, ids: Tensor = IDS[:, :5]) -> DynamicCache:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True).past_key_values


def test_rows_of_a_cache_may_change_places() -> None:
    model = compiled()
    for order in ([1, 0], [1, 1], [0, 0]):
        cache: Any = filled(model)
        cache.reorder_cache(torch.tensor(order))
        got = logits(model, IDS[order, 5:], past_key_values=cache)
        torch.testing.assert_close(got, logits(model)[order, 5:], rtol=0, atol=1e-10)
    cache = filled(model)
    cache.batch_repeat_interleave(2)
    got = logits(model, IDS[[0, 0, 1, 1], 5:], past_key_values=cache)
    torch.testing.assert_close(got, logits(model)[[0, 0, 1, 1], 5:], rtol=0, atol=1e-10)


def test_a_cache_whose_tokens_are_unknown_is_refused() -> None:
    model, rest = compiled(), IDS[:, 5:]
    cropped = filled(model)
    cropped.crop(-1)
    assert "4 of the 5" in refusal(lambda: logits(model, rest, past_key_values=cropped))
    with peftc.disabled(model):
        foreign = filled(model)
    assert "without this edit" in refusal(lambda: logits(model, rest, past_key_values=foreign))
    other = filled(model)
    other.crop(-1)
    with peftc.disabled(model):
        logits(model, IDS[:, 6:7], past_key_values=other)  # as many tokens as before
    assert "other tokens" in refusal(lambda: logits(model, rest, past_key_values=other))
    own = filled(model)
    peftc.compile(SEEN.replace("edit e", "edit later"), model, name="later", seed=1)
    assert "without this edit" in refusal(lambda: logits(model, rest, past_key_values=own))


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    """The keys of one layer tell nothing of the tokens before."""
    base: Any = zoo.build("llama", torch.float64).eval()
    base.model.layers = base.model.layers[:1]
    base.config.num_hidden_layers = 1
    peftc.compile(SEEN, base, seed=0)
    ids = torch.tensor([[5, 6, 11, 7], [4, 4, 5, 7]])
    assert "same keys" in refusal(lambda: logits(base, ids[:, :1], past_key_values=filled(base, ids)))


def test_decoding_that_goes_back_is_refused() -> None:
    model = compiled()
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3}
    refusal(lambda: model.generate(prompt, **how))


def test_tasks_have_their_own_past() -> None:
    model = compiled(SEEN.replace("ffn {", "ffn per task {"), tasks=("a", "b"))
    with peftc.task(model, task_ids=["b", "a"]):
        mixed, cache = logits(model), filled(model)
        refusal(lambda: logits(model, IDS[:, 5:], past_key_values=cache))
    for row, task in enumerate("ba"):
        with peftc.task(model, task):
            torch.testing.assert_close(mixed[row], logits(model)[row], rtol=0, atol=1e-10)
    with peftc.task(model, "a"):
        own = filled(model)
    with peftc.task(model, "b"):
        assert "another task" in refusal(lambda: logits(model, IDS[:, 5:], past_key_values=own))


def test_a_ladder_with_attention_trains_beside_the_layers(tmp_path: Path) -> None:
    model = compiled(LADDER)
    want = logits(model)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = {name.rpartition(".")[2]: p.grad for name, p in peftc.parameters(model).items()}
    assert all(g is not None and bool(g.any()) for name, g in gradients.items() if name in ("query", "key", "value"))
    peftc.save(model.eval(), tmp_path)
    loaded = peftc.load(tmp_path, zoo.build("llama", torch.float64).eval())
    assert torch.equal(logits(loaded), want)
    whole = torch.compile(loaded, backend="eager")
    torch.testing.assert_close(logits(whole), want, rtol=0, atol=1e-10)
    assert "compiled code" in refusal(lambda: logits(whole, IDS[:, 5:], past_key_values=filled(model)))
    changed = IDS.clone()
    changed[:, 4] = 20
    assert torch.equal(logits(model, changed)[:, :4], want[:, :4])  # what comes later changes nothing before it
    cache = filled(copy.deepcopy(model))  # of a copy
    torch.testing.assert_close(logits(model, IDS[:, 5:], past_key_values=cache), want[:, 5:], rtol=0, atol=1e-10)


def checkpoints(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # the older name


def test_a_ladder_without_attention_needs_no_positions() -> None:
    model: Any = compiled(LADDER.replace(", heads=2", ""))
    model.train()
    checkpoints(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    attention: Any = compiled(LADDER)
    attention.train()
    checkpoints(attention)
    with pytest.raises(peftc.PeftcError, match="P423"):
        attention(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("causal_attention(q @ x, k @ x, v @ x, n + 1)", "P106"),
        ("causal_attention(q @ x, k @ x, v @ x, n - n)", "P106"),
        ("causal_attention(q @ x, up @ k @ x, v @ x, n)", "P301"),
        ("causal_attention(q, k @ x, v @ x, n)", "P301"),
        ("(n * causal_attention(q @ x, k @ x, v @ x))", "P108"),
    ],
)
def test_what_does_not_fit_is_refused(call: str, code: str) -> None:
    text = SEEN.replace("causal_attention(q @ x, k @ x, v @ x, n)", call)
    with pytest.raises(peftc.PeftcError) as error:
        peftc.plan(text, zoo.build("llama"))
    assert code in {diagnostic.code for diagnostic in error.value.diagnostics}


def test_a_plan_says_why_it_does_not_fold() -> None:
    assert "it depends on the states of other tokens" in str(peftc.plan(SEEN, zoo.build("llama")))
