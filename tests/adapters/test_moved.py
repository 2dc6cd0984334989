"""`moved old -> new`: adapters of an earlier version of a spec load under the later one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import peftc
from peftc.adapters.metadata import METADATA
from peftc.diagnostics import PeftcError
from tests import zoo
from tests.adapters.saved import description, tensors_of
from tests.laws.harness import Before, randomise

FORM = """form {name}(x, r) {{
    param {A}[r, d(x)] = kaiming
    param B[d(out), r] = zeros
    f = B @ {A} @ x
}}
"""
OLD = (
    "peft 2\n"
    + FORM.format(name="graded", A="A")
    + """
let P = shared(adapter(r=2))
edit qv at layer[*].attn.q { h += graded(x, r=2) + graded(x, r=3) }
edit ve at layer[*].attn.k { h += vera(x, r=2) }
edit f at layer[0].ffn { h += P(x) }
edit g at encoder.layer[*].ffn { h += 2 * P(h) }
edit t at layer[0].ffn per task { h += adapter(x, r=2) }
train n = [w] at layer[0].norm
"""
)
# The new names are words of paths, and of other kinds, on purpose.
NEW = (
    "peft 2\n"
    + FORM.format(name="ladder_2", A="down")
    + """
moved P -> Q
moved qv -> attention
moved attention -> attn
moved ve -> encoder
moved f -> ff
moved t -> tasks
moved n -> lora
moved graded -> ladder_2
moved ladder_2.A -> ladder_2.down
let Q = shared(adapter(r=2))
edit attn at layer[*].attn.q { h += ladder_2(x, r=2) + ladder_2(x, r=3) }
edit encoder at layer[*].attn.k { h += vera(x, r=2) }
edit ff at layer[0].ffn { h += Q(x) }
edit g at encoder.layer[*].ffn { h += 2 * Q(h) }
edit tasks at layer[0].ffn per task { h += adapter(x, r=2) }
train lora = [w] at layer[0].norm
"""
)
MOVES = [line for line in NEW.splitlines() if line.startswith("moved")]


def build() -> nn.Module:
    return zoo.build("bart", torch.float64)


@torch.no_grad()
def logits(model: nn.Module, task: str | None = None) -> torch.Tensor:
    with nullcontext() if task is None else peftc.task(model, task):
        return model(**zoo.inputs("bart", model)).logits


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    model = peftc.compile(OLD, build(), seed=0, tasks=["a", "b"])
    randomise(peftc.parameters(model))
    return model


@pytest.fixture(scope="module")
def saved(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peftc.save(trained, tmp_path_factory.mktemp("saved") / "old")


def test_an_adapter_loads_under_the_new_names(trained: nn.Module, saved: Path, tmp_path: Path) -> None:
    model = peftc.load(saved, build(), spec=NEW)
    assert torch.equal(logits(model, "b"), logits(trained, "b"))
    assert {name.partition("/")[0] for name in peftc.parameters(model)} == {
        "attn",
        "encoder",
        "ff",
        "tasks",
        "lora",
    }
    assert all(line in peftc.specs(model)["old"] for line in MOVES)
    peftc.save(model, tmp_path / "new")  # which needs no moves, nor reads them as its own
    assert "moved" not in description(tmp_path / "new")["spec"]
    assert all(line in description(tmp_path / "new")["source"] for line in MOVES)
    for arguments in ({}, {"spec": NEW}, {"spec": NEW, "prefix": "enc"}):
        again = peftc.load(tmp_path / "new", build(), **arguments)
        assert torch.equal(logits(again, "b"), logits(trained, "b"))


def test_a_checkpoint_loads_into_a_model_that_is_compiled(trained: nn.Module, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    model = peftc.compile(NEW, build(), seed=5, tasks=["a", "b"])
    assert not torch.equal(logits(model, "b"), logits(trained, "b"))
    model.load_state_dict(load_file(tensors_of(tmp_path)))
    assert torch.equal(logits(model, "b"), logits(trained, "b"))


@pytest.mark.parametrize("line", MOVES)
def test_each_statement_is_needed(line: str, saved: Path) -> None:
    """Without it the adapter is refused, and the model is as it was."""
    model = build()
    before = Before.of(model)
    with pytest.raises(PeftcError, match=r"P525|P133"):
        peftc.load(saved, model, spec=NEW.replace(f"{line}\n", ""))
    before.assert_same(model)
    assert not hasattr(model, "_peftc")


def test_an_edit_goes_on_at_other_sites(tmp_path: Path) -> None:
    old = "peft 2\nedit a at layer[*].attn.self { h += adapter(h, r=2) }"
    new = "peft 2\nmoved a at layer[*].attn.self -> layer[*].ffn\nedit a at layer[*].ffn { h += adapter(h, r=2) }"
    model = peftc.compile(old, build(), seed=0)
    randomise(peftc.parameters(model))
    peftc.save(model, tmp_path)
    with pytest.warns(peftc.PeftcWarning, match=r"P854(.|\n)*other sites"):
        moved = peftc.load(tmp_path, build(), spec=new)
    for name, value in peftc.parameters(model).items():
        there = name.replace(".attn.self/", ".ffn/")
        assert there != name
        assert torch.equal(peftc.parameters(moved)[there], value)


def test_moves_of_a_method_and_of_a_used_form(saved: Path, tmp_path: Path) -> None:
    """They stand where the new name does, in other files."""
    old = "peft 2\n" + FORM.format(name="graded", A="A") + "edit enc.q at layer[*].attn.q { h += graded(x, r=2) }"
    model = peftc.compile(old, build(), seed=0)
    randomise(peftc.parameters(model))
    peftc.save(model, tmp_path / "adapter")
    form = FORM.format(name="graded", A="down")
    (tmp_path / "forms.peft").write_text(
        f"peft 2\n{form}moved graded.A -> graded.between\nmoved graded.between -> graded.down\n"
    )
    (tmp_path / "spec.peft").write_text(
        'peft 2\nuse graded from "forms.peft"\n'
        "method m() {\n    moved q -> p\n    moved p -> queries\n"
        "    edit queries at layer[*].attn.q { h += graded(x, r=2) }\n}\n"
        "apply m() as enc\n"
    )
    again = peftc.load(tmp_path / "adapter", build(), spec=tmp_path / "spec.peft")
    assert torch.equal(logits(again), logits(model))


def test_an_export_form_and_a_checkpoint_load_under_a_spec(tmp_path: Path) -> None:
    old = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }"
    new = old.replace("peft 1", "peft 2\nmoved p -> prefixes").replace("edit p", "edit prefixes")
    model = peftc.compile(old, build(), seed=0)
    randomise(peftc.parameters(model))
    peftc.save(model, tmp_path / "rows")
    model.save_pretrained(tmp_path / "network")
    for folder, parameter in (("rows", "key"), ("network", "embedding")):
        again = peftc.load(tmp_path / folder, build(), spec=new)
        assert torch.allclose(logits(again), logits(model), rtol=0, atol=1e-12)
        assert any(name.endswith(parameter) for name in peftc.parameters(again))


def test_a_spec_that_means_something_else_is_warned_of(tmp_path: Path) -> None:
    old = "peft 1\nedit f at layer[*].ffn { h += 2 * adapter(x, r=2, dropout=0.1) }"
    peftc.save(peftc.compile(old, build(), seed=0), tmp_path)
    peftc.load(tmp_path, build(), spec=old.replace("0.1", "0.5"))
    with pytest.warns(peftc.PeftcWarning, match=r"P854(.|\n)*f: its equation"):
        peftc.load(tmp_path, build(), spec=old.replace("2 * ", "3 * "))


def test_expectations_and_settings_of_the_spec_hold(tmp_path: Path) -> None:
    old = "peft 1\nmethod m(r = 2) { edit f at layer[*].ffn { h += adapter(x, r=r) } }\n"
    (tmp_path / "s.peft").write_text(old)
    peftc.save(peftc.compile(tmp_path / "s.peft", build(), seed=0, settings={"r": 3}), tmp_path / "a")
    peftc.load(tmp_path / "a", build(), spec=tmp_path / "s.peft", settings={"r": 3})
    with pytest.raises(PeftcError, match="P525"):
        peftc.load(tmp_path / "a", build(), spec=tmp_path / "s.peft")
    (tmp_path / "s.peft").write_text(old + "expect stored < 3\n")
    with pytest.raises(PeftcError, match="P304"):
        peftc.load(tmp_path / "a", build(), spec=tmp_path / "s.peft", settings={"r": 3})


def errors(text: str) -> Iterator[tuple[str, str]]:
    """The code and the words of each error."""
    form = FORM.format(name="graded", A="down")
    whole = f"peft 2\n{form}edit attention at layer[*].attn.q {{ h += graded(x, r=2) }}\n{text}\n"
    with pytest.raises(PeftcError) as raised:
        peftc.plan(whole, "facebook/bart-base")
    for one in raised.value.diagnostics:
        assert one.span is not None
        yield one.code, whole[one.span.start : one.span.end]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moved a -> atention", ["atention"]),
        ("moved a -> b\nmoved b -> c", ["c"]),
        ("moved a -> a", ["a"]),
        ("moved a -> b\nmoved b -> a", ["b"]),
        ("moved attention -> other\nmoved other -> attention", ["other"]),
        ("moved a -> attention\nmoved b -> attention", ["attention", "attention"]),
        ("moved a -> attention\nmoved a -> graded", ["a", "a"]),
        ("moved graded.B -> graded.down", ["graded.B"]),
        ("moved graded.A -> graded.up", ["graded.up"]),
        ("moved other.A -> graded.down", ["graded.down"]),
        ("moved other at layer -> layer.ffn", ["layer"]),
        ("moved attention at layer[-1] -> layer[0]", ["layer[-1]"]),
        ("moved attention at layer.ffn -> layer.ffn", ["layer.ffn"]),
    ],
)
def test_moves_that_lead_nowhere(text: str, words: list[str]) -> None:
    assert list(errors(text)) == [("P133", word) for word in words]


def test_an_adapter_of_another_spec_stays_as_it_is(saved: Path) -> None:
    """A folder with an adapter is not written to by loading it."""
    before = (saved / METADATA).read_bytes()
    peftc.load(saved, build(), spec=NEW)
    assert (saved / METADATA).read_bytes() == before
