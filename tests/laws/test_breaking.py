"""`peftc breaking`: what it says of two specs is what happens to an adapter of the first under the
second.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from peftc.adapters.expected_tensors import expected_sizes
from peftc.comparison.breaking import breaking
from peftc.comparison.findings import Comparison, OnModel
from peftc.compiler import plan_edits
from peftc.diagnostics import PeftcError
from peftc.filesystem import resources
from peftc.semantics.export_forms import stored_statements
from peftc.semantics.spec_argument import flat_spec
from peftc.syntax import ast
from peftc.syntax.printer import print_spec
from tests import zoo
from tests.laws.harness import randomise
from tests.laws.mutations import CHANGES, mutants

# The law, over shipped recipes and changes of them

RECIPES = ("lora", "vera", "dora", "prefix", "ia3", "bitfit", "lokr", "loreft", "pfeiffer")
BASE = "gpt2"
SMALL = {"r": 3, "l": 3, "len": 3, "r_prefix": 3, "r_ffn": 3}


@cache
def model() -> nn.Module:
    return zoo.build(BASE, torch.float64).eval()


@torch.no_grad()
def logits() -> torch.Tensor:
    return model()(**zoo.inputs(BASE, model())).logits


def recipe(name: str) -> str:
    """A shipped recipe, expanded and small."""
    path = resources.recipes()[name]
    parsed = peftc.parse(path.read_text(encoding="utf-8"))
    params = {p.name for s in parsed.statements if isinstance(s, ast.Method) for p in s.params}
    return print_spec(flat_spec(path, {n: v for n, v in SMALL.items() if n in params}))


def findings(old: str, new: str, *, on_model: bool = True) -> Comparison:
    specs = [stored_statements(flat_spec(text)) for text in (old, new)]
    if not on_model:
        return breaking(("old", "new"), (specs[0], specs[1]))
    plans = [plan_edits(spec, model()) for spec in specs]
    failed = plan_edits(flat_spec(new), model()).failed_expectations if "expect" in new else ()
    sides = [OnModel(plan, expected_sizes(plan), own) for plan, own in zip(plans, ((), failed), strict=True)]
    return breaking(("old", "new"), (specs[0], specs[1]), (sides[0], sides[1]))


def categories(comparison: Comparison) -> set[str]:
    return {finding.category for finding in comparison.findings}


def train_and_save(text: str, folder: Path) -> torch.Tensor:
    """An adapter of a spec; the outputs of its model."""
    peftc.compile(text, model(), seed=0)
    randomise(peftc.parameters(model()))
    before = logits()
    peftc.save(model(), folder)
    peftc.remove(model())
    return before


def load(folder: Path, text: str) -> torch.Tensor | None:
    """The outputs of the adapter under a spec; None if it is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", peftc.PeftcWarning)
            peftc.load(folder, model(), spec=text)
    except PeftcError:
        return None
    after = logits()
    peftc.remove(model())
    return after


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_said_is_what_happens(name: str, tmp_path: Path) -> None:
    """LOAD exactly if `load` refuses; NUMERIC exactly if it loads and outputs differ."""
    text = recipe(name)
    before = train_and_save(text, tmp_path)
    for change, changed in (("none", text), *mutants(text)):
        broken = categories(findings(text, changed))
        after = load(tmp_path, changed)
        assert (after is None) == ("LOAD" in broken), (change, broken)
        if after is None:
            assert "LOAD" in categories(findings(text, changed, on_model=False)), change
            continue
        # Without dropout, LoRA is computed in another order.
        same = torch.allclose(after, before, rtol=0, atol=1e-12) if "dropout" in change else torch.equal(after, before)
        assert same == ("NUMERIC" not in broken), (change, broken)
        if not same:  # without a model nothing is missed
            assert "NUMERIC" in categories(findings(text, changed, on_model=False)), change


def test_each_change_is_tried() -> None:
    tried = {change for name in RECIPES for change, _ in mutants(recipe(name))}
    assert tried >= set(CHANGES) - {"values_have_names"}
    assert "values_have_names" in {change for change, _ in mutants(NAMED)}


