"""Styles of original repositories: matrices stored (in, out), tuples as states, softmax modules,
scores of two products, recurrences, sampling, and modules that list their children.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.recognition import module_features
from tests.layers import Layers

D, H, T = 16, 2, 6
LORA = "peft 1  edit a at layer[*].attn.q { h += lora(x, r=2) }  edit b at layer[*].ffn.up { h *= vector(init=1) }"


class InOut(nn.Module):
    """W is (in, out), in the style of GPT-2's Conv1D."""

    def __init__(self, width: int, d_in: int) -> None:
        super().__init__()
        self.width = width
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, width) / 4), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.width)


class MaskedSoftmax(nn.Module):
    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return nn.Softmax(dim=-1)(scores.masked_fill_(mask, -1e4))


class TupleLayer(nn.Module):
    """The state is a tuple, as in DeepSpeed's pipelines and ESPnet; the softmax a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.softmax = nn.LayerNorm(D), nn.LayerNorm(D), MaskedSoftmax()
        self.qkv, self.out, self.up, self.down = InOut(3 * D, D), InOut(D, D), InOut(2 * D, D), InOut(D, 2 * D)

    def forward(self, state: Any) -> Any:
        mask = None
        if isinstance(state, tuple):
            state, mask = state
        x = state
        assert isinstance(mask, Tensor)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(D, dim=-1))
        x = x + self.out((self.softmax(q @ k.mT, mask) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), mask


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(TupleLayer(), TupleLayer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)))[0]


def draw(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn_like(parameter) / 3)


def test_matrices_in_out_behind_tuples() -> None:
    """Rows of q, k, v are columns of what is stored; folded equals unfolded."""
    torch.manual_seed(0)
    model, x = Tuples().double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    weights = {s.path: s.states["w"].weight for s in peftc.sites(model, sample={"x": x}).sites if "w" in s.states}
    query, out = weights["encoder.layer[1].attn.self.q"], weights["encoder.layer[1].attn.self.o"]
    assert query.transposed
    assert out.transposed
    assert (query.rows.start, query.rows.stop) == (0, D)
    with torch.no_grad():
        base = model(x)
        peftc.compile(LORA, model, seed=0, sample={"x": x})
        assert torch.equal(model(x), base)
        draw(model)
        edited = model(x)
        peftc.fold(model)
    assert not torch.allclose(edited, base)
    torch.testing.assert_close(model(x), edited, rtol=1e-10, atol=1e-10)


class Apart(nn.Module):
    """Features with positions are apart: the scores are a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv, self.out = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (H, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (H, -1)).transpose(1, 2), self.kv(y).unflatten(-1, (H, -1)).transpose(1, 2)
        scores = q[..., :5] @ k[..., :5].mT + q[..., 5:] @ k[..., 5:].cos().mT
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Square(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed, self.weight = is_transposed, nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.is_transposed else self.weight.t())


def test_code_of_modules_is_traced_once_where_they_have_equal_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[nn.Module] = []
    trace = module_features.approximate_trace

    def counting(module: nn.Module, *args: Any) -> Any:
        traces.append(module)
        return trace(module, *args)

    monkeypatch.setattr(module_features, "approximate_trace", counting)
    model = nn.Sequential(*(Square(i % 2 == 0) for i in range(6)))
    table = peftc.sites(model, sample={"input": torch.randn(1, T, D)})
    assert [m.transposed for m in table.modules if m.parameters] == [True, False] * 3
    assert len(traces) == 2


def test_queries_of_all_products_in_the_scores() -> None:
    table = peftc.sites(Layers(Apart(), Apart()), sample={"x": torch.randn(2, T, D)})
    (query,) = (s for s in table.sites if s.path == "encoder.layer[0].attn.self.q")
    assert query.states["w"].weight.rows is None


class Recurrence(nn.Module):
    """y_t = a y_{t-1} + x_t, written into a tensor, times a gate: no feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.x, self.y, self.out = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        x, gate = self.x(self.norm(h)), F.gelu(self.y(self.norm(h)))
        states, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            states[:, t] = 0.9 * state + x[:, t]
            state = states[:, t].clone()
        return h + self.out(states * gate)


class Sampling(nn.Module):
    """Values at places that are computed: deformable attention has no keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.at, self.v, self.out = nn.LayerNorm(D), nn.Linear(D, 2), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        image = self.v(y).transpose(1, 2).unflatten(-1, (2, -1))
        sampled = F.grid_sample(image, self.at(y).tanh().unsqueeze(1), align_corners=False)
        return x + self.out(F.relu(sampled.squeeze(2).transpose(1, 2)))


