"""In-place operations of the model: an edit acts after the write, or reads the value before it, as
its site requires.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import peftc

D, HIDDEN = 8, 12

LAYER = """
class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, z, extra=None, wide=None):
        {x}
        z2 = self.up(z)
        {late}
        hidden = functional.silu(z2)
        {hidden}
        y = self.down(hidden)
        {h}
        return y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.ff = FeedForward()

    def forward(self, x, extra=None, wide=None):
        batch, tokens, _ = x.shape
        z = self.n1(x)
        q, k, v = (m(z).view(batch, tokens, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, D)
        y = self.o(mixed)
        {attn}
        x = x + y
        {res}
        y = self.ff(self.n2(x), extra, wide)
        return x + y
"""


def scale_(t: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
    if by is not None:
        t.mul_(by)
    return t


def scale_deep_(t: torch.Tensor, by: torch.Tensor | None) -> None:
    scale_(t, by)


def scaled(t: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
    if by is None:
        return t
    return t * by


WHEN = "if {e} is not None:\n            "
CHANGES = {  # an operation on `t` and `e`, and whether it changes all features
    "method": (WHEN + "{t}.mul_({e})", True),
    "operator": (WHEN + "{t} *= {e}", True),
    "alias": (WHEN + "other = {t}; other *= {e}", True),
    "out": (WHEN + "torch.mul({t}, {e}, out={t})", True),
    "item": (WHEN + "{t}[..., :4] = {t}[..., :4] * {e}[..., :4]", False),
    "part": (WHEN + "{t}[..., :4].mul_({e}[..., :4])", False),
    "view": (WHEN + "{t}.view(-1, {t}.shape[-1]).mul_({e}.flatten(0, 1))", True),
    "function": ("scale_({t}, {e})", True),
    "functions": ("scale_deep_({t}, {e})", True),
    "returned": ("{t} = scale_({t}, {e})", True),
    "apart": ("{t} = scaled({t}, {e})", True),
}
# Place: the tensor that is changed there.
PLACES = {"x": "z", "late": "z", "hidden": "hidden", "h": "y", "attn": "y", "res": "x"}


class Model(nn.Module):
    def __init__(self, change: str, place: str) -> None:
        super().__init__()
        text, _ = CHANGES[change]
        lines = dict.fromkeys(PLACES, "pass")
        lines[place] = text.format(t=PLACES[place], e="wide" if place == "hidden" else "extra")
        names: dict[str, Any] = {"nn": nn, "torch": torch, "functional": functional, "D": D, "HIDDEN": HIDDEN}
        names |= {f.__name__: f for f in (scale_, scale_deep_, scaled)} | {"__name__": __name__}
        exec(LAYER.format(**lines), names)
        self.layers = nn.ModuleList(names["Layer"]() for _ in range(2))

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, wide: torch.Tensor | None = None
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, extra, wide)
        return x


def by_hand(
    model: Any, inputs: dict[str, torch.Tensor], change: str, place: str, site: str, edit: str, weights: dict[str, Any]
) -> torch.Tensor:
    """The edited model, written without in-place operations."""
    x, (_, whole) = inputs["x"], CHANGES[change]

    def run(layer: Any, i: int, x: torch.Tensor) -> torch.Tensor:
        down, up, first, last = (weights[n] for n in weights if f"layer[{i}]" in n)
        states: dict[str, torch.Tensor] = {}

        def then(at: str, value: torch.Tensor) -> torch.Tensor:
            by = inputs.get("wide" if at == "hidden" else "extra")
            if at != place or by is None:
                return value
            return value * by if whole else torch.cat([value[..., :4] * by[..., :4], value[..., 4:]], -1)

        def edit_at(at: str, value: torch.Tensor) -> torch.Tensor:
            """The edited value at a site."""
            states["h"] = value
            if at != site:
                return value
            name = edit[edit.index("(") + 1 :].partition(",")[0]
            return value + functional.linear(torch.tanh(functional.linear(states[name], down, first)), up, last)

        def linear(at: str, module: nn.Module, value: torch.Tensor) -> torch.Tensor:
            if at == site:
                states["x"] = value
            return edit_at(at, module(value))

        stream = x
        batch, tokens, _ = x.shape
        z = layer.n1(x)
        states["x"] = z if site == "attn" else x
        q, k, v = (
            linear(f"attn.{n}", getattr(layer, n), z).view(batch, tokens, 2, 4).transpose(1, 2) for n in ("q", "k", "v")
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, D)
        y = edit_at("attn", then("attn", linear("attn.o", layer.o, mixed)))
        x = then("res", x + y)
        z = then("x", layer.n2(x))
        if site == "ffn":
            states |= {"x": z, "res": x}
        hidden = edit_at("ffn.hidden", then("hidden", functional.silu(linear("ffn.up", layer.ff.up, z))))
        y = edit_at("ffn", then("h", linear("ffn.down", layer.ff.down, hidden)))
        if site == "":
            states["x"] = stream
        return edit_at("", x + y)

    for i, layer in enumerate(model.layers):
        x = run(layer, i, x)
    return x


def values(*names: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    values_by_name = {
        n: torch.randn(2, 5, d, dtype=torch.float64, generator=draw)
        for n, d in (("x", D), ("extra", D), ("wide", HIDDEN))
    }
    return {name: values_by_name[name] for name in ("x", *names)}


def deviation(change: str, place: str, site: str, edit: str, sample: tuple[str, ...]) -> float:
    torch.manual_seed(0)
    model: Any = Model(change, place).double()
    where = "layer[*]" + f".{site}" * bool(site)
    peftc.compile(f"peft 1\nedit e at {where} {{ {edit} }}", model, 0, sample=values(*sample))
    weights = peftc.parameters(model)
    draw = torch.Generator().manual_seed(2)
    for value in weights.values():
        value.data = torch.randn(value.shape, dtype=value.dtype, generator=draw)
    worst = 0.0
    for names in ((), ("extra", "wide")):
        inputs = values(*names)
        with torch.set_grad_enabled(change != "out"):  # torch differentiates no operation with `out`
            got, want = model(**inputs), by_hand(model, inputs, change, place, site, edit, weights)
        worst = max(worst, float((got - want).detach().abs().max()))
        if change == "out":
            continue
        slopes = [torch.autograd.grad(out.square().sum(), list(weights.values())) for out in (got, want)]
        worst = max(
            worst, *(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(*slopes, strict=True))
        )
    return worst


SAMPLES = ((), ("extra", "wide"))
ADAPTER = "h += adapter({}, r=2, act=tanh)"
# (place, site, the adapter's input): after a write, and before one
CLOSE = (("h", "ffn", "h"), ("late", "ffn", "x"))
OTHERS = (
    ("x", "ffn", "x"),
    ("x", "ffn.up", "x"),
    ("hidden", "ffn.hidden", "h"),
    ("h", "ffn.down", "h"),
    ("h", "ffn", "x"),
    ("attn", "attn.o", "x"),
    ("res", "ffn", "res"),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=["without", "with"])
@pytest.mark.parametrize(("place", "site", "reads"), CLOSE)
@pytest.mark.parametrize("change", CHANGES)
def test_an_edit_acts_at_its_site(change: str, place: str, site: str, reads: str, sample: tuple[str, ...]) -> None:
    """Whichever of the two calls was traced, outputs and gradients of both equal the hand-written
    model.
    """
    assert deviation(change, place, site, ADAPTER.format(reads), sample) < 1e-9


@pytest.mark.parametrize("sample", SAMPLES, ids=["without", "with"])
@pytest.mark.parametrize(("place", "site", "reads"), OTHERS)
def test_other_sites_and_places(place: str, site: str, reads: str, sample: tuple[str, ...]) -> None:
    change = "view" if place == "res" else "method"
    assert deviation(change, place, site, ADAPTER.format(reads), sample) < 1e-9


def test_a_state_with_two_values_is_refused() -> None:
    """The output of `o` and the value added are one tensor without the argument, and
    two with it.
    """
    assert deviation("method", "attn", "attn", ADAPTER.format("h"), ("extra", "wide")) < 1e-9
    with pytest.raises(peftc.PeftcError, match="P403"):
        deviation("method", "attn", "attn", ADAPTER.format("h"), ())


class OwnInput(nn.Module):
    """Writes its result into its argument, and returns that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, D)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        hidden = self.up(z)
        self.act(hidden)
        z.copy_(self.down(hidden))
        return z


