"""Layers that are no modules: the body of a loop is `layer[i]`, and edits rewrite the module that
has the loop, or the modules that it calls.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.recognition.test_layer_lists import Attention, D, Ffn, Residual

SPEC = """peft 1
edit q at layer[*].attn.q { h += lora(x, r=2) }
edit z at layer[*].ffn.hidden { h *= vector(init=1) }
edit f at layer[*].ffn { h += adapter(x, r=3, init=lora) }
edit a at layer[*].attn { h += adapter(h, r=3, init=lora) }
edit l at layer[*] { h += adapter(h, r=3, init=lora) }
"""
PARAMETERS = 2 + 1 + 4 + 4 + 4  # of one layer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, D), nn.Linear(D, 2)
        self.build()

    def build(self) -> None: ...

    def loop(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.loop(self.embed(x)))


class Nested(Model):
    modules_of_q = ("layers.0.1.q", "layers.1.1.q")

    def build(self) -> None:
        parts = [[nn.LayerNorm(D), Attention(), None, nn.LayerNorm(D), Ffn()] for _ in range(2)]
        self.layers = nn.ModuleList([nn.ModuleList(part) for part in parts])  # pyright: ignore[reportArgumentType]

    def loop(self, x: Tensor) -> Tensor:
        for norm, attn, cross, ffn_norm, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + attn(norm(x))
            x = x if cross is None else cross(x)
            x = ffn(ffn_norm(x)) + x
        return x


class InPlace(Nested):
    def loop(self, x: Tensor) -> Tensor:
        for norm, attn, _, ffn_norm, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x += attn(norm(x))
            x.add_(ffn(ffn_norm(x)))
        return x


class Skips(Nested):
    """The second iteration begins with a new stream: of fewer tokens, joined with earlier ones."""

    modules_of_q = ("layers.0.1.q", "layers.1.1.q")

    def build(self) -> None:
        parts = [[combine, Attention(), Ffn()] for combine in (None, nn.Linear(2 * D, D))]
        self.layers = nn.ModuleList([nn.ModuleList(part) for part in parts])  # pyright: ignore[reportArgumentType]

    def loop(self, x: Tensor) -> Tensor:
        skips = [x]
        for combine, attn, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            if combine is not None:
                x = combine(torch.cat((skips.pop(), x), dim=-1))[:, 1:]
            x = attn(x) + x
            x = ffn(x) + x
        return x


class SideBySide(Model):
    """Post-norm, by indices."""

    modules_of_q = ("attns.0.q", "attns.1.q")

    def build(self) -> None:
        self.attns, self.ffns = (nn.ModuleList([one(), one()]) for one in (Attention, Ffn))
        self.norms, self.others = (nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)]) for _ in range(2))

    def loop(self, x: Tensor) -> Tensor:
        for i in range(len(self.attns)):
            x = self.norms[i](x + self.attns[i](x))
            x = self.others[i](x + self.ffns[i](x))
        return x


class Residuals(Model):
    """The sums are in the sub-layers: modules that would be layers by themselves."""

    modules_of_q = ("attns.0.fn.q", "attns.1.fn.q")

    def build(self) -> None:
        self.attns = nn.ModuleList([Residual(Attention()) for _ in range(2)])
        self.ffns = nn.ModuleList([Residual(Ffn()) for _ in range(2)])

    def loop(self, x: Tensor) -> Tensor:
        for attn, ffn in zip(self.attns, self.ffns, strict=True):
            x = ffn(attn(x))
        return x


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), Ffn()])])

    def forward(self, x: Tensor) -> Tensor:
        for attn, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = ffn(x) + x
        return x


class Pyramid(Model):
    """The stages would be layers with a sub-layer for each module in their loops."""

    modules_of_q = ("stages.0.layers.0.0.q", "stages.1.layers.0.0.q")

    def build(self) -> None:
        self.stages = nn.Sequential(Transformer(), Transformer())

    def loop(self, x: Tensor) -> Tensor:
        return self.stages(x)


class Shifted(Nested):
    """Parts read half of the features of the token before; sums are interpolations."""

    def loop(self, x: Tensor) -> Tensor:
        for norm, attn, _, ffn_norm, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = nn.functional.normalize(x.lerp(attn(norm(shifted(x))), x.new_full((D,), 0.3)), dim=-1)
            x = torch.lerp(x, ffn(ffn_norm(shifted(x))), 0.3)
        return x


class Unlisted(Model):
    """Parts and norms are attributes, and nothing is in a list."""

    modules_of_q = ("attn_1.q", "attn_2.q")

    def build(self) -> None:
        self.norm_1, self.norm_2, self.attn_1, self.attn_2 = nn.LayerNorm(D), nn.LayerNorm(D), Attention(), Attention()
        self.ffn_1, self.ffn_2 = Ffn(), Ffn()

    def loop(self, x: Tensor) -> Tensor:
        x = x + self.attn_1(self.norm_1(x))
        x = x + self.ffn_1(x)
        x = x + self.attn_2(self.norm_2(x))
        return x + self.ffn_2(x)


def shifted(x: Tensor) -> Tensor:
    here, before = x.chunk(2, dim=-1)
    return torch.cat((here, nn.functional.pad(before, (0, 0, 1, -1))), dim=-1)


class Convolving(Attention):
    """A convolution of the values is added to the attention's result: no residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv2d(1, 1, (3, 1), padding=(1, 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unsqueeze(1) for one in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v) + self.along(v)
        return self.o(out.squeeze(1))


