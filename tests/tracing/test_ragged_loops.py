"""Loops over a data-dependent number of slices: preserved as loops if iterations are
independent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.addressing.sites import Slice
from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.attention.patterns import attentions
from peftc.specialization.generated_class import GeneratedClass
from peftc.tracing.operations import collect, segment
from peftc.tracing.tracer import RegionTracer


class Packed(nn.Module):
    """Attention within each sequence of a packed row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = [t.split(lengths.tolist(), dim=0) for t in self.qkv(x).chunk(3, dim=-1)]
        attended = [torch.softmax(q @ k.transpose(0, 1), -1) @ v for q, k, v in zip(*pieces, strict=True)]
        return self.o(torch.cat(attended))


class Looping(nn.Module):
    body: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.body(x, lengths)


def two_loops(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    first = [self.inner(p) for p in torch.split(x, lengths.tolist())]
    second: list[Tensor] = []
    for p in torch.split(torch.cat(first), lengths.tolist(), 0):
        with torch.no_grad():
            mean = p.mean(0, keepdim=True) + torch.arange(4)
        second.append(p - mean)
    return torch.cat(tuple(second))


def counting(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([p * i for i, p in enumerate(x.split(lengths.tolist()))])


def carrying(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    pieces: list[Tensor] = []
    total = x.sum(0)
    for p in x.split(lengths.tolist()):
        total = total + p.sum(0)
        pieces.append(p + total)
    return torch.cat(pieces)


def last(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    output = x
    for p in x.split(lengths.tolist()):
        output = self.inner(p)
    return output


def reading_a_value(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return x * len(x.split(lengths.tolist()))


def choosing(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return x.split(lengths.tolist())[0]


def adding(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return x * sum(lengths.tolist())


def within(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    numbers = lengths.tolist()
    return torch.cat([p + torch.cat([q * 2 for q in x.split(numbers)]).sum() for p in x.split(numbers)])


def deciding(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([p if p.sum() > 0 else -p for p in x.split(lengths.tolist())])


def rewritten(module: nn.Module) -> GeneratedClass:
    kind = GeneratedClass(type(module), frozenset([""]), (), type(module).__name__)
    module.__class__ = kind.cls
    return kind


def looping(body: Callable[..., Tensor]) -> nn.Module:
    return type("Looping", (Looping,), {"body": body})()


@pytest.mark.parametrize("make", [Packed, lambda: looping(two_loops)], ids=["attention", "two-loops"])
def test_one_forward_serves_any_number_of_pieces(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    base, module = make(), make()
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    for lengths in ([3, 2], [5], [1, 1, 1, 2], [5, 0]):
        x = torch.randn(5, 4)
        assert torch.equal(module(x, torch.tensor(lengths)), base(x, torch.tensor(lengths)))
    assert len(kind.variants) == 1
    assert "\n    for " in kind.variants[0].source


def test_roles_of_an_attention_over_packed_sequences() -> None:
    root = Packed()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {"x": mode.from_tensor(torch.randn(5, 4)), "lengths": mode.from_tensor(torch.tensor([3, 2]))}
        graph = RegionTracer(lambda name: name == "").trace_region(root, inputs).graph
    (attention,) = attentions(LayerGraph(graph, root))
    for i, value in enumerate((attention.q, attention.k, attention.v)):
        assert [rows for _, rows in source_linears(LayerGraph(graph, root), value)] == [Slice(4 * i, 4 * i + 4)]
    assert sum(n.target is segment for n in graph.nodes) == 3
    assert sum(n.target is collect for n in graph.nodes) == 1


@pytest.mark.parametrize("body", [counting, carrying, last, reading_a_value, choosing, adding, within, deciding])
def test_loops_that_cannot_be_preserved(body: Callable[..., Tensor]) -> None:
    module = looping(body)
    rewritten(module)
    with pytest.raises(peftc.PeftcError, match="P407"):
        module(torch.randn(5, 4), torch.tensor([3, 2]))
