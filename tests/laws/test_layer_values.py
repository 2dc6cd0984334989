"""Values by layer: an edit with a list, or with `layer`, is one edit for each, bit for bit."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from peftc.forms import Argument
from peftc.forms.registry import register, unregister
from peftc.planning.report.html import plan_html
from peftc.planning.report.plan import Plan
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, in_peft
from tests.forms.python_forms import LowRank
from tests.laws.test_breaking import categories, findings

# The selector without its layers, the equation with a list, and its value at each layer.
EDITS: dict[str, tuple[str, str, tuple[tuple[str, ...], ...]]] = {
    "rank": ("attn.{q, v}", "h += lora(x, r=LIST, alpha=4)", (("2", "4", "3"),)),
    "rank by number": ("attn.{q, v}", "h += lora(x, r=2 + 2 * layer)", (("2", "4", "6"),)),
    "scale": ("ffn", "h += (0.5 + layer / 4) * adapter(x, r=3)", (("0.5", "0.75", "1"),)),
    "list of scales": ("attn.o", "h += LIST * lora(x, r=2)", (("1", "0", "-2"),)),
    "words": (
        "ffn", "h += adapter(h, r=3, act=LIST, bias=LIST)", (("relu", "gelu", "relu"), ("true", "true", "false")),
    ),
    "vector": ("attn.k", "h *= vector(init=LIST)", (("1", "1", "0.5"),)),
    "weight": ("attn.q", "w = magnitude(w + lowrank(r=LIST))", (("2", "2", "4"),)),
    "prefix": ("attn.self", "kv = concat(prefix(len=LIST), kv)", (("2", "3", "3"),)),
    "let": ("ffn", "let y = adapter(x, r=LIST) h += LIST * y", (("3", "2", "2"), ("1", "2", "2"))),
}  # fmt: skip
CASES = [
    *((name, edit) for name in ("bert", "llama") for edit in EDITS),
    *((name, edit) for name in ("t5", "gpt2") for edit in ("rank", "words", "prefix")),
]


def by_layer(name: str) -> str:
    """The edit with lists."""
    at, equation, values = EDITS[name]
    for own in values:
        equation = equation.replace("LIST", f"[{', '.join(own)}]", 1)
    return f"peft 2\nedit e at layer[*].{at} {{ {equation} }}"


def layer_by_layer(name: str) -> str:
    """An edit for each layer."""
    at, equation, values = EDITS[name]
    lines = list[str]()
    for i in range(3):
        text = equation
        for own in values:
            text = text.replace("LIST", own[i], 1) if "LIST" in text else text
        text = text.replace("2 + 2 * layer", values[0][i]).replace("(0.5 + layer / 4)", values[0][i])
        lines.append(f"edit e{i} at layer[{i}].{at} {{ {text} }}")
    return "\n".join(["peft 2", *lines])


def base(name: str) -> nn.Module:
    return zoo.build(name, torch.float64).eval()


def run(model: nn.Module, name: str) -> Tensor:
    return model(**zoo.inputs(name, model)).logits


def shaken(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters, with values that depend on their sites alone."""
    parameters = {re.sub(r"^e\d?/", "", name): p for name, p in peftc.parameters(model).items()}
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return parameters


def totals(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan.totals, name) for name in ("trained", "stored", "changed", "served")}


@pytest.mark.parametrize(("name", "edit"), CASES)
def test_one_edit_is_one_for_each_layer(name: str, edit: str, tmp_path: Path) -> None:
    own, other = base(name), base(name)
    peftc.compile(by_layer(edit), own, seed=0)
    peftc.compile(layer_by_layer(edit), other, seed=0)
    plans = peftc.plan(by_layer(edit), base(name)), peftc.plan(layer_by_layer(edit), base(name))
    assert totals(plans[0]) == totals(plans[1])
    assert {one.path for one in plans[0].edits[0].sites} == {s.path for one in plans[1].edits for s in one.sites}
    assert plans[0].edits[0].foldable == all(one.foldable for one in plans[1].edits)
    assert plans[0].edits[0].identity == all(one.identity for one in plans[1].edits)

    mine, theirs = shaken(own), shaken(other)
    assert {n: p.shape for n, p in mine.items()} == {n: p.shape for n, p in theirs.items()}
    value = run(own, name)
    assert torch.equal(value, run(other, name))
    assert not torch.equal(value, run(base(name), name))
    for model in (own, other):
        run(model, name).square().sum().backward()
    for key, parameter in mine.items():
        gradient, other_gradient = parameter.grad, theirs[key].grad
        assert gradient is None if other_gradient is None else gradient is not None
        assert gradient is None or other_gradient is None or torch.equal(gradient, other_gradient)

    peftc.save(own, tmp_path)
    again = base(name)
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, name), value)
    if plans[0].edits[0].foldable:
        for model in (own, other):
            peftc.fold(model)
        assert torch.equal(run(own, name), run(other, name))
        torch.testing.assert_close(run(own, name), value, rtol=0, atol=1e-9)
    else:
        peftc.remove(own)
        assert torch.equal(run(own, name), run(base(name), name))