NAMED = "peft 1\nedit f at layer[*].ffn { let g = gate(x)  h += g * adapter(h, r=2) }"


# Cases that no change of a recipe makes

FORM = """form graded(x, r, s = 2) {{
    let width = r
    param A[width, d(x)] = {first}
    param B[d(out), width] = zeros
    {rest}
}}"""


def form(first: str = "kaiming", rest: str = "let y = A @ x  f = s * B @ y", call: str = "graded(x, r=2)") -> str:
    text = FORM.format(first=first, rest=rest)
    return f"peft 2\n{text}\nedit e at layer[*].ffn.up {{ h += {call} }}"


SHARED = "peft 1\nlet P = shared(adapter(r=2))\nedit a at layer[*].ffn {{ h += P({}) }}\n"
SHARED += "edit b at layer[0].attn {{ h += P(x) }}"
PAIRS = {
    "a name inside of a form": (form(), form(rest="let z = A @ x  f = s * B @ z"), set[str]()),
    "the first value of a form": (form(), form(first="normal(0.1)"), set()),
    "the equation of a form": (form(), form(rest="let y = A @ x  f = s * B @ relu(y)"), {"NUMERIC", "FOLD"}),
    "the default of a form": (form(), form().replace("s = 2", "s = 3"), {"NUMERIC"}),
    "an argument for a default": (form(), form(call="graded(x, r=2, s=2)"), set()),
    "a sum in another order": (form(), form(call="graded(x, r=2) + graded(x, r=3)"), {"LOAD", "NUMERIC"}),
    "two calls change places": (
        form(call="graded(x, r=2) + 5 * graded(x, r=2)"),
        form(call="5 * graded(x, r=2) + graded(x, r=2)"),
        {"NUMERIC"},
    ),
    "a width as a reduction": (
        "peft 1\nedit f at layer[*].ffn { h += adapter(x, r=4) }",
        "peft 1\nedit f at layer[*].ffn { h += adapter(x, reduction=8) }",
        set(),
    ),
    "what is shared": (SHARED.format("x"), SHARED.format("h"), {"NUMERIC"}),
    "an order of edits that do not meet": (
        "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\nedit k at layer[*].attn.k { h += lora(x, r=2) }",
        "peft 1\nedit k at layer[*].attn.k { h += lora(x, r=2) }\nedit q at layer[*].attn.q { h += lora(x, r=2) }",
        set(),
    ),
    "an order of edits that meet": (
        "peft 1\nedit a at layer[*].ffn { h += adapter(x, r=2) }\nedit b at layer[*].ffn { h *= vector(init=1) }",
        "peft 1\nedit b at layer[*].ffn { h *= vector(init=1) }\nedit a at layer[*].ffn { h += adapter(x, r=2) }",
        {"NUMERIC"},
    ),
    "an activation": (
        "peft 1\nedit f at layer[*].ffn.up { h += adapter(x, r=2, act=none) }",
        "peft 1\nedit f at layer[*].ffn.up { h += adapter(x, r=2, act=tanh) }",
        {"NUMERIC", "FOLD"},
    ),
    "tasks": (
        "peft 1\nedit f at layer[*].ffn { h += adapter(x, r=2) }",
        "peft 1\nedit f at layer[*].ffn per task { h += adapter(x, r=2) }",
        {"LOAD"},
    ),
    "what is trained of the base": (
        "peft 1\ntrain n = [w] at layer[*].norm",
        "peft 1\ntrain n = [w, b] at layer[*].norm",
        {"LOAD"},
    ),
    "sites of an edit without parameters": (
        "peft 1\nedit s at layer[*].ffn { h *= 2 }\nedit f at layer[*].attn { h += adapter(x, r=2) }",
        "peft 1\nedit s at layer[0].ffn { h *= 2 }\nedit f at layer[*].attn { h += adapter(x, r=2) }",
        {"NUMERIC"},
    ),
    "an expectation": (
        "peft 1\nedit f at layer[*].attn { h += adapter(x, r=2) }",
        "peft 1\nedit f at layer[*].attn { h += adapter(x, r=2) }\nexpect stored < 3",
        {"LOAD"},
    ),
    "the arms of a selector": (
        "peft 1\nedit f at layer[*].attn.q | layer[*].ffn.up { h += lora(x, r=2) }",
        "peft 1\nedit f at layer[*].ffn.up | layer[*].attn.q { h += lora(x, r=2) }",
        set(),
    ),
    "a dtype": (form(), form(call="graded(x, r=2, dtype=float32)"), {"NUMERIC"}),
    "names of values": (NAMED, NAMED.replace("g ", "gated "), set()),
}


