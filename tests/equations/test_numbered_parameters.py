"""Parameters `per n`, one for all sites of the same number n, and those of tasks beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo
from tests.equations.models import run

FORM = """form g(x, by = part) {
    let n = part(out) if by == part
    let n = layer(out) if by == depth
    let n = none if by == all
    param A[d(out), d(x)] per n = normal(0.1)
    param b[d(out)] = 0
    f = A @ x + b
}
"""
PLAIN = "form p(x) { param A[d(out), d(x)] per edit = 0 param b[d(out)] = 0 f = A @ x + b }"
AT = "layer[*].attn.q | layer[*].attn.v | layer[*].attn.o"
EACH = " edit e at layer[*].attn.q { h += g(x) }"
EDITS = {  # the same sites, an edit for each number
    "part": [f"layer[*].attn.{part}" for part in "qvo"],
    "depth": [" | ".join(f"layer[{i}].attn.{part}" for part in "qvo") for i in range(3)],
    "all": [AT],
}


def compiled(text: str, model: str = "bert", **options: Any) -> nn.Module:
    return peftc.compile(f"peft 2\n{text}\n", zoo.build(model, torch.float64).eval(), seed=0, **options)


def refusal(text: str, model: str = "bert") -> PeftcError:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{text}\n", zoo.build(model))
    return error.value


@pytest.mark.parametrize("by", EDITS)
def test_sites_of_one_number_have_one_parameter(by: str, tmp_path: Path) -> None:
    text = f"{FORM} edit e at {AT} {{ h += g(x, by={by}) }}"
    model = compiled(text)
    names = ["A"] if by == "all" else [f"A_{i}" for i in range(len(EDITS[by]))]
    parameters = peftc.parameters(model)
    values = {name: p for name, p in parameters.items() if "g.A" in name}
    assert [name.rpartition(".")[2] for name in values] == names
    edits = " ".join(f"edit e{i} at {at} {{ h += p(x) }}" for i, at in enumerate(EDITS[by]))
    other = compiled(f"{PLAIN} {edits}")
    with torch.no_grad():
        for i, value in enumerate(values.values()):
            peftc.parameters(other)[f"e{i}/e{i}.p/p.A"].copy_(value)
    torch.testing.assert_close(run(model, "bert"), run(other, "bert"), rtol=0, atol=1e-10)
    plans = [peftc.plan(f"peft 2 {t}", zoo.build("bert")) for t in (text, f"{PLAIN} {edits}")]
    assert plans[0].totals == plans[1].totals
    assert plans[0].totals.trained == sum(p.numel() for p in parameters.values())
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("bert", torch.float64).eval())
    assert torch.equal(run(loaded, "bert"), run(model, "bert"))
    want = run(model, "bert")
    peftc.fold(model)
    torch.testing.assert_close(run(model, "bert"), want, rtol=0, atol=1e-10)


def test_one_graph_has_sites_of_several_numbers() -> None:
    model = compiled(f"{FORM} edit e at {AT} {{ h += g(x, by=part) }}")
    want = run(model, "bert")
    torch._dynamo.reset()
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(whole, "bert"), want, rtol=0, atol=1e-10)


def test_stacks_have_numbers_and_their_own_parts() -> None:
    form = (
        "form s(x) { let n = stack(out) param A[stack_parts(out), d(x)] per n = normal "
        "param B[parts(out)] per edit = 0 f = (A[stack_part(out)] + B[part(out)]) * x }"
    )
    model = compiled(f"{form} edit e at layer[*].attn | layer[*].ffn {{ h += s(h) }}", "bart")
    sizes = {name.rpartition(".")[2]: tuple(p.shape) for name, p in peftc.parameters(model).items()}
    assert sizes == {"A_0": (2, 32), "A_1": (3, 32), "B": (3,)}  # self-attention and ffn; cross-attention, too
    before = run(model, "bart")
    with torch.no_grad():
        next(p for name, p in peftc.parameters(model).items() if name.endswith("A_0"))[1].zero_()
    assert not torch.equal(run(model, "bart"), before)


def test_a_task_has_some_parameters_and_shares_others(tmp_path: Path) -> None:
    form = (
        "form m(x, t = 3) { let n = part(out) param embedding[t] per edit = normal "
        "param A[d(out) * d(x), t] per n common = normal(0.1) param c[d(out)] = 0 "
        "f = reshape(A @ embedding, d(out), d(x)) @ x + c }"
    )
    text = f"{form} edit e at layer[*].attn.q | layer[*].attn.v per task {{ h += m(x) }}"
    model = compiled(text, tasks=["a", "b"])
    parameters = peftc.parameters(model)
    common = sorted(name for name in parameters if "/e.m" in name)
    assert common == ["e/e.m.all/m.A_0", "e/e.m.all/m.A_1", "e/e.m.tasks.a/m.embedding", "e/e.m.tasks.b/m.embedding"]
    plan = peftc.plan(f"peft 2 {text}", zoo.build("bert"), tasks=["a", "b"])
    assert plan.totals.trained == sum(p.numel() for p in parameters.values())
    with peftc.task(model, "b"):
        model(**zoo.inputs("bert", model)).logits.square().sum().backward()
    assert {n for n, p in parameters.items() if "/e.m" in n and p.grad is not None and p.grad.any()} == {
        *common[:2],
        "e/e.m.tasks.b/m.embedding",
    }
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("bert", torch.float64).eval())
    for task in "ab":
        with peftc.task(model, task), peftc.task(loaded, task):
            inputs = zoo.inputs("bert", model)
            assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)


def test_sites_of_one_number_have_one_size() -> None:
    edit = "edit e at layer[*].attn.q | layer[*].ffn.down { h += g(x, by=depth) }"
    error = refusal(f"{FORM} {edit}")
    assert [d.code for d in error.diagnostics] == ["P305"]
    assert "write `by=part`" in str(error)
    error = refusal(
        f"{FORM.replace('layer(out)', 'layers(out)')} {edit}".replace("part(out) if by == part", "0 if by == part")
    )
    assert "an edit for each size" in str(error)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("form g(x) { param A[d(x)] per n = 1 f = A * x }", "P023"),
        ("form g(x) { param A[d(x)] per task = 1 f = A * x }", "P023"),
        ("form g(x) { let n = 0 - 1 param A[d(x)] per n = 1 f = A * x }", "P318"),
        ("form g(x) { let n = 1 / 2 param A[d(x)] per n = 1 f = A * x }", "P318"),
        ("form g(x) { let n = 0 fixed A[d(x)] per n = buffer f = A * x }", "P105"),
        ("form g(x) { let n = 0 param A[d(x)] per n = normal f = A * x - initial(A) * x }", "P105"),
        ("form g(x) { let n = 0 param A[d(x)] per n = 1 param B[d(x)] per group = 1 f = A * B * x }", "P111"),
        ("form g(x) { let n = 0 param A[d(x)] per n = 1 param A_0[d(x)] per edit = 1 f = A * A_0 * x }", "P111"),
    ],
)
def test_what_no_number_can_say(form: str, code: str) -> None:
    error = refusal(f"{form} edit e at layer[*].attn.q {{ h += g(x) }}")
    assert [d.code for d in error.diagnostics] == [code]


def test_no_first_value_is_that_of_one_weight() -> None:
    form = "form g() { let n = part(out) param m[rows(out), 1] per n = norm(w) f = m }"
    error = refusal(f"{form} edit e at layer[*].attn.q {{ w *= g() }}")
    assert [d.code for d in error.diagnostics] == ["P105"]


@pytest.mark.parametrize("scope", ["group", "edit"])
@pytest.mark.parametrize(("count", "number"), [("layers", "layer"), ("sites", "site")])
@pytest.mark.parametrize("tasks", [False, True])
def test_the_value_of_a_site_that_shares_all_parameters(scope: str, count: str, number: str, tasks: bool) -> None:
    form = f"""form g(x) {{
    param A[2, d(x)] per {scope} = normal
    param z[{count}(out), 2] per {scope} = normal
    param B[d(out), 2] per {scope} = normal
    f = B @ (z[{number}(out)] * (A @ x))
}}"""
    own = "form p(x) { param A[2, d(x)] = 1 param z[2] = 1 param B[d(out), 2] = 0 f = B @ (z * (A @ x)) }"
    options: dict[str, Any] = {"tasks": ["a", "b"]} if tasks else {}
    model = compiled(f"{form} edit e at layer[*].attn.q {'per task' * tasks} {{ h += g(x) }}", "llama", **options)
    other = compiled(f"{own} edit e at layer[*].attn.q {{ h += p(x) }}", "llama")
    values = {name.rpartition(".")[2]: p for name, p in peftc.parameters(model).items() if ".tasks.a" not in name}
    with torch.no_grad():
        for name, p in peftc.parameters(other).items():
            value, layer = values[name.rpartition(".")[2]], int(name.partition("layer[")[2].partition("]")[0])
            p.copy_(value[layer] if value.shape != p.shape else value)
    want = run(other, "llama")
    torch.testing.assert_close(run(model, "llama"), want, rtol=0, atol=1e-10)
    if not tasks:
        peftc.fold(model)
        torch.testing.assert_close(run(model, "llama"), want, rtol=0, atol=1e-10)


def test_numbered_parameters_alone_fold_at_each_site() -> None:
    model = compiled(
        "form g(x) { let n = layer(out) param A[d(out), d(x)] per n = normal(0.1) f = A @ x }" + EACH, "llama"
    )
    want = run(model, "llama")
    peftc.fold(model)
    torch.testing.assert_close(run(model, "llama"), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("lines", "total"),
    [
        ("param a[layers(out)] per edit = 2 loss_a = layer(out) * a[layer(out)] * a[layer(out)]", 4.0 + 8),
        ("param a[layers(out)] per edit = 2 loss_a = mean(layer(out) * a[layer(out)], sites)", (2.0 + 4) / 3),
        ("let n = layer(out) param a[1] per n = 3 loss_a = total(a * a)", 27.0),
        ("param a[1] per group = 3 loss_a = total(a * a)", 27.0),
        ("param a[1] = 3 loss_a = total(a * a)", 27.0),
    ],
)
def test_a_term_of_the_loss_is_the_sum_over_sites_that_share_parameters(lines: str, total: float) -> None:
    model = compiled(f"form g(h) {{ {lines} f = a[0] * h }}" + EACH.replace("x", "h"), "llama")
    terms = peftc.losses(model)
    assert {name: float(value.detach()) for name, value in terms.items()} == {"e.a": pytest.approx(total)}


def test_one_graph_has_the_tasks_of_sites_that_share_all_parameters() -> None:
    lines = "param z[layers(out)] per edit = normal param v[d(x)] per edit = normal f = z[layer(out)] * (v * x)"
    text = f"form g(x) {{ {lines} }} edit e at layer[*].attn.q per task {{ h += g(x) }}"
    model = compiled(text, "llama", tasks=["a", "b"])
    torch._dynamo.reset()
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    with peftc.task(model, "b"):
        first = whole(**zoo.inputs("llama", model)).logits  # nothing has been called before
        torch.testing.assert_close(first, run(model, "llama"), rtol=0, atol=1e-10)
