"""Forms that are saved as simpler ones, arguments such as `mlp(8)`, and the numbers of a site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import peftc
from peftc import PeftcError
from tests import zoo
from tests.equations.test_built_in import drawn, run

SCALED = """form scaled(x, r, keep = false) {
    param A[r, d(x)] = kaiming
    param B[d(out), r] = kaiming
    param s[r] = 1
    save lora(r=r, A=column(s) * A, B=B) if keep == false
    f = B @ (s * A @ x)
}"""
ROWS = """form made_rows(n, reparam = net(none)) {
    param key[heads(out), n, d_head(out)] = normal if reparam == none
    param value[heads(out), n, d_value(out)] = normal if reparam == none
    let width = heads(out) * d_head(out)
    param E[n, reparam] per group = normal if reparam != none
    param W[2 * sites(out) * width, reparam] per group = normal if reparam != none
    let rows = narrow(W, 2 * site(out) * width, 2 * width) @ t(E) if reparam != none
    let key = t(reshape(narrow(rows, 0, width), heads(out), d_head(out), n)) if reparam != none
    let value = t(reshape(narrow(rows, width, width), heads(out), d_head(out), n)) if reparam != none
    save made_rows(n=n, key=key, value=value)
    f = (key, value)
}"""
TOKENS = "form tokens_of(n) { param P[n, d(out)] = normal param g[d(out)] = 1 f = P * g }"


def compiled(form: str, edit: str, name: str) -> nn.Module:
    model = zoo.build(name, torch.float64).eval()
    return drawn(peftc.compile(f"peft 2\n{form}\n{edit}\n", model, seed=0)).eval()


def saved(model: nn.Module, folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The spec of a saved adapter, and its tensors."""
    peftc.save(model, folder)
    (path,) = folder.glob("*.safetensors")
    return json.loads((folder / "adapter.json").read_text())["spec"], load_file(path)


def test_a_form_is_saved_as_a_built_in_one(tmp_path: Path) -> None:
    model = compiled(SCALED, "edit e at layer[*].attn.q { h += scaled(x, r=3) }", "bert")
    spec, tensors = saved(model, tmp_path)
    assert "h += lora(x, r=3)" in spec
    assert {name.rpartition("/")[2] for name in tensors} == {"lora.A", "lora.B"}
    loaded = peftc.load(tmp_path, zoo.build("bert", torch.float64).eval())
    torch.testing.assert_close(run(loaded, "bert"), run(model, "bert"), rtol=0, atol=1e-12)
    plan = peftc.plan(f"peft 2\n{SCALED}\nedit e at layer[0].attn.q {{ h += scaled(x, r=3) }}", loaded)
    assert plan.totals.trained - plan.totals.stored == 3


def test_a_form_that_keeps_its_parameters(tmp_path: Path) -> None:
    model = compiled(SCALED, "edit e at layer[*].attn.q { h += scaled(x, r=3, keep=true) }", "bert")
    spec, tensors = saved(model, tmp_path)
    assert "scaled(x, r=3, keep=true)" in spec
    assert {name.rpartition("/")[2] for name in tensors} == {"scaled.A", "scaled.B", "scaled.s"}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_each_site_of_a_group_saves_its_own_rows(name: str, tmp_path: Path) -> None:
    edit = "edit e at layer[*].attn { kv = concat(made_rows(n=3, reparam=net(5)), kv) }"
    model = compiled(ROWS, edit, name)
    values = {key.rpartition(".")[2]: value.detach() for key, value in peftc.parameters(model).items()}
    spec, tensors = saved(model, tmp_path)
    assert "kv = concat(made_rows(n=3), kv)" in spec
    keys = [key for key in tensors if key.endswith("made_rows.key")]
    flat = (values["W"] @ values["E"].T).view(len(keys), 2, -1, 3)  # sites, k and v, features, rows
    for i, key in enumerate(sorted(keys)):
        for j, one in enumerate((key, key.removesuffix("key") + "value")):
            heads = tensors[one].shape[0]
            expected = flat[i, j].unflatten(0, (heads, -1)).mT
            torch.testing.assert_close(tensors[one], expected, rtol=0, atol=1e-12)
    loaded = peftc.load(tmp_path, zoo.build(name, torch.float64).eval())
    torch.testing.assert_close(run(loaded, name), run(model, name), rtol=0, atol=1e-12)
    again = peftc.load(tmp_path, zoo.build(name, torch.float64).eval())
    assert saved(again, tmp_path / "again")[0] == spec, "direct rows are saved as they are"


