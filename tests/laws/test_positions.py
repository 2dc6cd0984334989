"""Forms that act at the first or last tokens: on padding, in caches, and where nothing tells the
positions.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from benchmarks.families import build
from tests import zoo
from tests.reference import literature
from tests.reference.reference import Reference

FIRST = "peft 1\nedit e at layer[*] { h += reft(h, r=2, first=2) }"
ENDS = "peft 1\nedit e at layer[*] { h += reft(h, r=2, first=2, last=1) }"


def compiled(name: str, spec: str = FIRST) -> nn.Module:
    """With values that change what a model gives."""
    model = zoo.build(name, torch.float64)
    peftc.compile(spec, model, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def output(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**given)[0]


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(peftc.PeftcError) as caught:
        act()
    return caught.value.diagnostics[0].code


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["bart", "bert", "gpt2", "llama"])
def test_first_and_last_tokens_are_those_that_the_mask_shows(name: str, padding: zoo.Padding) -> None:
    model, ref = compiled(name, ENDS), Reference(name, zoo.build(name, torch.float64))
    literature.reft("e", first=2, last=1)(ref, {k: p.detach() for k, p in peftc.parameters(model).items()})
    given = zoo.inputs(name, model, padding=padding)
    found, wanted = output(model, given), output(ref.model, given)
    seen = slice(None) if ref.model.config.is_encoder_decoder else given["attention_mask"].bool()
    assert (found - wanted)[seen].abs().max() < 1e-10


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generation_with_a_cache_is_generation_without(name: str) -> None:
    model = compiled(name)
    given = zoo.inputs(name, model, padding="left")
    given.pop("decoder_input_ids", None)
    made = [
        model.generate(**given, max_new_tokens=6, do_sample=False, use_cache=cached, num_beams=beams)
        for beams in (1, 3)
        for cached in (True, False)
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])
    plain = zoo.build(name, torch.float64).generate(**given, max_new_tokens=6, do_sample=False)
    assert not torch.equal(made[0], plain)


@pytest.mark.parametrize("masked", [True, False])
def test_a_prompt_in_pieces_of_any_length_is_the_prompt(masked: bool) -> None:
    model = compiled("llama")
    given = zoo.inputs("llama", model, padding="left" if masked else None)
    ids, mask, whole = given["input_ids"], given.get("attention_mask"), output(model, given)
    cache, parts = None, []
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 7)):
        shown = {} if mask is None else {"attention_mask": mask[:, :stop]}
        with torch.no_grad():
            out = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, **shown)
        cache = out.past_key_values
        parts.append(out.logits)
    short = torch.ones_like(ids[:, :1])
    assert refusal(lambda: model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=short)) == "P423"
    seen = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert (torch.cat(parts, 1) - whole)[seen].abs().max() < 1e-10


def test_calls_whose_positions_are_unknown_are_refused() -> None:
    model = compiled("gpt2", ENDS)
    given = zoo.inputs("gpt2", model)
    ids = given["input_ids"]
    assert refusal(lambda: model.generate(**given, max_new_tokens=2)) == "P423"  # its last token is not known
    assert refusal(lambda: model(ids, attention_mask=torch.zeros(2, 1, 7, 7, dtype=torch.float64))) == "P423"
    assert refusal(lambda: model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2))) == "P423"
    layer = model.get_submodule("transformer.h.0")
    assert refusal(lambda: layer(torch.zeros(2, 7, 32, dtype=torch.float64))) == "P423"
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the older name
    enable()  # layers are run again in the backward pass
    assert refusal(lambda: model(**given)[0].sum().backward()) == "P423"


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
def test_places_whose_positions_nothing_tells_are_refused_as_soon_as_planned(
    name: str, spec: str, underlined: str
) -> None:
    model = zoo.build(name)
    before = type(model), list(model.state_dict())
    for act in (peftc.plan, peftc.compile):
        with pytest.raises(peftc.PeftcError) as caught:
            act(f"peft 1\n{spec}", model)
        (found,) = caught.value.diagnostics
        assert found.code == "P422"
        assert found.source
        assert found.span
        assert found.source.text[found.span.start : found.span.end] == underlined
    assert (type(model), list(model.state_dict())) == before


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_a_state_that_does_not_count_its_tokens_is_refused(name: str) -> None:
    """What continues a recurrence may be the first tokens or not."""
    model: Any = build("causal-lm", name)[0].eval()
    peftc.compile(FIRST, model, seed=0)
    ids = torch.tensor([[5, 6, 7, 4]])
    assert output(model, {"input_ids": ids}).isfinite().all()
    assert refusal(lambda: model.generate(ids, max_new_tokens=2, pad_token_id=1)) == "P423"


def test_copies_and_other_specs_keep_what_the_forms_know() -> None:
    model = compiled("gpt2")
    given = zoo.inputs("gpt2", model, padding="left")
    wanted = output(model, given)
    other = copy.deepcopy(model)
    assert torch.equal(output(other, given), wanted)
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), given), wanted)
    peftc.compile("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2, alpha=2) }", model, name="q", seed=0)
    assert torch.equal(output(model, given), wanted)
    peftc.remove(model)
    assert torch.equal(output(model, given), output(zoo.build("gpt2", torch.float64), given))
    assert torch.equal(output(other, given), wanted)
    assert torch.equal(output(torch.compile(other, backend="eager", fullgraph=True), given), wanted)


def test_a_prefix_is_no_seed_of_a_cache_whose_tokens_are_counted() -> None:
    prefix = "edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }"
    model = compiled("gpt2", f"{FIRST}\n{prefix}")
    assert refusal(lambda: peftc.fold(model, into="state")) == "P538"


def test_what_acts_at_some_positions_does_not_fold() -> None:
    verdict = str(peftc.plan(FIRST, zoo.build("gpt2")))
    assert "it acts on some positions only" in verdict


@pytest.mark.parametrize("padding", ["left", None])
def test_rows_of_several_tasks_have_their_own_positions(padding: zoo.Padding | None) -> None:
    model = zoo.build("llama", torch.float64)
    spec = ENDS.replace("layer[*] {", "layer[*] per task {")
    peftc.compile(spec, model, seed=0, tasks=("a", "b"))
    given = zoo.inputs("llama", model) if padding is None else zoo.inputs("llama", model, padding=padding)
    with peftc.task(model, task_ids=["b", "a"]):
        mixed = output(model, given)
    for row, task in enumerate("ba"):
        with peftc.task(model, task):
            assert (mixed[row] - output(model, given)[row]).abs().max() < 1e-10


def test_a_second_spec_that_fails_leaves_the_forms_their_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled("llama")
    given = zoo.inputs("llama", model)
    before = output(model, given)

    def warm(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("peftc.installation.reinstall.warm", warm)
    with pytest.raises(RuntimeError):
        peftc.compile("peft 1\nedit f at layer[*].ffn { h += adapter(h, r=2) }", model)
    assert torch.equal(output(model, given), before)


def test_an_edit_may_be_called_positions() -> None:
    model = compiled("llama")
    given = zoo.inputs("llama", model)
    before = output(model, given)
    peftc.compile("peft 1\nedit positions at layer[*].ffn { h += adapter(h, r=2) }", model, name="two")
    with peftc.disabled(model, "two"):
        assert torch.equal(output(model, given), before)


def test_rows_stay_orthonormal_in_half_precision() -> None:
    """torch has no `qr` for it."""
    model = compiled("llama").to(torch.bfloat16)
    assert bool(output(model, zoo.inputs("llama", model)).isfinite().all())
