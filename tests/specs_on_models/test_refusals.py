"""Refusals of a second spec, errors at any point that leave the model unchanged, and names of
specs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests.laws.harness import Before, randomise
from tests.matrix import checkerboard
from tests.specs_on_models.pairs import fresh, logits, unchanged

FIRST = """peft 1
edit q at layer[*].attn.q { h += lora(x, r=2) }
edit p at layer[*].attn { kv = concat(prefix(len=2, reparam=mlp(4)), kv) }
train n = [w, b] at layer[*].norm
"""
SECOND = """peft 1
edit f at layer[*].ffn { h += adapter(h, r=2, act=gelu) }
edit d at layer[*].attn.v { w = magnitude(w + lowrank(r=2)) }
train o = [w] at layer[*].attn.o
"""


def first(name: str = "bert") -> nn.Module:
    model = peftc.compile(FIRST, fresh(name), seed=0, name="first")
    randomise(peftc.parameters(model))
    next(iter(peftc.parameters(model).values())).requires_grad_(False)
    return model


WRONG = {
    "syntax": ("P0", "peft 1\nedit f at layer[*].ffn { h +=", {}),
    "no site": ("P201", "peft 1\nedit f at layer[*].nothing { h += 1 }", {}),
    "an edit of that name": ("P412", "peft 1\nedit q at layer[*].ffn { h += 1 }", {}),
    "a train of that name": ("P412", "peft 1\nedit n at layer[*].ffn { h += 1 }", {}),
    "a spec of that name": ("P412", SECOND, {"name": "first"}),
    "a prefix that is no word": ("P545", SECOND, {"prefix": "a b"}),
    "trained twice": ("P414", "peft 1\ntrain m = [b] at layer[*].ffn.norm", {}),
    "assigned twice": ("P302", "peft 1\nedit k at layer[*].attn { kv = concat(prefix(len=3), kv) }", {}),
    "an expectation": ("P304", SECOND + "expect trained == 1", {}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_in_the_second_leaves_the_first(wrong: str) -> None:
    code, text, how = WRONG[wrong]
    model = first()
    with unchanged(model), pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(text, model, **how)
    assert all(d.code.startswith(code) for d in excinfo.value.diagnostics)
    peftc.compile(SECOND, model)


def test_an_error_across_specs_names_the_other() -> None:
    for wrong in ("an edit of that name", "trained twice", "assigned twice"):
        code, text, _ = WRONG[wrong]
        with pytest.raises(peftc.PeftcError, match=code) as excinfo:
            peftc.compile(text, first())
        assert "first" in str(excinfo.value)


class Broken(Exception):
    pass


def failing(*args: Any, **kwargs: Any) -> Any:
    raise Broken


POINTS = [f"builder.InstallationBuilder.{name}" for name in ("prepare", "apply", "form")]
POINTS += ["reinstall.warm", "reinstall.TrainedParameters.set_requires_grad"]


def steps(tmp_path: Path) -> dict[str, Callable[[nn.Module], object]]:
    saved = peftc.save(peftc.compile(SECOND, fresh("bert"), seed=1), tmp_path / "second")
    return {
        "compile": lambda model: peftc.compile(SECOND, model, seed=1),
        "load": lambda model: peftc.load(saved, model),
    }


@pytest.mark.parametrize(("point", "step"), checkerboard(POINTS, ("compile", "load")))
def test_a_failure_anywhere_leaves_the_first(
    step: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = first(), steps(tmp_path)[step]
    want = logits("bert", model)
    with monkeypatch.context() as patch, unchanged(model):
        patch.setattr(f"peftc.installation.{point}", failing)
        with pytest.raises(Broken):
            run(model)
    assert torch.equal(logits("bert", model), want)
    run(model)
    peftc.remove(model, "first")


@pytest.mark.parametrize(("point", "step"), checkerboard([*POINTS, "reinstall.Snapshot.detach"], ("remove", "fold")))
def test_a_failure_while_one_is_removed_leaves_both(step: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peftc.compile(SECOND, first(), seed=1, name="second")
    randomise(peftc.parameters(model))
    want = logits("bert", model)
    run = {"remove": lambda: peftc.remove(model, "first"), "fold": lambda: peftc.fold(model, name="second")}[step]
    with monkeypatch.context() as patch, unchanged(model):
        patch.setattr(f"peftc.installation.{point}", failing)
        with pytest.raises(Broken):
            run()
    assert torch.equal(logits("bert", model), want)
    before = Before.of(fresh("bert"))
    peftc.remove(model)
    before.assert_same(model)


def test_names_are_those_of_files_unless_given(tmp_path: Path) -> None:
    text = "peft 1\nedit {} at layer[*].ffn {{ h *= vector(init=1) }}\n"
    (tmp_path / "mine.peft").write_text(text.format("a"))
    model = peftc.compile(tmp_path / "mine.peft", fresh("gpt2"))
    peftc.compile(peftc.parse(text.format("b"), "elsewhere/yours.peft"), model)
    for edit in "cd":
        peftc.compile(text.format(edit), model)
    peftc.compile(text.format("e"), model, name="given")
    peftc.compile(text.format("a"), model, prefix="x.y")
    peftc.load(peftc.save(peftc.compile(text.format("f"), fresh("gpt2")), tmp_path / "mine"), model)
    names = ["mine", "yours", "default", "default-2", "given", "x.y", "mine-2"]
    assert list(peftc.specs(model)) == names
    assert {n.partition("/")[0] for n in peftc.parameters(model, "x.y")} == {"x.y.a"}
    assert {n.partition("/")[0] for n in peftc.parameters(model)} == {*"abcdef", "x.y.a"}
    for name in reversed(names):
        peftc.remove(model, name)
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.specs(model)


def test_two_adapters_of_one_recipe(tmp_path: Path) -> None:
    """`prefix` separates them; each loads its own parameters, shared ones too."""
    text = "peft 1\nlet s = shared(adapter(r=2, act=gelu))\nedit e at layer[*].ffn { h += s(x) }\n"
    text += "edit p at layer[*].attn { k *= vector(init=2) }\n"
    adapters = []
    for seed in (1, 2):
        model = peftc.compile(text, fresh("bert"), seed=seed)
        with torch.no_grad():
            for parameter in peftc.parameters(model).values():
                parameter += seed
        adapters.append(dict(peftc.parameters(model)))
        peftc.save(model, tmp_path / str(seed))
    both = peftc.load(tmp_path / "1", fresh("bert"))
    with unchanged(both), pytest.raises(peftc.PeftcError, match="P412"):
        peftc.load(tmp_path / "2", both)
    peftc.load(tmp_path / "2", both, prefix="two")
    for values, spec in ((adapters[0], "1"), (adapters[1], "two")):
        parameters = list(peftc.parameters(both, spec).values())
        assert len(parameters) == len(values) > 0
        assert all(torch.equal(p, v) for p, v in zip(parameters, values.values(), strict=True))
    one = text + text.removeprefix("peft 1\n").replace("edit ", "edit two.").replace("let s", "let t").replace(
        "s(x)", "t(x)"
    )
    joint = peftc.compile(one, fresh("bert"))
    with torch.no_grad():
        for parameter, value in zip(peftc.parameters(joint).values(), peftc.parameters(both).values(), strict=True):
            parameter.copy_(value)
    assert torch.equal(logits("bert", both), logits("bert", joint))


def test_an_unknown_spec_name_is_refused() -> None:
    model = first()
    for call in (
        lambda: peftc.remove(model, "frist"),
        lambda: peftc.parameters(model, "frist"),
        lambda: peftc.save(model, "nowhere", "frist"),
        lambda: peftc.fold(model, name="frist"),
        lambda: peftc.disabled(model, "frist").__enter__(),
    ):
        with unchanged(model), pytest.raises(peftc.PeftcError, match="P413") as excinfo:
            call()
        assert "did you mean `first`" in str(excinfo.value)
    peftc.compile(SECOND, model, name="second")
    with unchanged(model), pytest.raises(peftc.PeftcError, match="P532"):
        peftc.fold(model, name="second", only="q")


def test_no_spec_is_added_or_removed_while_edits_are_disabled(tmp_path: Path) -> None:
    model = peftc.compile(SECOND, first(), seed=1, name="second")
    want = logits("bert", model)
    saved = peftc.save(model, tmp_path / "saved", "second")
    for off in ("second", None):
        with peftc.disabled(model, off):
            for call in (
                lambda: peftc.compile("peft 1\nedit x at layer[*].ffn { h += 1 }", model),
                lambda: peftc.load(saved, model, prefix="again"),
                lambda: peftc.remove(model),
                lambda: peftc.remove(model, "first"),
                lambda: peftc.fold(model),
                lambda: peftc.save(model, tmp_path / "never"),
            ):
                with unchanged(model), pytest.raises(peftc.PeftcError, match="P529"):
                    call()
    assert torch.equal(logits("bert", model), want)


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_sites_are_those_of_the_model_without_edits(name: str) -> None:
    """The modules and parameters of the first spec are no sites for the second."""
    bare, edited = peftc.sites(fresh(name)), peftc.sites(first(name))
    assert edited.modules == bare.modules
    assert edited.fingerprint == bare.fingerprint
    assert [replace(s, kind="") for s in edited.sites] == [replace(s, kind="") for s in bare.sites]
    everything = "peft 1\ntrain n = [w, b] at **\n"
    assert peftc.plan(everything, first(name)) == peftc.plan(everything, fresh(name))