def test_stacked_experts_have_the_values_of_their_layer(tmp_path: Path) -> None:
    edit = "at layer{} .ffn.experts.up {{ w += lowrank(r={}) }}".replace(" .", ".")
    own, other = base("mixtral"), base("mixtral")
    peftc.compile(f"peft 2\nedit e {edit.format('[*]', '[1, 3, 2]')}", own, seed=0)
    lines = [f"edit e{i} {edit.format(f'[{i}]', r)}" for i, r in enumerate((1, 3, 2))]
    peftc.compile("\n".join(["peft 2", *lines]), other, seed=0)
    assert {n: p.shape for n, p in shaken(own).items()} == {n: p.shape for n, p in shaken(other).items()}
    value = run(own, "mixtral")
    assert torch.equal(value, run(other, "mixtral"))
    peftc.save(own, tmp_path)
    again = base("mixtral")
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, "mixtral"), value)
    peftc.fold(own)
    torch.testing.assert_close(run(own, "mixtral"), value, rtol=0, atol=1e-9)


def test_tasks_have_the_values_of_their_layer() -> None:
    model = base("bert")
    peftc.compile("peft 2\nedit e at layer[*].attn.q per task { h += lora(x, r=1 + layer) }", model, tasks=["a", "b"])
    parameters = peftc.parameters(model)
    sizes = {name: parameters[name].shape[0] for name in parameters if name.endswith(".A")}
    assert sorted(sizes.values()) == [1, 1, 2, 2, 3, 3]


# What else a list may stand in


@pytest.mark.parametrize(
    "text",
    [
        "let ranks = [2, 4, 3]\nedit e at layer[*].attn.q { h += lora(x, r=ranks) }",
        "method m(r = [2, 4, 3]) { edit e at layer[*].attn.q { h += lora(x, r=r) } }",
        "method m(r = 1) { edit e at layer[*].attn.q { h += lora(x, r=r) } }\napply m(r=[2, 4, 3])",
        "method m(least = 1) { let n = [1, 3, 2] edit e at layer[*].attn.q { h += lora(x, r=least + n) } }",
        "let n = [0, 2, 1]\nedit e at layer[*].attn.q { let s = 2 h += lora(x, r=s + n) }",
        "edit e at \"bert.encoder.layer.*.attention.self.query\" { h += lora(x, r=[2, 4, 3]) }",
        "edit e at layer[1..].attn.q { h += lora(x, r=[1, 4, 3]) }\nedit f at layer[0].attn.q { h += lora(x, r=2) }",
    ],
)  # fmt: skip
def test_lists_are_constants(text: str) -> None:
    text = f"peft 2\n{text}\n"
    plan = peftc.plan(text, zoo.build("bert"))
    assert sum(edit.trained for edit in plan.edits) == (2 + 4 + 3) * 64
    assert parse_text(print_spec(parse_text(text))) == parse_text(text)


def test_a_setting_is_a_list() -> None:
    text = "peft 2\nmethod m(r = 1) { edit e at layer[*].attn.q { h += lora(x, r=r) } }"
    assert peftc.plan(text, zoo.build("bert"), settings={"r": "[2, 4, 3]"}).edits[0].trained == 9 * 64


def test_a_name_hides_the_number() -> None:
    text = "peft {}\nlet layer = 3\nedit e at layer[*].attn.q {{ h += lora(x, r=layer) }}"
    for version in (1, 2):
        assert peftc.plan(text.format(version), zoo.build("bert")).edits[0].trained == 3 * 3 * 64
    local = "peft 2\nedit e at layer[*].attn.q { let layer = gate(x) h += layer * lora(x, r=2) }"
    assert not peftc.plan(local, zoo.build("bert")).edits[0].by_layer


# What plans say


def test_a_plan_has_the_values_of_all_layers() -> None:
    plan = peftc.plan("peft 2\nedit e at layer[*].attn.q { h += lora(x, r=[2, 2, 4]) * (layer + 1) }", base("t5"))
    shown = [line.strip() for line in str(plan).splitlines()]
    assert "by layer  r of lora in encoder.layer: 2 at [0..1], 4 at [2]" in shown
    assert "layer + 1 in decoder.layer: 1 at [0], 2 at [1], 3 at [2]" in shown
    assert any(line.endswith("rank 2 to 4") for line in shown)
    data = json.loads(plan.model_dump_json())["edits"][0]["by_layer"]
    assert data[0] == {"name": "r of lora", "stack": "encoder.layer", "layers": [0, 1, 2], "values": ["2", "2", "4"]}
    assert type(plan).model_validate_json(plan.model_dump_json()) == plan
    assert "r of lora in encoder.layer" in plan_html(plan, None)


