"""Conditions on sites: `where d(x) >= 1024` is the selector of the sites at which it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from peftc.planning.report.html import plan_html
from peftc.planning.report.plan import PlanEdit
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from tests import zoo
from tests.laws.test_breaking import categories, findings

LORA = "{ h += lora(x, r=2) }"


def base(name: str) -> nn.Module:
    return zoo.build(name, torch.float64).eval()


def plan(text: str, name: str) -> PlanEdit:
    return peftc.plan(f"peft 2\n{text}\n", base(name)).edits[0]


def paths(edit: PlanEdit) -> list[str]:
    return [site.path for site in edit.sites]


def counts(edit: PlanEdit) -> tuple[int, ...]:
    return edit.trained, edit.stored, edit.changed, edit.served


@pytest.mark.parametrize(
    ("condition", "selector"),
    [
        ("where d(x) >= 40", "layer[*].ffn.down"),
        ("where d(x) < 40 where d(out) < 40", "layer[*].attn.{q, k, v, o}"),
        ("where rows(w) > cols(w)", "layer[*].ffn.up"),
        ("where layer >= 1 where layer != 2", "layer[1].{attn.{q, k, v, o}, ffn.{up, down}}"),
        ("where entries(w) >= 32 * 48 where layer == 0", "layer[0].ffn.{up, down}"),
        ("where min(rows(w), cols(w)) + layer > 33", "layer[2].{attn.{q, k, v, o}, ffn.{up, down}}"),
    ],
)
@pytest.mark.parametrize("name", ["bert", "opt", "t5"])
def test_a_condition_is_a_selector(name: str, condition: str, selector: str) -> None:
    own = plan(f"edit e at layer[*].**.linear {condition} {LORA}", name)
    other = plan(f"edit e at {selector} {LORA}", name)
    assert paths(own) == paths(other)
    assert counts(own) == counts(other)
    whole = plan(f"edit e at layer[*].**.linear {LORA}", name)
    assert own.excluded is not None
    excluded = [site.path for site in own.excluded.sites]
    assert sorted(paths(own) + excluded) == sorted(paths(whole))
    assert not {*paths(own)} & {*excluded}


def test_networks_of_a_layer() -> None:
    experts = plan("edit e at layer[*].ffn.experts.{up, down} where rows(w) >= 40 { w += lowrank(r=2) }", "mixtral")
    assert {path.rpartition(".")[2] for path in paths(experts)} == {"up"}
    assert len(experts.sites) == 3 * 4
    assert experts.excluded is not None
    assert len(experts.excluded.sites) == 3 * 4


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("train t = [w] at layer[*].{attn.q, ffn.down} where cols(w) > 32", 3),
        ("let least = 40\nedit e at layer[*].**.linear where d(x) >= least { h += lora(x, r=2) }", 3),
        ("method m(n = 1) { edit e at layer[*].attn.q where layer < n { h += lora(x, r=2) } }\napply m(n=2)", 2),
        (
            "method m() { edit e at layer[*].attn.{q, v} where layer < 1 { h += lora(x, r=2) } }\napply m() at encoder",
            2,
        ),
        ("let some at layer[*].attn.{q, v}\nedit e at some - layer[0].attn.q where layer < 1 { h += lora(x, r=2) }", 1),
        ("edit e at layer[*].attn.self where heads(q) >= 4 per task { h += adapter(x, r=2) }", 3),
        ('edit e at "bert.encoder.layer.*.output.dense" where layer > 0 { h += lora(x, r=2) }', 2),
        ("edit e at layer[*].{attn.q, ffn.up} where d(h) > 32 { wb += sparse(density=10%) }", 6),
        ("edit e at layer[*].attn.q where layer < 2 { h += lora(x, r=[2, 3, 4]) }", 2),
    ],
)
def test_conditions_of_statements(text: str, count: int) -> None:
    assert len(plan(text, "bert").sites) == count


def test_conditions_divide_sites() -> None:
    """Both assign `h`, at other sites."""
    text = "edit a at layer[*].attn.q where layer < 1 { h = x }\nedit b at layer[*].attn.q where layer >= 1 { h = x }"
    assert [len(edit.sites) for edit in peftc.plan(f"peft 2\n{text}", base("bert")).edits] == [1, 2]
    with pytest.raises(PeftcError, match="P302"):
        plan(text.replace("< 1", "< 2"), "bert")


def test_outputs_adapters_and_folds(tmp_path: Path) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        return model(**zoo.inputs("gpt2", model)).logits

    models = [base("gpt2"), base("gpt2")]
    for model, at in zip(models, ("layer[*].**.linear where d(x) >= 40", "layer[*].ffn.down"), strict=True):
        peftc.compile(f"peft 2\nedit e at {at} {LORA}", model, seed=3)
        for i, parameter in enumerate(peftc.parameters(model).values()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    assert torch.equal(run(models[0]), run(models[1]))
    peftc.save(models[0], tmp_path)
    again = base("gpt2")
    peftc.load(tmp_path, again)
    assert torch.equal(run(again), run(models[0]))
    for model in models:
        peftc.fold(model)
    assert torch.equal(run(models[0]), run(models[1]))


def test_what_is_printed() -> None:
    text = f"peft 2\n\nedit e at layer[*].**.linear where d(x) >= 40 where layer < 2 per task {LORA}\n"
    assert print_spec(parse_text(text)) == text
    result = peftc.plan(text, base("bert"))
    lines = [line.strip() for line in str(result).splitlines()]
    start = lines.index("not at   `where d(x) >= 40 where layer < 2` leaves out")
    assert lines[start + 1] == "encoder.layer[0..2].attn.self.{q, k, v, o} × 12"
    assert "where d(x) &gt;= 40" in plan_html(result, None)
    data = json.loads(result.model_dump_json())["edits"][0]
    assert data["excluded"]["where"] == "where d(x) >= 40 where layer < 2"
    assert type(result).model_validate_json(result.model_dump_json()) == result
    assert "excluded" not in plan(f"edit e at layer[*].attn.q {LORA}", "bert").model_dump_json()


def test_other_conditions_break_adapters() -> None:
    texts = [f"peft 2\nedit e at layer[*].**.linear where d(x) >= {n} {LORA}" for n in (40, 48, 16)]
    assert categories(findings(texts[0], texts[1])) == set()
    assert categories(findings(texts[0], texts[2])) == {"LOAD"}
    assert categories(findings(texts[0], texts[2], on_model=False)) == {"LOAD"}


@pytest.mark.parametrize(
    ("condition", "code", "message"),
    [
        ("where d(x) >= 100", "P221", "leaves no site of `layer[*].attn.q`"),
        ("where d(x) >= 40 where layer > 7", "P221", "`where d(x) >= 40 where layer > 7`"),
        ("where d(z) > 3", "P205", "has no state `z`"),
        ("where d(y) > 3", "P107", "no state `y`"),
        ("where x > 3", "P107", "`x` is no number"),
        ("where layers > 3", "P107", "`layers` is no number"),
        ("where dim(x) > 3", "P101", "no size `dim`"),
        ("where d(x, h) > 3", "P108", "takes one state"),
        ("where d(2) > 3", "P108", "takes one state"),
        ("where heads(x) > 3", "P310", "in heads"),
        ("where lora(x) > 3", "P101", "no size `lora`"),
        ("where d(x) > [3, 4, 5]", "P105", "expected a number"),
        ("where d(x) > 3 / 0", "P120", "divides by zero"),
        ("where d(x) > 3 and layer > 2", "P025", "`and` does not join"),
        ("where d(x) = 3", "P025", "`=` is not a comparison"),
        ("where 2 < d(x) < 3", "P025", "cannot be chained"),
        ("where d(x)", "P025", "expected a comparison"),
        ("where", "P015", "expected an expression"),
    ],
)
def test_refusals(condition: str, code: str, message: str) -> None:
    with pytest.raises(PeftcError) as error:
        plan(f"edit e at layer[*].attn.q {condition} {LORA}", "bert")
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code
    assert message in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.span.line == 2


def test_the_note_has_the_sizes() -> None:
    with pytest.raises(PeftcError) as error:
        plan(f"edit e at layer[*].**.linear where d(x) * 2 >= 100 {LORA}", "bert")
    assert error.value.diagnostics[0].notes == ("18 sites: `d(x) * 2` is 64 to 96",)


def test_the_written_state_is_one() -> None:
    with pytest.raises(PeftcError) as error:
        plan("edit e at layer[*].attn.self where d(out) > 3 { h += adapter(x, r=2) q = 2 * q }", "bert")
    assert [d.code for d in error.value.diagnostics] == ["P107"]
    with pytest.raises(PeftcError) as error:
        plan("edit e at layer[*].attn.q | head where layer > 1 { h += lora(x, r=2) }", "bert")
    assert [d.code for d in error.value.diagnostics] == ["P322"]


def test_version_1_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.peft"
    path.write_text(f"peft 1\nedit e at layer[*].attn.q where d(x) > 3 {LORA}\n")
    assert main(["check", str(path), "--fix"]) in (0, 1)
    assert path.read_text().startswith("peft 2")
    assert "P028" not in capsys.readouterr().out
    names = "peft 1\nlet where = 2\nedit e at layer[*].attn.q { h += lora(x, r=where) }"
    assert peftc.plan(names, base("bert")).edits[0].trained == 3 * 2 * 64
