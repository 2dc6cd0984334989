"""Rows of keys and values in PEFT's cache, which positions count: prefixes, and cartridges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import peftc
from peftc.exchange.peft_format.rows.attention.cached import PREFIX_FORM
from tests import zoo
from tests.exchange.adapters import edited, in_peft, tensors
from tests.exchange.test_export_refusals import export_refused
from tests.exchange.test_import import import_refused, loaded, trained
from tests.exchange.test_import_refusals import change
from tests.laws.harness import close
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ROWS: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
PREFIX = "kv = concat(cached_prefix(len=3), kv)"
CASES: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "prefix": ("llama", peft.PrefixTuningConfig, {}, PREFIX),
    "prefix of an MLP": (
        "llama",
        peft.PrefixTuningConfig,
        {"prefix_projection": True, "encoder_hidden_size": 8},
        PREFIX,
    ),
    "learned positions": ("gpt2", peft.PrefixTuningConfig, {}, PREFIX),
    "positions of the mask": ("opt", peft.PrefixTuningConfig, {}, PREFIX),
    "cartridge": ("qwen3", peft.CartridgeConfig, {}, "kv = concat(cached_sink(len=1), cached_prefix(len=2), kv)"),
    "cartridge that is not trained": (
        "llama",
        peft.CartridgeConfig,
        {"num_frozen_tokens": 3},
        "kv = concat(cached_sink(len=3), kv)",
    ),
    "cartridge that is trained": ("llama", peft.CartridgeConfig, {"num_frozen_tokens": 0}, PREFIX),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_come_and_go_back(case: str, tmp_path: Path) -> None:
    name, type_, options, equation = CASES[case]
    trained(name, tmp_path / "in", type_=type_, **ROWS, **options)
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    assert equation in result.spec
    ours, theirs = loaded(name, tmp_path / "ours"), in_peft(name, tmp_path / "in")
    for padding in (None, "right"):
        inputs = zoo.inputs(name, ours, padding=padding)
        visible = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
        with torch.no_grad():
            close(theirs(**inputs).logits[visible], ours(**inputs).logits[visible], case)
    report = peftc.export(ours, tmp_path / "back")
    assert report.type == ("CARTRIDGE" if "cached_sink" in equation else "PREFIX_TUNING")
    (one,), (two,) = tensors(tmp_path / "in").values(), tensors(tmp_path / "back").values()
    assert torch.equal(one, two)
    with torch.no_grad():
        close(in_peft(name, tmp_path / "back")(**inputs).logits[visible], ours(**inputs).logits[visible], case)


@pytest.mark.parametrize(("type_", "frozen"), [(peft.PrefixTuningConfig, 0), (peft.CartridgeConfig, 1)])
def test_gradients_are_those_of_peft(type_: Any, frozen: int, tmp_path: Path) -> None:
    theirs = trained("llama", tmp_path / "in", type_=type_, **ROWS)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    ours = loaded("llama", tmp_path / "ours")
    inputs = zoo.inputs("llama", ours)
    for model in (ours, theirs):
        model(**inputs).logits.square().mean().backward()
    (values,) = (p for p in theirs.parameters() if p.requires_grad)
    expected = values.grad.reshape(3 - frozen, 3, 2, 2, -1)  # rows, layers, keys and values, heads, features
    for place, parameter in peftc.parameters(ours).items():
        layer, at = int(place.partition("layer[")[2][0]), int(place.endswith(".value"))
        assert parameter.grad is not None
        close(parameter.grad, expected[:, layer, at].transpose(0, 1).double(), place, 1e-6)  # theirs are of float32


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_texts_are_those_of_peft(name: str, tmp_path: Path) -> None:
    trained(name, tmp_path / "in", type_=peft.PrefixTuningConfig, **ROWS)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    ours: Any = loaded(name, tmp_path / "ours")
    theirs: Any = in_peft(name, tmp_path / "in")
    inputs = zoo.inputs(name, ours)
    options = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    one, two = (model.generate(**inputs, **options) for model in (ours, theirs))
    assert torch.equal(one.sequences, two.sequences)
    for mine, other in zip(one.scores, two.scores, strict=True):
        close(mine, other, name)


def test_rows_of_a_batch_are_computed_as_alone() -> None:
    """Padding on the left is no position of the text."""
    form = PREFIX_FORM + f"\nedit p at layer[*].attn {{ {PREFIX} }}"
    model = edited("opt", form)
    inputs = zoo.inputs("opt", model, padding="left")
    pads = int((inputs["attention_mask"][1] == 0).sum())
    assert pads > 0
    with torch.no_grad():
        alone = model(input_ids=inputs["input_ids"][1:, pads:]).logits
        close(model(**inputs).logits[1:, pads:], alone)


PLAN_REFUSED: dict[str, tuple[str, str, str]] = {
    "no position ids": ("bart", f"edit p at layer[*].attn {{ {PREFIX} }}", "cannot count the rows"),
    "relative positions": ("t5", f"edit p at layer[*].attn {{ {PREFIX} }}", "cannot count the rows"),
    "another number of rows": (
        "llama",
        f"edit p at layer[0].attn {{ {PREFIX} }} edit o at layer[1].attn {{ {PREFIX.replace('3', '2')} }}",
        "positions count the rows of keys, 2 at `decoder.layer[1].attn.self` and 3 at",
    ),
    "a prompt": (
        "llama",
        f"edit p at layer[*].attn {{ {PREFIX} }} edit o at input.embed {{ h = concat(prompt(len=2), h) }}",
        "joins a prompt to them",
    ),
    "positions": (
        "llama",
        f"edit p at layer[*].attn {{ {PREFIX} }} edit o at layer[*] {{ h += reft(h, r=2, first=1, last=none) }}",
        "selects tokens by their positions",
    ),
}


@pytest.mark.parametrize("case", PLAN_REFUSED)
def test_what_positions_cannot_count(case: str) -> None:
    name, edits, part = PLAN_REFUSED[case]
    model = zoo.build(name, torch.float64)
    error = refused("P422", lambda: peftc.compile(f"peft 2\n{PREFIX_FORM}\n{edits}", model, seed=0), model)
    assert part in error.message


def test_rows_of_another_size_and_task(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.PrefixTuningConfig, **ROWS)
    change(tmp_path, {"num_virtual_tokens": 2})
    assert "does not fit 3 attentions and 2 rows" in import_refused("P804", tmp_path).message
    change(tmp_path, {"num_virtual_tokens": 3, "task_type": "SEQ_CLS"})
    assert "`task_type: 'SEQ_CLS'`" in import_refused("P802", tmp_path).message


def test_a_window_hides_rows(tmp_path: Path) -> None:
    trained("mistral", tmp_path / "in", type_=peft.PrefixTuningConfig, **ROWS)
    model = zoo.build("mistral", torch.float64, sliding_window=4)
    assert "a sliding window hides the rows" in import_refused("P802", tmp_path, model).message


def test_rows_at_some_attentions_have_no_form_in_peft(tmp_path: Path) -> None:
    model = edited("llama", f"{PREFIX_FORM}\nedit p at layer[0..1].attn {{ {PREFIX} }}")
    assert "at all attentions alike" in export_refused("P801", model, tmp_path).message