def test_a_plan_without_them_says_nothing() -> None:
    plan = peftc.plan("peft 2\nedit e at layer[*].attn.q { h += lora(x, r=2) }", base("bert"))
    assert "by_layer" not in plan.model_dump_json()
    assert "by layer" not in str(plan)


def test_many_values_have_an_end() -> None:
    model = zoo.build("gpt2", n_layer=12)
    plan = peftc.plan("peft 2\nedit e at layer[*].attn.q { h += lora(x, r=2 + layer) }", model)
    assert "2 at [0], 3 at [1], …, 12 at [10], 13 at [11]" in " ".join(str(plan).split())


# What is refused


@pytest.mark.parametrize(
    ("model", "text", "code", "message"),
    [
        ("bert", "edit e at Q { h += lora(x, r=[2, 4]) }", "P321", "has 2 values, and `encoder.layer` has 3 layers"),
        ("bart", "edit e at Q { h += lora(x, r=[2, 4, 3]) }", "P321", "`encoder.layer` has 2 layers"),
        ("bert", "edit e at layer[*].attn.q | head { h += lora(x, r=[2, 4, 3]) }", "P322", "`head` is in no layer"),
        ("bert", "edit e at head { h += lora(x, r=layer + 1) }", "P322", "`layer` has a value for each"),
        ("bert", "edit e at Q { h += vera(x, r=[2, 4, 3]) }", "P323", "`r` of `vera` differs by layer"),
        ("bert", "let s = shared(lora(r=[2, 4, 3]))\nedit e at Q { h += s(x) }", "P323", "`r` differs by layer"),
        ("bert", "edit e at Q { h += lora(x, r=2 * layer) }", "P106", "found 0"),
        ("bert", "edit e at Q { h += lora(x, r=[2, 0, 3]) }", "P106", "found 0"),
        ("bert", "edit e at Q { h += lora(x, r=layer / 2 + 1) }", "P105", "must be a whole number"),
        ("bert", "edit e at Q { h += lora(x, r=[2, [4], 3]) }", "P105", "found `[4]`"),
        ("bert", "edit e at Q { h += [1, x, 3] * lora(x, r=2) }", "P105", "found `x`"),
        ("bert", "edit e at Q { h += lora(x, r=[]) }", "P105", "found `[]`"),
        ("bert", "edit e at Q { h += lora(x, r=2) }\nexpect sites(e) == layer", "P116", "no fact `layer`"),
    ],
)  # fmt: skip
def test_refusals(model: str, text: str, code: str, message: str) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{text.replace('at Q', 'at layer[*].attn.q')}\n", zoo.build(model))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code
    assert message in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.span.start > len("peft 2")


@pytest.mark.parametrize("value", ["[2, 4, 3]", "1 + layer"])
def test_version_1_has_one_value(value: str) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 1\nedit e at layer[*].attn.q {{ h += lora(x, r={value}) }}\n", zoo.build("bert"))
    assert [d.code for d in error.value.diagnostics] == ["P028"]


def test_a_budget_is_one_of_all_layers() -> None:
    edit = "edit e at layer[*].attn.q {{ h += svd(x, r={}, target={}, total=100, warmup=10, cooldown=10, every=5) }}"
    with pytest.raises(PeftcError) as error:
        peftc.plan(f"peft 2\n{edit.format(4, '[1, 2, 3]')}", zoo.build("bert"))
    assert [(d.code, d.message.split("`")[1]) for d in error.value.diagnostics] == [("P323", "target")]
    assert peftc.plan(f"peft 2\n{edit.format('[4, 5, 6]', 2)}", zoo.build("bert")).edits[0].trained


# Adapters and other programs


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_has_the_rank_of_each_module(tmp_path: Path) -> None:
    model = base("llama")
    peftc.compile("peft 2\nedit e at layer[*].attn.q { h += lora(x, r=[2, 4, 2], alpha=[4, 4, 2]) }", model, seed=0)
    shaken(model)
    peftc.export(model, tmp_path / "out")
    config: dict[str, Any] = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    ranks = {f"model.layers.{i}.self_attn.q_proj": r for i, r in enumerate((2, 4, 2))}
    patterns = config["rank_pattern"]
    assert [next((v for k, v in patterns.items() if re.fullmatch(f".*{k}", name)), config["r"]) for name in ranks] == [
        2,
        4,
        2,
    ]
    assert_same_outputs(model, in_peft("llama", tmp_path / "out"), "llama")