class Caller(nn.Module):
    """Continues with the argument it passed to a module, or with the module's result."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.norm, self.ff, self.returned = nn.LayerNorm(D), OwnInput(), returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(x)
        y = self.ff(z)
        return x + (y if self.returned else z)


class Callers(nn.Module):
    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caller(returned) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(("site", "reads"), [("ffn", "h"), ("ffn", "x"), ("ffn.hidden", "h")])
def test_a_module_that_writes_into_its_argument(site: str, reads: str, returned: bool, inference: bool) -> None:
    torch.manual_seed(0)
    model: Any = Callers(returned).double()
    x = values()["x"]
    with torch.inference_mode(inference):
        spec = f"peft 1\nedit e at layer[*].{site} {{ {ADAPTER.format(reads)} }}"
        peftc.compile(spec, model, 0, sample={"x": x})
        weights = peftc.parameters(model)
        for name, value in weights.items():
            value.data = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(len(name)))
        want = x
        for i, layer in enumerate(model.layers):
            down, up, first, last = (weights[n] for n in weights if f"layer[{i}]" in n)

            def adapted(
                state: torch.Tensor, down: Any = down, up: Any = up, first: Any = first, last: Any = last
            ) -> Any:
                return functional.linear(torch.tanh(functional.linear(state, down, first)), up, last)

            z = functional.layer_norm(want, (D,), layer.norm.weight, layer.norm.bias)
            hidden = torch.relu(functional.linear(z, layer.ff.up.weight, layer.ff.up.bias))
            if site == "ffn.hidden":
                hidden = hidden + adapted(hidden)
            y = functional.linear(hidden, layer.ff.down.weight, layer.ff.down.bias)
            if site == "ffn":
                y = y + adapted(y if reads == "h" else z)
            want = want + y
        with torch.no_grad():
            assert (model(x) - want).abs().max() < 1e-9
