"""Two specs compiled in sequence equal one spec with both texts, and either can be removed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import TOLERANCE, values
from tests.specs_on_models.pairs import CASES, NAMES, NORMS, Pair, alone, compiled, fresh, logits, trained

both = pytest.mark.parametrize(("name", "pair"), CASES, ids=lambda value: getattr(value, "name", value))


@both
def test_two_compilations_equal_one_of_both_texts(name: str, pair: Pair) -> None:
    """The same bits: outputs, names, values, gradients and trainability."""
    model, one = compiled(name, pair), peftc.compile(pair.joint, fresh(name), seed=0)
    assert torch.equal(logits(name, model), logits(name, one))
    state = model.state_dict()
    assert list(state) == list(one.state_dict())
    assert all(torch.equal(state[k], v) for k, v in one.state_dict().items())
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in one.named_parameters()
    }
    assert list(peftc.parameters(model)) == list(peftc.parameters(one))
    assert {n: k.code for n, k in peftc.graphs(model).items()} == {n: k.code for n, k in peftc.graphs(one).items()}


@both
def test_either_can_be_removed(name: str, pair: Pair) -> None:
    """The other computes what it would alone with its trained parameters; then the base, bit for
    bit.
    """
    for removed, remaining, text, prefix in (("a", "b", pair.texts[1], "b"), ("b", "a", pair.texts[0], None)):
        model, before = trained(name, pair)
        parameters = peftc.parameters(model, remaining)
        bits = values(parameters)
        want = alone(name, text, model, remaining, prefix)
        assert peftc.remove(model, removed) is model
        assert list(peftc.specs(model)) == [remaining]
        assert torch.equal(logits(name, model), logits(name, want))
        assert list(model.state_dict()) == list(want.state_dict())
        now = peftc.parameters(model)
        assert all(now[k] is p and torch.equal(p, bits[k]) for k, p in parameters.items())
        assert len(now) == len(parameters)
        flags = {n: p.requires_grad for n, p in want.named_parameters()}
        assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
        peftc.remove(model)
        before.assert_same(model)


@both
def test_either_can_be_disabled(name: str, pair: Pair) -> None:
    model, before = trained(name, pair)
    full, base = logits(name, model), logits(name, fresh(name))
    bits = values(peftc.parameters(model))
    for off, text, on, prefix in (("b", pair.texts[0], "a", None), ("a", pair.texts[1], "b", "b")):
        want = logits(name, alone(name, text, model, on, prefix))
        with peftc.disabled(model, off):
            assert torch.equal(logits(name, model), want)
            with peftc.disabled(model):
                assert torch.equal(logits(name, model), base)
            assert torch.equal(logits(name, model), want)
        assert torch.equal(logits(name, model), full)
    assert all(torch.equal(p, bits[k]) for k, p in peftc.parameters(model).items())
    peftc.remove(model)
    before.assert_same(model)


@both
def test_saved_one_by_one_or_together(name: str, pair: Pair, tmp_path: Path) -> None:
    """In either order, or as one adapter: the same bits (except for an MLP whose rows
    are saved).
    """
    model, before = trained(name, pair)
    want = logits(name, model)
    for spec in ("a", "b"):
        peftc.save(model, tmp_path / spec, spec)
    peftc.save(model, tmp_path / "all")
    orders = [("a", "b"), ("all",), *([("b", "a")] if pair.commute else [])]
    for order in orders:
        again = fresh(name)
        for part in order:
            peftc.load(tmp_path / part, again)
        assert list(peftc.specs(again)) == list(order)
        got = logits(name, again)
        assert torch.equal(got, want) or ("mlp" in pair.name and (got - want).abs().max() < TOLERANCE)
        peftc.remove(again)
        before.assert_same(again)


@both
def test_folded_one_by_one(name: str, pair: Pair) -> None:
    """Folding one leaves the other unchanged; folded edits leave their spec."""
    for spec, other in (("a", "b"), ("b", "a")):
        model, _ = trained(name, pair)
        want, parameters = logits(name, model), peftc.parameters(model, other)
        report = peftc.fold(model, name=spec)
        assert (logits(name, model) - want).abs().max() <= TOLERANCE * max(1.0, want.abs().max().item())
        now = peftc.parameters(model, other)
        assert all(now[k] is p for k, p in parameters.items())
        refusals = {r.edit for r in report.refused}
        assert refusals >= {key.partition("/")[0] for key in parameters}
        if (spec in peftc.specs(model)) and report.folded:
            assert not {f.edit for f in report.folded} & {k.partition("/")[0] for k in peftc.parameters(model, spec)}
        peftc.fold(model)
        assert (logits(name, model) - want).abs().max() <= TOLERANCE * max(1.0, want.abs().max().item())


@pytest.mark.parametrize(
    ("name", "pair"), [case for case in CASES if case[1].commute], ids=lambda value: getattr(value, "name", value)
)
def test_independent_specs_commute(name: str, pair: Pair) -> None:
    model, _ = trained(name, pair)
    other = peftc.compile(pair.texts[1], fresh(name), seed=0, prefix="b")
    peftc.compile(pair.texts[0], other, seed=0, name="a")
    there, here = peftc.parameters(model), peftc.parameters(other)
    assert there.keys() == here.keys()
    with torch.no_grad():
        for key, parameter in here.items():
            parameter.copy_(there[key])
    assert torch.equal(logits(name, model), logits(name, other))


@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_edits_of_one_state_apply_in_the_order_of_compilation(name: str) -> None:
    plus, times = "peft 1\nedit p at layer[*].ffn { h += 1 }\n", "peft 1\nedit t at layer[*].ffn { h *= 2 }\n"
    outputs = []
    for first, second in ((plus, times), (times, plus)):
        model = peftc.compile(second, peftc.compile(first, fresh(name)))
        one = peftc.compile(first + second.removeprefix("peft 1\n"), fresh(name))
        assert torch.equal(logits(name, model), logits(name, one))
        outputs.append(logits(name, model))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("name", ["bart", "llama", "mixtral"])
def test_three_specs_are_added_and_removed_in_any_order(name: str) -> None:
    texts = [f"peft 1\nedit e at layer[*].{at} {{ h += {form} }}\n" for at, form in SITES]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        model = fresh(name)
        for i, text in enumerate(texts):
            peftc.compile(text, model, seed=i, prefix=f"s{i}")
        for i in order[:2]:
            peftc.remove(model, f"s{i}")
        want = peftc.compile(texts[order[2]], fresh(name), seed=order[2], prefix=f"s{order[2]}")
        assert torch.equal(logits(name, model), logits(name, want))


SITES = (("attn.q", "lora(x, r=2)"), ("ffn", "adapter(h, r=3)"), ("attn.heads", "bottleneck(q, r=2)"))


@both
def test_copies_and_pickles_keep_both(name: str, pair: Pair) -> None:
    model, before = trained(name, pair)
    want = logits(name, model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(name, again), want)
        assert list(peftc.specs(again)) == ["a", "b"]
        peftc.remove(again, "a")
        peftc.remove(again, "b")
        before.assert_same(again)
    assert torch.equal(logits(name, model), want)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_keeps_training(name: str) -> None:
    """The second changes no `requires_grad` of the first, and an existing optimizer keeps updating
    the same parameters.
    """
    model = peftc.compile(
        "peft 1\nedit e at layer[*].ffn { h += adapter(h, r=2, act=gelu) }\n" + NORMS.replace("e =", "n ="),
        fresh(name),
        seed=0,
    )
    first = peftc.parameters(model)
    frozen = next(iter(first.values())).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in first.values() if p is not frozen], lr=0.1)
    peftc.compile("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n", model, seed=0)
    assert all(peftc.parameters(model)[k] is p for k, p in first.items())
    assert [k for k, p in peftc.parameters(model).items() if not p.requires_grad] == [next(iter(first))]
    bits = values(first)
    model.train()
    model(**zoo.inputs(name, model))[0].square().mean().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values() if p is not frozen)
    optimizer.step()
    changed_names = [k for k, p in first.items() if not torch.equal(p, bits[k])]
    assert len(changed_names) >= len(first) - 2


@pytest.mark.parametrize("name", NAMES)
def test_base_parameters_trained_by_one_spec_are_restored_with_it(name: str) -> None:
    model, base = fresh(name), fresh(name).state_dict()
    peftc.compile("peft 1\n" + NORMS, model, name="norms")
    peftc.compile("peft 1\ntrain h = [w] at layer[*].attn.o\n", model, name="o")
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter += 1.0
    trained = {k.partition("/")[2] for k in peftc.parameters(model, "o")}
    peftc.remove(model, "norms")
    now = model.state_dict()
    assert trained
    assert {k for k, v in now.items() if not torch.equal(v, base[k])} >= trained
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    peftc.remove(model, "o")
    assert all(torch.equal(v, base[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