def test_verify_copies_and_removal() -> None:
    model = base("gpt2")
    peftc.compile(by_layer("words"), model, seed=0)
    shaken(model)
    assert peftc.verify(model).ok
    assert torch.equal(run(copy.deepcopy(model), "gpt2"), run(model, "gpt2"))


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("r=[2, 4, 4], alpha=4", "r=[2, 4, 4], alpha=4", set[str]()),
        ("r=[2, 4, 4], alpha=4", "r=[2, 2, 4], alpha=4", {"LOAD", "NUMERIC"}),
        ("r=2, alpha=[4, 8, 8]", "r=2, alpha=[4, 4, 8]", {"NUMERIC"}),
        ("r=2, alpha=2 + layer", "r=2, alpha=2 * layer + 1", {"NUMERIC"}),
        ("r=2, dropout=[0.1, 0, 0]", "r=2, dropout=[0, 0, 0.1]", set[str]()),
    ],
)
def test_what_breaks_adapters(old: str, new: str, kinds: set[str]) -> None:
    texts = [f"peft 2\nedit e at layer[*].attn.q {{ h += lora(x, {one}) }}" for one in (old, new)]
    for on_model in (False, True):
        assert categories(findings(*texts, on_model=on_model)) == kinds


# A form whose argument `by` takes the word WORD.
WITH_WORD = """peft 2
form scaled(x, r, by = none) {
    param A[r, d(x)] = kaiming
    param B[d(out), r] = normal
    f = B @ A @ x if by == none
    f = 2 * B @ A @ x if by == WORD
}
"""
USES_OF_A_WORD = {
    "argument": "edit q at layer[*].attn.q { h += scaled(x, r=2 + layer, by=WORD) }",
    "list": "edit q at layer[*].attn.q { h += scaled(x, r=2, by=[WORD, none, WORD]) }",
    "let": "edit q at layer[*].attn.q { let y = scaled(x, by=WORD, r=2)  h += (1 + layer) * y }",
    "inner": "edit q at layer[*].attn.q { h += scaled(lora(x, r=1 + layer), r=2, by=WORD) + scaled(x, r=2, by=WORD) }",
    "shared": "let s = shared(scaled(r=2, by=WORD)) edit q at layer[*].attn.q { h += s(x) }",
    "constant": "let way = WORD edit q at layer[*].attn.q { h += scaled(x, r=2, by=way) }",
    "method": "method m(by = WORD) { edit q at layer[*].attn.q { h += scaled(x, r=2, by=by) } } apply m()",
    "applied": "method m(by = none) { edit q at layer[*].attn.q { h += scaled(x, r=2, by=by) } } apply m(by=WORD)",
}


@pytest.mark.parametrize("use", USES_OF_A_WORD)
def test_an_argument_that_takes_words_takes_the_word_layer(use: str, tmp_path: Path) -> None:
    texts = [(WITH_WORD + USES_OF_A_WORD[use]).replace("WORD", word) for word in ("layer", "each")]
    models = [base("llama") for _ in texts]
    for text, model in zip(texts, models, strict=True):
        peftc.compile(text, model, seed=0)
    values = [run(model, "llama") for model in models]
    assert torch.equal(*values)
    plain = base("llama")
    peftc.compile(WITH_WORD.replace("WORD", "each") + USES_OF_A_WORD[use].replace("WORD", "none"), plain, seed=0)
    assert not torch.equal(run(plain, "llama"), values[0])
    peftc.save(models[0], tmp_path)
    again = base("llama")
    peftc.load(tmp_path, again)
    assert torch.equal(run(again, "llama"), values[0])


class ByWord(LowRank):
    name = "by_word"
    arguments = (
        *LowRank.arguments,
        Argument("by", "choice", "what it is by", choices=("site", "layer"), default="site"),
    )
    module = "tests.forms.python_forms:LowRankModule"


def test_a_python_form_takes_the_word_layer_in_version_1() -> None:
    register(ByWord)
    try:
        plan = peftc.plan("peft 1 edit q at layer[*].attn.q { h += by_word(x, r=2, by=layer) }", base("llama"))
        assert plan.totals.trained == 3 * 2 * (32 + 32)
        with pytest.raises(PeftcError) as excinfo:
            peftc.plan("peft 1 edit q at layer[*].attn.q { h += by_word(x, r=layer, by=layer) }", base("llama"))
        assert [one.code for one in excinfo.value.diagnostics] == ["P028"]
    finally:
        unregister("by_word")


@pytest.mark.parametrize("value", ["act=layer", "bias=layer", "act=[relu, layer, relu]"])
def test_an_argument_that_takes_other_words_names_the_word(value: str) -> None:
    with pytest.raises(PeftcError) as excinfo:
        peftc.plan(f"peft 2 edit f at layer[*].ffn {{ h += adapter(x, r=2, {value}) }}", base("llama"))
    (diagnostic,) = excinfo.value.diagnostics
    assert diagnostic.code in {"P105", "P106"}
    assert "`layer`" in diagnostic.message
