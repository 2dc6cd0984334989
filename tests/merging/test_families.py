"""Checkpoints of many families, as transformers writes them: keys that it renames, experts in both
layouts, fused projections, computed weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from benchmarks.families import build
from tests.laws.harness import randomise
from tests.merging.checkpoints import same_bits, tensors

CAUSAL, SEQ2SEQ = "causal-lm", "seq2seq"
LINEARS = "edit a at layer[*].attn.q | layer[*].attn.v { w = magnitude(w + lowrank(r=2)) }"
FFN = "edit b at layer[*].ffn.up | layer[*].ffn.down { w += lowrank(r=2) }"
EXPERTS = "edit e at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down { w += lowrank(r=2) }"
FAMILIES = {
    "phi3": LINEARS + "\n" + FFN,
    "gpt_neox": LINEARS + "\n" + FFN,
    "bloom": LINEARS + "\n" + FFN,
    "falcon": LINEARS,
    "gemma2": LINEARS + "\n" + FFN,
    "olmo2": LINEARS + "\n" + FFN,
    "codegen": LINEARS,
    "gptj": LINEARS + "\n" + FFN,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": LINEARS + "\n" + EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "olmoe": EXPERTS,
    "deepseek_v3": EXPERTS,
    "granitemoe": EXPERTS,
}
OTHERS = {
    ("masked-lm", "distilbert"): LINEARS,
    ("masked-lm", "albert"): LINEARS,
    ("masked-lm", "deberta-v2"): LINEARS,
    ("masked-lm", "electra"): LINEARS,
    ("audio-classification", "whisper"): LINEARS,
    ("audio-classification", "wav2vec2"): LINEARS,
    ("image-classification", "swin"): LINEARS,
    ("image-classification", "beit"): LINEARS,
    (SEQ2SEQ, "pegasus"): LINEARS,
    ("image-text-to-text", "llava"): LINEARS,
}
ALL = {(CAUSAL, name): spec for name, spec in FAMILIES.items()} | OTHERS


@pytest.mark.parametrize("family", ALL, ids=lambda family: family[1])
@pytest.mark.filterwarnings("ignore")
def test_merge_is_fold(family: tuple[str, str], tmp_path: Path) -> None:
    model, _ = build(*family)
    cls: Any = type(model)
    base: Any = model.to(torch.bfloat16)
    base.config.architectures = [cls.__name__]
    base.save_pretrained(tmp_path / "base", max_shard_size="200KB")
    loaded: Any = cls.from_pretrained(tmp_path / "base", dtype="auto").eval()
    peftc.compile(f"peft 1\n{ALL[family]}\n", loaded, seed=0)
    randomise(peftc.parameters(loaded))
    peftc.save(loaded, tmp_path / "adapter")
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", verify=True)
    assert not peftc.fold(loaded).refused
    merged: Any = cls.from_pretrained(tmp_path / "out", dtype="auto")
    expected, actual = dict(loaded.named_parameters()), dict(merged.named_parameters())
    assert expected.keys() == actual.keys()
    assert [n for n, value in expected.items() if not same_bits(value.data, actual[n].data)] == []
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    changed = {key for key in before if not same_bits(before[key], after[key])}
    assert changed == {key for tensor in report.tensors for key in tensor.keys}
    assert changed
