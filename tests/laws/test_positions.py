"""Forms that act at the first or last tokens: under padding, with caches, and where positions are
unknown.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import peftc
from benchmarks.families import build
from tests import zoo
from tests.reference import literature
from tests.reference.reference import Reference

FIRST = "peft 1\nedit e at layer[*] { h += reft(h, r=2, first=2) }"
ENDS = "peft 1\nedit e at layer[*] { h += reft(h, r=2, first=2, last=1) }"


def compiled(name: str, spec: str = FIRST) -> nn.Module:
    """A compiled model with perturbed parameters."""
    model = zoo.build(name, torch.float64)
    peftc.compile(spec, model, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(peftc.PeftcError) as excinfo:
        act()
    return excinfo.value.diagnostics[0].code


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["bart", "bert", "gpt2", "llama"])
def test_first_and_last_tokens_are_those_that_the_mask_shows(name: str, padding: zoo.Padding) -> None:
    model, ref = compiled(name, ENDS), Reference(name, zoo.build(name, torch.float64))
    literature.reft("e", first=2, last=1)(ref, {k: p.detach() for k, p in peftc.parameters(model).items()})
    inputs = zoo.inputs(name, model, padding=padding)
    actual, expected = output(model, inputs), output(ref.model, inputs)
    attended = slice(None) if ref.model.config.is_encoder_decoder else inputs["attention_mask"].bool()
    assert (actual - expected)[attended].abs().max() < 1e-10


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generation_with_a_cache_is_generation_without(name: str) -> None:
    model = compiled(name)
    inputs = zoo.inputs(name, model, padding="left")
    inputs.pop("decoder_input_ids", None)
    outputs = [
        model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=cached, num_beams=beams)
        for beams in (1, 3)
        for cached in (True, False)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    plain = zoo.build(name, torch.float64).generate(**inputs, max_new_tokens=6, do_sample=False)
    assert not torch.equal(outputs[0], plain)


@pytest.mark.parametrize("masked", [True, False])
def test_a_prompt_can_be_prefilled_in_chunks(masked: bool) -> None:
    model = compiled("llama")
    inputs = zoo.inputs("llama", model, padding="left" if masked else None)
    ids, mask, whole = inputs["input_ids"], inputs.get("attention_mask"), output(model, inputs)
    cache, parts = None, []
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 7)):
        mask_kwargs = {} if mask is None else {"attention_mask": mask[:, :stop]}
        with torch.no_grad():
            out = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, **mask_kwargs)
        cache = out.past_key_values
        parts.append(out.logits)
    short = torch.ones_like(ids[:, :1])
    assert refusal(lambda: model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=short)) == "P423"
    attended = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert (torch.cat(parts, 1) - whole)[attended].abs().max() < 1e-10


def test_calls_whose_positions_are_unknown_are_refused() -> None:
    model = compiled("gpt2", ENDS)
    inputs = zoo.inputs("gpt2", model)
    ids = inputs["input_ids"]
    assert refusal(lambda: model.generate(**inputs, max_new_tokens=2)) == "P423"  # its last token is unknown
    assert refusal(lambda: model(ids, attention_mask=torch.zeros(2, 1, 7, 7, dtype=torch.float64))) == "P423"
    assert refusal(lambda: model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2))) == "P423"
    layer = model.get_submodule("transformer.h.0")
    assert refusal(lambda: layer(torch.zeros(2, 7, 32, dtype=torch.float64))) == "P423"
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the older name
    enable()  # the backward pass recomputes layers
    assert refusal(lambda: model(**inputs)[0].sum().backward()) == "P423"


@pytest.mark.parametrize(
    ("name", "spec", "underlined"),
    [
        ("bart", "edit e at layer[*].attn.cross.k { h += reft(h, r=2, first=1) }", "reft(h, r=2, first=1)"),
        ("bart", "edit e at head { let f = reft(h, r=2, first=1)  h += f }", "reft(h, r=2, first=1)"),
        ("bart", "let r = shared(reft(r=2, first=1))\nedit e at layer[*] { h += r(h) }", "r(h)"),
        ("gpt2", f"{FIRST[7:]}\nedit p at embed {{ h = concat(prompt(len=2), h) }}", "reft(h, r=2, first=2)"),
        ("gpt2", f'{FIRST[7:]}\nedit p at "transformer" {{ h += adapter(h, r=2) }}', "reft(h, r=2, first=2)"),
        ("vit", FIRST[7:], "reft(h, r=2, first=2)"),
    ],
)
def test_sites_without_known_positions_are_refused_by_the_planner(name: str, spec: str, underlined: str) -> None:
    model = zoo.build(name)
    before = type(model), list(model.state_dict())
    for act in (peftc.plan, peftc.compile):
        with pytest.raises(peftc.PeftcError) as excinfo:
            act(f"peft 1\n{spec}", model)
        (diagnostic,) = excinfo.value.diagnostics
        assert diagnostic.code == "P422"
        assert diagnostic.source
        assert diagnostic.span
        assert diagnostic.source.text[diagnostic.span.start : diagnostic.span.end] == underlined
    assert (type(model), list(model.state_dict())) == before


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_a_state_that_does_not_count_its_tokens_is_refused(name: str) -> None:
    """The state of a recurrence does not say whether the next tokens are the first."""
    model: Any = build("causal-lm", name)[0].eval()
    peftc.compile(FIRST, model, seed=0)
    ids = torch.tensor([[5, 6, 7, 4]])
    assert output(model, {"input_ids": ids}).isfinite().all()
    assert refusal(lambda: model.generate(ids, max_new_tokens=2, pad_token_id=1)) == "P423"


def test_copies_and_other_specs_keep_the_position_tracker() -> None:
    model = compiled("gpt2")
    inputs = zoo.inputs("gpt2", model, padding="left")
    expected = output(model, inputs)
    other = copy.deepcopy(model)
    assert torch.equal(output(other, inputs), expected)
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), inputs), expected)
    peftc.compile("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2, alpha=2) }", model, name="q", seed=0)
    assert torch.equal(output(model, inputs), expected)
    peftc.remove(model)
    assert torch.equal(output(model, inputs), output(zoo.build("gpt2", torch.float64), inputs))
    assert torch.equal(output(other, inputs), expected)
    assert torch.equal(output(torch.compile(other, backend="eager", fullgraph=True), inputs), expected)


def test_a_prefix_is_no_seed_of_a_cache_whose_tokens_are_counted() -> None:
    prefix = "edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }"
    model = compiled("gpt2", f"{FIRST}\n{prefix}")
    assert refusal(lambda: peftc.fold(model, into="state")) == "P538"


def test_forms_at_some_positions_do_not_fold() -> None:
    verdict = str(peftc.plan(FIRST, zoo.build("gpt2")))
    assert "it acts on some positions only" in verdict


@pytest.mark.parametrize("padding", ["left", None])
def test_rows_of_several_tasks_have_their_own_positions(padding: zoo.Padding | None) -> None:
    model = zoo.build("llama", torch.float64)
    spec = ENDS.replace("layer[*] {", "layer[*] per task {")
    peftc.compile(spec, model, seed=0, tasks=("a", "b"))
    inputs = zoo.inputs("llama", model) if padding is None else zoo.inputs("llama", model, padding=padding)
    with peftc.task(model, task_ids=["b", "a"]):
        mixed = output(model, inputs)
    for row, task in enumerate("ba"):
        with peftc.task(model, task):
            assert (mixed[row] - output(model, inputs)[row]).abs().max() < 1e-10


def test_a_failed_second_spec_keeps_the_position_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled("llama")
    inputs = zoo.inputs("llama", model)
    before = output(model, inputs)

    def warm(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("peftc.installation.reinstall.warm", warm)
    with pytest.raises(RuntimeError):
        peftc.compile("peft 1\nedit f at layer[*].ffn { h += adapter(h, r=2) }", model)
    assert torch.equal(output(model, inputs), before)


def test_an_edit_may_be_called_positions() -> None:
    model = compiled("llama")
    inputs = zoo.inputs("llama", model)
    before = output(model, inputs)
    peftc.compile("peft 1\nedit positions at layer[*].ffn { h += adapter(h, r=2) }", model, name="two")
    with peftc.disabled(model, "two"):
        assert torch.equal(output(model, inputs), before)


def test_rows_stay_orthonormal_in_half_precision() -> None:
    """torch has no half-precision `qr`."""
    model = compiled("llama").to(torch.bfloat16)
    assert bool(output(model, zoo.inputs("llama", model)).isfinite().all())


ACTIVATED = """peft 2
form activated(x, r, token) {
    param A[r, d(x)] = normal
    param B[d(out), r] = normal
    f = positions(B @ (A @ x), none, none, token)
}
edit e at layer[*].attn.v { h += activated(x, r=2, token=11) }"""


def activated(name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A compiled model, and one whose hooks do the same in a call without a cache."""
    model, ref = compiled(name, ACTIVATED), zoo.build(name, torch.float64)
    parameters = peftc.parameters(model)
    ids: list[Tensor] = []
    ref.register_forward_pre_hook(
        lambda module, args, kwargs: ids.__setitem__(slice(None), [kwargs["input_ids"]]), with_kwargs=True
    )
    for i, layer in enumerate(ref.get_submodule("model.layers").children()):
        a, b = (next(p for key, p in parameters.items() if f"layer[{i}]" in key and key.endswith(n)) for n in "AB")

        def hook(module: nn.Module, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            keep = torch.stack([torch.tensor([11 in row[: i + 1].tolist() for i in range(len(row))]) for row in ids[0]])
            return out + (args[0] @ a.T @ b.T) * keep.unsqueeze(-1)

        layer.get_submodule("self_attn.v_proj").register_forward_hook(hook)
    return model, ref


def test_an_edit_acts_from_a_token_on() -> None:
    model, ref = activated()
    ids = torch.tensor([[5, 6, 11, 7, 11, 8], [11, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9]])
    torch.testing.assert_close(output(model, {"input_ids": ids}), output(ref, {"input_ids": ids}), rtol=0, atol=1e-10)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0  # the token is padding
    plain = zoo.build("llama", torch.float64)
    masked = output(model, {"input_ids": ids, "attention_mask": mask})[1, 1:]
    torch.testing.assert_close(
        masked, output(plain, {"input_ids": ids, "attention_mask": mask})[1, 1:], rtol=0, atol=1e-10
    )


def test_an_edit_that_acts_from_a_token_on_knows_what_is_in_the_cache() -> None:
    model, ref = activated()
    ids = torch.tensor([[5, 6, 11, 7, 3, 8], [4, 4, 5, 11, 7, 8]])
    whole = output(ref, {"input_ids": ids})
    for sizes in ((6,), (4, 1, 1), (2, 2, 2), (1, 1, 2, 2)):
        cache, parts, at = None, [], 0
        for size in sizes:
            with torch.no_grad():
                out = model(input_ids=ids[:, at : at + size], past_key_values=cache, use_cache=True)
            cache, at = copy.deepcopy(out.past_key_values), at + size
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    assert isinstance(cache, DynamicCache)
    cache.crop(-1)
    assert refusal(lambda: model(input_ids=ids[:, 5:], past_key_values=cache)) == "P423"
    with torch.no_grad():
        mixed = model(input_ids=ids[:, :3], use_cache=True).past_key_values  # the token of one row
        mixed.reorder_cache(torch.tensor([1, 0]))
        out = model(input_ids=ids.flip(0)[:, 3:], past_key_values=mixed)
        torch.testing.assert_close(out.logits, whole.flip(0)[:, 3:], rtol=0, atol=1e-10)
        plain = zoo.build("llama", torch.float64)
        other = model(input_ids=ids[:, :3], use_cache=True).past_key_values
        other.crop(-1)
        plain(input_ids=ids[:, 2:3], past_key_values=other)  # as many tokens as before
    assert refusal(lambda: model(input_ids=ids[:, 3:], past_key_values=other)) == "P423"
    foreign = zoo.build("llama", torch.float64)(input_ids=ids[:, :2], use_cache=True).past_key_values
    assert refusal(lambda: model(input_ids=ids[:, 2:], past_key_values=foreign)) == "P423"
    embedded = model.get_input_embeddings()(ids)
    assert refusal(lambda: model(inputs_embeds=embedded)) == "P423"


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_from_a_token_on_is_the_same_with_a_cache(beams: int) -> None:
    model, _ = activated()
    with torch.no_grad():
        model.get_submodule("lm_head").weight[11] += 0.05  # some rows, not all, come to the token
    for prompt in ([[5, 6, 11, 7], [11, 4, 5, 6]], [[5, 6, 8, 7], [9, 4, 5, 6], [5, 11, 4, 4]]):
        outputs = [
            model.generate(
                torch.tensor(prompt),
                max_new_tokens=8,
                do_sample=False,
                use_cache=cached,
                num_beams=beams,
                pad_token_id=1,
            )
            for cached in (True, False)
        ]
        assert torch.equal(*outputs)
    plain = zoo.build("llama", torch.float64).generate(
        torch.tensor(prompt), max_new_tokens=8, do_sample=False, pad_token_id=1
    )
    assert not torch.equal(outputs[0], plain)