OF_MODELS = ("an expectation",)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, tmp_path: Path) -> None:
    old, new, expected = PAIRS[name]
    broken = findings(old, new)
    assert categories(broken) == expected
    if name not in OF_MODELS:
        assert categories(findings(old, new, on_model=False)) >= expected - {"FOLD"}
    before = train_and_save(old, tmp_path)
    after = load(tmp_path, new)
    assert (after is None) == ("LOAD" in expected)
    if after is not None:
        assert torch.equal(before, after) == ("NUMERIC" not in expected)


@pytest.mark.parametrize("name", [name for name, (_, _, expected) in PAIRS.items() if "FOLD" in expected])
def test_what_folded_does_not_fold(name: str, tmp_path: Path) -> None:
    old, new, _ = PAIRS[name]
    train_and_save(old, tmp_path)
    peftc.load(tmp_path, folded := zoo.build(BASE, torch.float64))
    peftc.fold(folded, only=["e" if "edit e" in old else "f"])
    with pytest.warns(peftc.PeftcWarning, match="P854"):
        peftc.load(tmp_path, other := zoo.build(BASE, torch.float64), spec=new)
    (finding,) = (one for one in findings(old, new).findings if one.category == "FOLD")
    with pytest.raises(PeftcError, match="P531"):
        peftc.fold(other, only=[str(finding.edit)])


def test_what_calibration_has_selected_stays(tmp_path: Path) -> None:
    """How entries are selected is over when an adapter is saved."""
    old = "peft 1\nedit s at layer[*].ffn.up { w += sparse(density=1%, select=magnitude) }"
    peftc.compile(old, model(), seed=0)
    peftc.calibrate(model(), [])
    randomise(peftc.parameters(model()))
    before = logits()
    peftc.save(model(), tmp_path)
    peftc.remove(model())
    for new, expected in (("select=fisher", set[str]()), ("select=magnitude, dtype=float32", {"NUMERIC"})):
        text = old.replace("select=magnitude", new)
        assert categories(findings(old, text)) == expected
        after = load(tmp_path, text)
        assert after is not None
        assert torch.equal(before, after) == (not expected)
    assert "LOAD" in categories(findings(old, old.replace("1%", "2%")))
    assert load(tmp_path, old.replace("1%", "2%")) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "peft 2\nedit qv at layer[*].attn.q { h += lora(x, r=2) }",
            "peft 2\nedit attention at layer[*].attn.q { h += lora(x, r=2) }",
        ),
        ("peft 2\ntrain n = [w] at layer[*].norm", "peft 2\ntrain norms = [w] at layer[*].norm"),
        (form(), form().replace("A", "down")),
        (form(), form().replace("graded", "stepped")),
    ],
)
def test_the_way_out_is_one(old: str, new: str, tmp_path: Path) -> None:
    """The statements that a finding names make the adapter load, with the same outputs."""
    before = train_and_save(old, tmp_path)
    assert load(tmp_path, new) is None
    ways_out = {finding.help.rpartition(": ")[2].strip("`") for finding in findings(old, new).findings}
    assert len(ways_out) == 1
    moved = f"{new}\n{ways_out.pop()}\n"
    assert not findings(old, moved).findings
    after = load(tmp_path, moved)
    assert after is not None
    assert torch.equal(before, after)