class Convolved(Nested):
    """Every other element of the lists looks like a layer."""

    modules_of_q = ("layers.0.0.q", "layers.1.0.q")

    def build(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([Convolving(), Ffn()]) for _ in range(2)])

    def loop(self, x: Tensor) -> Tensor:
        for attn, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = ffn(x) + x
        return x


@dataclass
class Intermediates:
    values: Tensor
    kind: str = ""


class Hiddens(NamedTuple):
    every: list[Tensor]
    records: list[Intermediates]


class Recording(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Intermediates]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), Intermediates(self.v(x))


class Sum(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + (residual() if callable(residual) else residual)


class Collecting(nn.Module):
    """Constructs and returns records, with lists that grow, and sets an attribute of a result."""

    def __init__(self) -> None:
        super().__init__()
        lists = [[nn.LayerNorm(D), one(), Sum()] for _ in range(2) for one in (Recording, Ffn)]
        self.layers = nn.ModuleList([nn.ModuleList(parts) for parts in lists])

    def forward(self, x: Tensor) -> tuple[Tensor, Hiddens]:
        hiddens, records = list[Tensor](), list[Intermediates]()
        for i, (norm, part, residual) in enumerate(self.layers):  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
            hiddens.append(x)
            out = part(norm(x))
            if i % 2 == 0:
                out, record = out
                record.kind = "attention"
                records.append(record)
            x = residual(out, x)
        return x, Hiddens(hiddens, records)


class Records(Model):
    modules_of_q = ("inner.layers.0.1.q", "inner.layers.2.1.q")
    indices = (0, 1, 2, 3)

    def build(self) -> None:
        self.inner = Collecting()

    def loop(self, x: Tensor) -> Tensor:
        x, hiddens = self.inner(x)
        assert [record.kind for record in hiddens.records] == ["attention"] * 2
        return x + 0.1 * hiddens.every[2] + 0.1 * hiddens.records[1].values


@pytest.fixture(
    scope="module",
    params=[Nested, InPlace, SideBySide, Residuals, Pyramid, Records, Skips, Shifted, Convolved, Unlisted],
)
def compiled(request: pytest.FixtureRequest) -> tuple[Model, Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = request.param().double().eval()
    sample = {"x": torch.randn(2, 5, 3, dtype=torch.float64)}
    base = deepcopy(model)
    peftc.compile(SPEC, model, seed=0, sample=sample)
    torch.testing.assert_close(model(**sample), base(**sample), rtol=0, atol=1e-12)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model, base, sample


def test_each_iteration_is_a_layer(compiled: tuple[Model, Model, dict[str, Tensor]]) -> None:
    _, base, sample = compiled
    sites = peftc.sites(base, sample=sample).sites
    assert not [site.path for site in sites if site.module == "embed" and "layer" in site.path]
    roles = [site.path.partition("layer")[2] for site in sites if site.steps[-1][0] in ("q", "up", "down")]
    layers = getattr(base, "indices", (0, 0, 1, 1))  # of attention and ffn, in turn
    parts = (("attn.self.q",), ("ffn.up", "ffn.down")) * 2
    assert roles == [f"[{i}].{role}" for i, part in zip(layers, parts, strict=True) for role in part]
    assert tuple(site.module for site in sites if site.steps[-1][0] == "q") == base.modules_of_q


def test_edits_compute_their_equations(compiled: tuple[Model, Model, dict[str, Tensor]]) -> None:
    model, _, _ = compiled
    layers = len({*getattr(model, "indices", (0, 1))})
    assert len(peftc.parameters(model)) == 2 * PARAMETERS + 4 * (layers - 2)
    report = peftc.verify(model)  # gradients, training and folding included
    assert report.ok, str(report)
    assert report.witnessed == report.sites == 8 + layers


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_edited(
    compiled: tuple[Model, Model, dict[str, Tensor]], copy: Callable[[nn.Module], nn.Module]
) -> None:
    model, base, sample = compiled
    again = copy(model)
    torch.testing.assert_close(again(**sample), model(**sample), rtol=0, atol=0)
    peftc.remove(again)
    assert all(torch.equal(base.state_dict()[name], value) for name, value in again.state_dict().items())
    assert torch.equal(again(**sample), base(**sample))


def test_a_compiled_graph_has_the_edits(compiled: tuple[Model, Model, dict[str, Tensor]]) -> None:
    model, _, sample = compiled
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(model, backend="eager", fullgraph=True)(**sample)
        torch.testing.assert_close(result, model(**sample), rtol=0, atol=1e-12)


class Appending(Ffn):
    def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs.append(super().forward(x))
        return outputs[-1]


class ListOfCaller(Nested):
    """A part appends to a list of the code that calls it."""

    def build(self) -> None:
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), Appending()]) for _ in range(2)])

    def loop(self, x: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for attn, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + attn(x)
            x = x + ffn(x, outputs)
        return x + outputs[0]


def test_a_list_that_a_leaf_changes_is_refused() -> None:
    """Outside of the graph it would stay as the trace has seen it."""
    model, sample = ListOfCaller().eval(), {"x": torch.randn(2, 5, 3)}
    peftc.compile("peft 1  edit a at layer[*] { h += adapter(h, r=3) }", model, sample=sample)
    with pytest.raises(peftc.PeftcError, match="changes a list"):
        model(**sample)


class Branches(Model):
    """Two attentions side by side, then two feed-forward networks."""

    def build(self) -> None:
        lists = [[nn.ModuleList([one(), one()]) for one in (Attention, Ffn)] for _ in range(2)]
        self.layers = nn.ModuleList([nn.ModuleList(parts) for parts in lists])

    def loop(self, x: Tensor) -> Tensor:
        for attns, ffns in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = sum(attn(x) for attn in attns) + x
            x = sum(ffn(x) for ffn in ffns) + x
        return x


class TwoStreams(nn.Module):
    """Each of two streams attends to the other: the loop's body has a sub-layer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Crossed(), Crossed()])])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for one, other in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = one(x, y) + x
            y = other(y, x) + y
        return x, y


class Crossed(Attention):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.o((self.q(x) @ self.k(y).transpose(1, 2)).softmax(-1) @ self.v(y))


class Exchanges(Model):
    def build(self) -> None:
        self.stages = nn.ModuleList([TwoStreams(), TwoStreams()])

    def loop(self, x: Tensor) -> Tensor:
        first, second = x[:, :2].sin(), x[:, 2:].sin()
        for stage in self.stages:
            first, second = stage(first, second)
        return torch.cat((first, second), dim=1)


class InTurn(Model):
    """Two loops in one forward, the second over lists of another kind."""

    def build(self) -> None:
        self.first = nn.ModuleList([nn.ModuleList([Attention(), Ffn()]) for _ in range(2)])
        self.second = nn.ModuleList([nn.ModuleList([Crossed(), Ffn()]) for _ in range(2)])

    def loop(self, x: Tensor) -> Tensor:
        prefix, x = x[:, :2], x[:, 2:]
        for attn, ffn in self.second:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x, torch.cat((prefix, x), 1)) + x
            x = ffn(x) + x
        for attn, ffn in self.first:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = ffn(x) + x
        return x


@pytest.mark.parametrize(
    ("build", "roles"),
    [
        (Branches, {"q": 4, "o": 4, "up": 4, "down": 4}),
        (Exchanges, {"q": 4, "o": 4}),
        (InTurn, {"q": 4, "o": 4, "up": 4, "down": 4}),
    ],
    ids=["branches", "exchanges", "in turn"],
)
def test_every_stream_and_branch_has_its_sub_layers(build: Callable[[], Model], roles: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, sample = build().double().eval(), {"x": torch.randn(2, 5, 3, dtype=torch.float64)}
    counts = Counter(site.steps[-1][0] for site in peftc.sites(model, sample=sample).sites)
    assert {role: counts[role] for role in ("q", "o", "up", "down") if counts[role]} == roles
    peftc.compile("peft 1  edit a at layer[*].attn { h += adapter(h, r=2) }", model, seed=0, sample=sample)
    report = peftc.verify(model)
    assert report.ok, str(report)
    assert report.sites == 4


class Repeated(Nested):
    def loop(self, x: Tensor) -> Tensor:
        return super().loop(super().loop(x))


class OneAttention(SideBySide):
    def build(self) -> None:
        super().build()
        self.attns[1] = self.attns[0]


@pytest.mark.parametrize("build", [Repeated, OneAttention])
def test_modules_that_a_loop_calls_again_after_others_are_refused(build: Callable[[], Model]) -> None:
    """A layer is one part of the code: between two parts are the states of other layers."""
    sample = {"x": torch.randn(2, 5, 3)}
    with pytest.raises(peftc.PeftcError, match=r"several times") as error:
        peftc.compile(SPEC, build().eval(), sample=sample)
    assert {d.code for d in error.value.diagnostics} == {"P214"}


class NormOfSum(nn.Module):
    """SAINT: `fn(norm(x)) + norm(x)`, so that the stream is a norm of the sum before."""

    def __init__(self) -> None:
        super().__init__()
        parts = ([nn.LayerNorm(D), Attention(), nn.LayerNorm(D), Ffn()] for _ in range(3))
        self.layers = nn.ModuleList(map(nn.ModuleList, parts))

    def forward(self, x: Tensor) -> Tensor:
        for norm, attn, ffn_norm, ffn in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = norm(x)
            x = ffn_norm(attn(x) + x)
            x = ffn(x) + x
        return x


def test_norms_of_sums_before_an_iteration_have_sites_in_it() -> None:
    sites = peftc.sites(NormOfSum(), sample={"x": torch.randn(2, 5, D)}).sites
    for i in range(3):
        norms = {s.module for s in sites if f"layer[{i}]." in s.path and "norm" in s.steps[-1][0]}
        assert norms == {f"layers.{i}.0", f"layers.{i}.2"}
