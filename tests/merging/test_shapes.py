"""Checkpoints with other shapes than the base: tied matrices that become two, and wider ffns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.merging.checkpoints import LORA, save_adapter, save_base, tensors

HEAD = 'edit t at "lm_head" { h += lora(x, r=2) }\n'
TIED = {"llama": "lm_head.weight", "gpt2": "lm_head.weight", "qwen2": "lm_head.weight"}


@torch.no_grad()
def difference(name: str, one: Any, other: Any) -> float:
    for model in (one, other):
        zoo._exact_norms(model.eval())  # pyright: ignore[reportPrivateUsage]
    return float((one(**zoo.inputs(name, one))[0] - other(**zoo.inputs(name, other))[0]).abs().max())


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("shards", ["20KB", "1GB"])
def test_a_tied_head_gets_a_matrix_of_its_own(name: str, shards: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    cls = save_base(base, name, torch.float64, shards, tie_word_embeddings=True)
    assert TIED[name] not in tensors(base)
    model: Any = save_adapter(tmp_path / "adapter", base, cls, HEAD + LORA)
    with pytest.raises(peftc.PeftcError, match=r"P531.*is tied to"):
        peftc.merge(base, tmp_path / "adapter", out)
    report = peftc.merge(base, tmp_path / "adapter", out, untie=True, verify=True)
    assert report.folded == ("t", "a")
    merged: Any = cls.from_pretrained(out, dtype="auto")
    assert merged.config.tie_word_embeddings is False
    assert merged.get_input_embeddings().weight is not merged.get_output_embeddings().weight
    assert difference(name, model, merged) < 1e-10
    before, after = tensors(base), tensors(out)
    assert after.keys() - before.keys() == {TIED[name]}
    if (out / "model.safetensors.index.json").exists():
        index, old = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (out, base))
        assert index["weight_map"].keys() == after.keys()
        size = after[TIED[name]].numel()
        assert index["metadata"]["total_size"] - old["metadata"]["total_size"] == 8 * size


def test_a_tied_embedding_that_is_not_edited_may_be_untied(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    cls = save_base(base, "llama", torch.bfloat16, tie_word_embeddings=True)
    save_adapter(tmp_path / "adapter", base, cls, LORA)
    peftc.merge(base, tmp_path / "adapter", out, untie=True)
    after = tensors(out)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_untying_what_is_not_tied_is_refused(tmp_path: Path) -> None:
    cls = save_base(tmp_path / "base", "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", tmp_path / "base", cls, LORA)
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", untie=True)


WIDE = {
    "bert": (
        "edit p at layer[*].ffn { h += 2 * adapter(x, r=4, act=gelu) }\n"
        "edit d at layer[*].ffn.down { h += lora(x, r=2) }"
    ),
    "opt": "edit p at layer[*].ffn { h += adapter(x, r=4, act=relu) }\nedit q at layer[*].ffn { h += lora(x, r=2) }",
    "t5": "edit p at layer[*].ffn { h += adapter(x, r=4, act=relu, bias=false) }",
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bottlenecks_become_hidden_units(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    cls = save_base(base, name, dtype)
    model: Any = save_adapter(tmp_path / "adapter", base, cls, WIDE[name])
    edited: Any = cls.from_pretrained(base, dtype="auto")
    peftc.load(tmp_path / "adapter", edited)
    with pytest.raises(peftc.PeftcError, match="P531"):
        peftc.merge(base, tmp_path / "adapter", out)
    report = peftc.merge(base, tmp_path / "adapter", out, widen=True, verify=True)
    assert not report.refused
    peftc.fold(model, widen=True)
    merged: Any = cls.from_pretrained(out, dtype="auto")
    expected, actual = dict(model.named_parameters()), dict(merged.named_parameters())
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(value, actual[key]), key
    if dtype == torch.float64:
        assert difference(name, edited, merged) < 1e-10


def test_a_gated_ffn_does_not_get_wider(tmp_path: Path) -> None:
    cls = save_base(tmp_path / "base", "llama", torch.bfloat16)
    spec = "edit p at layer[*].ffn { h += adapter(x, r=4, act=silu) }\n" + LORA
    save_adapter(tmp_path / "adapter", tmp_path / "base", cls, spec)
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", widen=True, partial=True)
    assert [*report.refused] == ["p"]
    assert "is not two Linears" in report.refused["p"]
