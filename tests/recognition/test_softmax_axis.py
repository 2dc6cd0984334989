"""Queries and keys of a hand-written attention: the softmax normalises over keys, whichever operand
comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.recognition.attention import patterns
from tests.layers import Layers

D, HEADS = 16, 2
SPEC = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }\nedit f at layer[*].attn.k { h += lora(x, r=2) }\n"
PREFIX = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def queries_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.transpose(-1, -2) / 3).softmax(-2).transpose(-1, -2) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((k @ q.mT).permute(0, 1, 3, 2), dim=-1) @ v


def batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(k.flatten(0, 1), q.flatten(0, 1).transpose(1, 2)).softmax(1)
    return torch.bmm(scores.transpose(1, 2), v.flatten(0, 1)).view(v.shape)


def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(k.flatten(0, 1), q.flatten(0, 1).swapaxes(1, 2)).unflatten(0, (-1, HEADS))
    return nn.functional.softmax(scores + 1, dim=2).mT @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhji,bhjd->bhid", torch.einsum("bhjd,bhid->bhji", k, q).softmax(2), v)


def einsum_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1), v)


def columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mT.matmul((k.mT.transpose(-1, -2) @ q.mT).softmax(dim=-2)).mT


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.first, self.second, self.third, self.out = (nn.Linear(D, D) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(merged(self.attend(heads(self.first(x)), heads(self.second(x)), heads(self.third(x)))))
        return x + self.down(torch.relu(self.up(self.norm(x))))


SAMPLE = {"x": torch.zeros(2, 5, D)}
WRITTEN = [queries_first, keys_first, turned, batches, split, einsum, einsum_turned, columns]


@pytest.mark.parametrize("attend", WRITTEN)
def test_the_softmax_axis_identifies_the_keys(attend: Attend) -> None:
    torch.manual_seed(0)
    model = Layers(Layer(attend), Layer(attend))
    plan = peftc.plan(SPEC, model, sample=SAMPLE)
    assert [{site.module.rpartition(".")[2] for site in edit.sites} for edit in plan.edits] == [{"first"}, {"second"}]
    report = peftc.verify(peftc.compile(SPEC, model, seed=0, sample=SAMPLE), {"x": torch.randn(2, 5, D)})
    assert report.ok, str(report)
    assert any(
        check.name.startswith("attn.q, attn.k and attn.v") and check.outcome == "holds" for check in report.checks
    )


@pytest.mark.parametrize("attend", WRITTEN[1:])
def test_verification_detects_exchanged_roles(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    right = patterns.compared
    monkeypatch.setattr(patterns, "compared", lambda *args: right(*args)[::-1])
    torch.manual_seed(0)
    model = peftc.compile(SPEC, Layers(Layer(attend), Layer(attend)), seed=0, sample=SAMPLE)
    report = peftc.verify(model, {"x": torch.randn(2, 5, D)})
    assert "P606" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("attend", WRITTEN)
def test_prefix_rows_are_joined_correctly_or_refused(attend: Attend) -> None:
    torch.manual_seed(0)
    model = Layers(Layer(attend), Layer(attend))
    if attend in (queries_first, einsum_turned):
        report = peftc.verify(peftc.compile(PREFIX, model, seed=0, sample=SAMPLE), {"x": torch.randn(2, 5, D)})
        assert report.ok, str(report)
    else:
        with pytest.raises(peftc.PeftcError, match="P205"):
            peftc.compile(PREFIX, model, seed=0, sample=SAMPLE)