@pytest.mark.parametrize("layer", [Recurrence, Sampling])
def test_mixers_are_no_feed_forward_networks(layer: Callable[[], nn.Module]) -> None:
    table = peftc.sites(Layers(layer(), layer()), sample={"x": torch.randn(2, T, D)})
    paths = [site.path for site in table.sites]
    assert "encoder.layer[1].mixer" in paths
    assert not any("ffn" in path or "attn" in path for path in paths)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self._modules.values()
        for child in self.children():
            x = child(x)
        for _, child in self.named_children():
            x = child(x)
        return second(first(x))


class InList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for child in self:
            x = child(x)
        for child in self[-1:]:
            x = child(x)
        return self[-1](x)


class InProperty(nn.Sequential):
    @property
    def members(self) -> list[nn.Module]:
        return list(self._modules.values())

    def forward(self, x: Tensor) -> Tensor:
        for child in (*self.members, *self[:1]):
            x = child(x)
        self._modules["other"] = self._modules.pop("other", nn.Identity())  # reaches the module
        return self.other(x)


class InDict(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.items():
            x = self[name](child(x))
        return x


def test_modules_that_list_their_children_do_not_see_edits() -> None:
    torch.manual_seed(0)
    own = InProperty(nn.Linear(D, D))
    model = nn.Sequential(ByName(), InList([nn.Linear(D, D)]), InDict({"a": nn.Linear(D, D)}), own)
    x = torch.randn(2, 3, D)
    base = model(x)
    spec = 'peft 1  edit e at "0" | "1" | "2" | "3" { h += adapter(h, r=2, init=lora) }'
    peftc.compile(spec, model, seed=0, sample={"input": x})
    assert torch.equal(model(x), base)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), base)
    names = [name for name, _ in model.named_modules()]
    assert {"0.peftc", "1.peftc", "2.peftc", "3.peftc"} <= {*names}
    assert len(peftc.parameters(model)) == 16
    assert isinstance(own.other, nn.Identity)
    assert all(p.dtype == torch.float64 for p in model.double().parameters())


class DropSamples(nn.Module):
    """Some samples of a batch skip a layer in training: `int(b * ratio)` of them do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.down(F.relu(self.up(self.norm(x))))
        count = max(int(x.shape[0] * 0.7), 1)
        rows = torch.arange(x.shape[0], device=x.device)[:count]
        added = self.down(F.relu(self.up(self.norm(x[rows]))))
        return torch.index_add(x, 0, rows, added, alpha=x.shape[0] / count)


def test_whole_numbers_of_sizes_are_conditions() -> None:
    model = Layers(DropSamples(), DropSamples()).train()
    x = torch.randn(4, T, D)
    base = copy.deepcopy(model)
    spec = "peft 1  edit e at layer[*].ffn { h += adapter(x, r=2, init=lora) }"
    peftc.compile(spec, model, seed=0, sample={"x": x})
    for count in (1, 3, 4, 6, 9):  # 1, 2, 2, 4 and 6 samples are computed
        batch = torch.randn(count, T, D)
        assert torch.equal(model(batch), base(batch))


class Headwise(nn.Module):
    """One Linear; its features become queries, keys and values by matrices of each few features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.out = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(4, 4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).unflatten(-1, (4, -1))
        q, k, v = (torch.einsum("bthd,hod->btho", y, w).flatten(2) for w in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


def test_rows_that_weights_behind_them_tell_apart_have_no_role() -> None:
    table = peftc.sites(Layers(Headwise(), Headwise()), sample={"x": torch.randn(2, T, D)})
    assert not any(site.path.endswith((".q", ".k", ".v")) for site in table.sites)
    parts = {(part.module, part.roles) for part in table.unplaced}
    roles = frozenset({"attn.q", "attn.k", "attn.v"})
    assert parts == {(f"layers.{i}.{name}", roles) for i in range(2) for name in ("up", "q", "k", "v")}
