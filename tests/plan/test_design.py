"""Table 1 of He et al. 2022, derived from specs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import peftc
from peftc.planning.report.design import Design, table

MODEL = "facebook/bart-large"
SPECS = {
    "Prefix Tuning": "edit e at layer[*].attn { kv = concat(prefix(len=200), kv) }",
    "Adapter": "edit e at layer[*].ffn | layer[*].attn { h += adapter(h, r=200, act=relu) }",
    "LoRA": "edit e at layer[*].attn.k | layer[*].attn.v { h += lora(x, r=102, alpha=128) }",
    "Parallel adapter": "edit e at layer[*].ffn | layer[*].attn { h += adapter(x, r=200, act=relu) }",
    "Multi-head parallel adapter": "edit e at layer[*].attn.heads { h += bottleneck(q, r=200, act=relu) }",
    "Scaled parallel adapter": "edit e at layer[*].ffn | layer[*].attn { h += 4 * adapter(x, r=200, act=relu) }",
}
# As printed, with two errata: a parallel adapter reads x, not h, and the
# multi-head one reads q.
TABLE_1 = {
    "Prefix Tuning": ("softmax(x W_q P_kᵀ) P_v", "parallel", "head attn", "h ← (1 − λ)h + λΔh"),
    "Adapter": ("ReLU(h W_down) W_up", "sequential", "ffn/attn", "h ← h + Δh"),
    "LoRA": ("x W_down W_up", "parallel", "attn key/val", "h ← h + s · Δh"),
    "Parallel adapter": ("ReLU(x W_down) W_up", "parallel", "ffn/attn", "h ← h + Δh"),
    "Multi-head parallel adapter": ("ReLU(q P_kᵀ) P_v", "parallel", "head attn", "h ← h + Δh"),
    "Scaled parallel adapter": ("ReLU(x W_down) W_up", "parallel", "ffn/attn", "h ← h + s · Δh"),
}


def design(text: str, model: str = MODEL) -> Design:
    (result,) = peftc.design(f"peft 1\n{text}", model)
    return result


def test_table_1(golden: Callable[[str, str], None]) -> None:
    designs = {name: design(text) for name, text in SPECS.items()}
    assert {n: (d.functional, d.insertion, _sorted(d.modified), d.composition) for n, d in designs.items()} == {
        n: (f, i, _sorted(m), c) for n, (f, i, m, c) in TABLE_1.items()
    }
    print(table(designs.items()))
    golden("table-1.md", table(designs.items()) + "\n")


def _sorted(modified: str) -> str:
    """ffn/attn means attn/ffn: sites are in model order."""
    head, _, tail = modified.rpartition(" ")
    return f"{head} {'/'.join(sorted(tail.split('/')))}".strip()


@pytest.mark.parametrize(
    ("text", "composition", "insertion", "modified"),
    [
        ("edit e at layer[*].ffn { let g = gate(x)  h = (1 - g) * h + g * adapter(x, r=2) }",
         "h ← (1 − g) · h + g · Δh", "parallel", "ffn"),
        ("edit e at layer[*].attn.k { h *= vector(init=1) }", "h ← h · l", "scaling", "attn key"),
        ("edit e at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }", "w ← Δw", "weight", "attn query"),
        ("edit e at layer[*].attn.q { w += lowrank(r=2, alpha=4) }", "w ← w + s · Δw", "weight", "attn query"),
        ("edit e at encoder.embed { h = concat(prompt(len=2), h) }", "h ← [Δh; h]", "tokens", "embed"),
        ("edit e at layer[*].ffn { h += scalar(init=4) * adapter(x, r=2) }", "h ← h + s · Δh", "parallel", "ffn"),
        ("edit e at layer[*].ffn.hidden { h += adapter(h, r=2) }", "h ← h + Δh", "sequential", "ffn hidden"),
        ("edit e at layer[*].ffn { h += adapter(res, r=2, act=none) }", "h ← h + Δh", "parallel", "ffn"),
    ],
)  # fmt: skip
def test_other_designs(text: str, composition: str, insertion: str, modified: str) -> None:
    result = design(text)
    assert (result.composition, result.insertion, result.modified) == (composition, insertion, modified)