def test_rows_of_an_equation_are_a_prompt(tmp_path: Path) -> None:
    edit = "edit p at embed { h = concat(2 * NAME, h) }"
    model = compiled(TOKENS, edit.replace("NAME", "tokens_of(n=3)"), "gpt2")
    built_in: Any = compiled("", edit.replace("NAME", "prompt(len=3)"), "gpt2")
    values = {key.rpartition(".")[2]: value for key, value in peftc.parameters(model).items()}
    (rows,) = peftc.parameters(built_in).values()
    with torch.no_grad():
        rows.copy_(values["P"] * values["g"])
    torch.testing.assert_close(run(model, "gpt2"), run(built_in, "gpt2"), rtol=0, atol=1e-12)
    peftc.save(model, tmp_path)
    loaded = peftc.load(tmp_path, zoo.build("gpt2", torch.float64).eval())
    assert torch.equal(run(loaded, "gpt2"), run(model, "gpt2"))
    plan = peftc.plan(f"peft 2\n{TOKENS}\n{edit.replace('NAME', 'tokens_of(n=3)')}", built_in)
    assert plan.edits[0].reason is not None, "it folds into no weight"


@pytest.mark.parametrize(
    ("form", "equation", "code"),
    [
        ("form g(n) { param P[n, d(out)] = 0 f = P }", "h = concat(g(n=9999), h)", "P314"),
        ("form g(n) { param P[n, d(out)] = 0 f = P }", "h += g(n=2)", "P301"),
        ("form g(n) { param P[n, d(out) + 1] = 0 f = P }", "h = concat(g(n=2), h)", "P303"),
        ("form g(h, n) { require d(h) >= n param P[n, d(out)] = 0 f = P }", "h = concat(g(h, n=2), h)", "P303"),
        ("form g(h, n) { param P[n, d(h)] = 0 f = P }", "h = concat(gate(h) * prompt(len=2), h)", "P303"),
        ("form g(n) { param P[n, d(out)] = 0 save prompt(len=n) f = P }", "h = concat(g(n=2), h)", "P301"),
        ("form g(n) { param P[n, d(out)] = 0 save prompt(len=n, tokens=t(P)) f = P }", "h = concat(g(n=2), h)", "P301"),
        ("form g(n) { param P[n, d(out)] = 0 save prompt(len=n, other=P) f = P }", "h = concat(g(n=2), h)", "P301"),
        ("form g(n) { param P[n, d(out)] = 0 save promt(len=n, tokens=P) f = P }", "h = concat(g(n=2), h)", "P101"),
        ("form g(n) { param P[n, d(out)] = 0 save prompt(n, tokens=P) f = P }", "h = concat(g(n=2), h)", "P108"),
        (
            "form g(n) { param P[n, d(out)] = 0 save prompt(len=n + 1, tokens=P) f = P }",
            "h = concat(g(n=2), h)",
            "P105",
        ),
        (
            "form g(n) { param P[n, d(out)] = 0 save mixture(r=n, keep=k) f = P }",
            "h = concat(g(n=2), h)",
            "P107",
        ),
        ("form g(n) { param P[n, d(out)] = 0 f = narrow(P, 1, n) }", "h = concat(g(n=2), h)", "P301"),
        ("form g(n) { param P[n, d(out)] = 0 f = reshape(P, n, n) }", "h = concat(g(n=2), h)", "P301"),
        ("form g(n = m(none)) { param P[n, d(out)] = 0 f = P }", "h = concat(g(n=2), h)", "P105"),
        ("form g(n = m(none)) { param P[n, d(out)] = 0 f = P }", "h = concat(g(n=k(2)), h)", "P106"),
        ("form g(n = m(none)) { param P[n, d(out)] = 0 f = P }", "h = concat(g(), h)", "P318"),
    ],
)
def test_refusals(form: str, equation: str, code: str) -> None:
    with pytest.raises(PeftcError) as refused:
        peftc.plan(f"peft 2\n{form}\nedit e at embed {{ {equation} }}", zoo.build("gpt2"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value


def test_a_saved_form_is_saved_as_it_is() -> None:
    """Else loading an adapter and saving it again would change it once more."""
    form = "form g(x, r) { param A[r, d(x)] = 0 param B[d(out), r] = 0 save mixture(r=r, down=A, up=B) f = B @ A @ x }"
    with pytest.raises(PeftcError) as refused:
        peftc.plan(f"peft 2\n{form}\nedit e at layer[*].attn.q {{ h += g(x, r=2) }}", zoo.build("bert"))
    assert [d.code for d in refused.value.diagnostics] == ["P301"]


def test_the_word_is_a_name_in_version_1() -> None:
    model = zoo.build("bert", torch.float64).eval()
    peftc.compile("peft 1\nedit save at layer[0].attn.q { let save = lora(x, r=2) h += save }", model)
    assert {name.partition("/")[0] for name in peftc.parameters(model)} == {"save"}
