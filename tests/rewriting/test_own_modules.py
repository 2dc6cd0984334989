"""Edits of modules outside transformers: an `nn.Sequential`, which runs all registered children; a
forward without `self`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.rewriting.edits import Container


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(this, x: Tensor) -> Tensor:
        return torch.tanh(this.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(), nn.Dropout(0.1), Block())
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("site", ["first", "first.0", "first.2.inner", "last", "*", "**"])
def test_an_edit_of_a_module_by_its_name(site: str) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 4)
    base = copy.deepcopy(net)
    peftc.compile(f'peft 1\nedit e at "{site}" {{ h *= vector(init=1) }}', net, seed=0, sample={"x": x})
    assert torch.equal(net(x), base(x))
    assert [*net.first] == [net.first[i] for i in range(3)]
    assert len(net.first) == 3
    for parameter in peftc.parameters(net).values():
        nn.init.constant_(parameter, 2.0)
    if site == "first":
        assert torch.equal(net(x), base.last(base.first(x) * 2))
        assert net.first[-1] is net.first[2]
    net.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in peftc.parameters(net).values())
    twin = copy.deepcopy(net).eval()
    assert torch.equal(twin(x), net.eval()(x))
    assert torch.equal(peftc.remove(net)(x), base(x))


def test_a_sequential_that_is_the_model_itself() -> None:
    net, x = nn.Sequential(Block(), Block()).eval(), torch.randn(2, 3, 4)
    base = copy.deepcopy(net)
    peftc.compile('peft 1\nedit e at "*" { h *= vector(init=2) }', net, seed=0, sample={"input": x})
    assert torch.equal(net(x), base[1](base[0](x) * 2) * 2 * 2)


def test_the_container_of_edit_modules_is_an_ordinary_module() -> None:
    """Its children can be replaced and deleted, as PyTorch's own tools do."""
    holders = (Container(), nn.Module())
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for holder in holders:
        holder.add_module("a", first)
        holder.add_module("b", first)
        holder.add_module("a", second)
        del holder.b
        with pytest.raises(AttributeError):
            del holder.b
    one, other = holders
    assert one.a is other.a is second
    assert not hasattr(one, "b")
    assert dict(one.named_children()) == dict(other.named_children()) == {"a": second}
    assert list(one.state_dict()) == list(other.state_dict()) == ["a.weight", "a.bias"]
