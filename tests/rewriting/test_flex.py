"""Prefixes under flex attention: block masks with visible prefix columns; models compute what they
compute under sdpa.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as integration

import peftc
from peftc.runtime.attention import pad_block_mask
from tests import zoo
from tests.survival.harness import close, compiled

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SIZE = 128  # of a block
TAKING = ("llama", "bart", "bert", "vit", "mixtral", "opt")  # T5's own call fails: its bias has no batch


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions themselves, not compiled by inductor."""

    def plain(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
        return flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", plain)
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *a, **k: create_block_mask(*a, **{**k, "_compile": False})
    )


def causal(batch: Any, head: Any, query: Any, column: Any) -> Any:
    return query >= column


def nearby(batch: Any, head: Any, query: Any, column: Any) -> Any:
    return (query - column).abs() < 40 + 60 * batch


@pytest.mark.parametrize("rule", [causal, nearby])
@pytest.mark.parametrize(("length", "before", "after"), [(5, 3, 0), (130, 3, 2), (300, 130, 7), (256, 128, 0)])
def test_a_block_mask_is_padded_with_visible_columns(rule: Any, length: int, before: int, after: int) -> None:
    batch, total = 2, before + length + after
    mask = create_block_mask(rule, batch, None, length, length, device="cpu")
    padded = pad_block_mask(mask, length, before, after)
    want = torch.ones(batch, 1, length, total, dtype=torch.bool)
    want[..., before : before + length] = create_mask(rule, batch, 1, length, length, device="cpu")
    assert torch.equal(create_mask(padded.mask_mod, batch, 1, length, total, device="cpu"), want)
    visible_columns = padded.to_dense().bool().repeat_interleave(SIZE, -2).repeat_interleave(SIZE, -1)
    assert not (want & ~visible_columns[..., :length, :total]).any()
    q, k, v = (torch.randn(batch, 2, n, 8, dtype=torch.float64) for n in (length, total, total))
    close(flex_attention(q, k, v, block_mask=padded), scaled_dot_product_attention(q, k, v, want))


def test_empty_blocks_stay_empty() -> None:
    mask = create_block_mask(lambda b, h, q, k: (q // SIZE) == (k // SIZE), None, None, 8 * SIZE, 8 * SIZE, "cpu")
    assert mask.sparsity() > 80
    assert pad_block_mask(mask, 8 * SIZE, 3, 0).sparsity() > 50
    assert isinstance(pad_block_mask(mask, 8 * SIZE, 3, 0), BlockMask)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", TAKING)
def test_a_prefix_under_flex_attention(name: str, padding: Any) -> None:
    model = compiled(name, "mam", torch.float32)
    inputs = zoo.inputs(name, model, padding=padding) if name != "vit" else zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**inputs).logits
        model.set_attn_implementation("flex_attention")
        got = model(**inputs).logits
    keep = inputs["attention_mask"].bool() if padding and name in ("llama", "mixtral", "opt") else slice(None)
    close(got[keep], want[keep], tolerance=1e-5)
    with peftc.disabled(model), torch.no_grad():
        assert not torch.allclose(model(**inputs).logits[keep], want[keep], atol=1e-3)


def test_decoding_under_flex_attention() -> None:
    model = compiled("llama", "mam", torch.float32)
    model.set_attn_implementation("flex_attention")
    ids = zoo.inputs("llama", model)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        cache, steps = None, list[Tensor]()
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    close(torch.cat(steps, 1), whole, tolerance=1e-5)
