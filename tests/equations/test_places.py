"""Entries at places that are chosen once, permutations of butterflies, wavelets, normal noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.waveft.waverec2d import WaveletDetailTuple2d, waverec2d
from torch import Tensor
from torch.nn import functional as F

import peftc
from peftc.equation_code.transforms import shuffle, wavelet
from peftc.equations.transforms.filters import WAVELETS
from tests import zoo

FORM = """form shared_entries(x, n) {
    param theta[n] per edit = normal
    fixed places[d(x) * d(out)] = choice(n)
    f = reshape(gather(theta, places), d(out), d(x)) @ x
}"""
SPEC = f"peft 2\n{FORM}\nedit e at layer[*].attn.q | layer[*].ffn.up {{ h += shared_entries(x, n=70) }}"


def compiled(seed: int = 0) -> Any:
    return peftc.compile(SPEC.replace("n=70", f"n=70, seed={seed}"), zoo.build("llama", torch.float64), seed=0).eval()


def places_of(model: Any) -> list[Tensor]:
    return [module.places for module in model.modules() if "places" in getattr(module, "_buffers", ())]


def reference(theta: Tensor, places: list[Tensor]) -> Any:
    """A model whose Linears change by these entries."""
    base: Any = zoo.build("llama", torch.float64).eval()
    linears = [one for layer in base.model.layers for one in (layer.self_attn.q_proj, layer.mlp.up_proj)]
    own = {len(p): [q for q in places if len(q) == len(p)] for p in places}
    with torch.no_grad():
        for linear in linears:
            linear.weight += theta[own[linear.weight.numel()].pop(0)].view_as(linear.weight)
    return base


def test_places_are_chosen_evenly_kept_by_a_file_and_fold(tmp_path: Path) -> None:
    model = compiled()
    places = [one.clone() for one in places_of(model)]
    assert len(places) == 6
    for one in places:
        counts = one.bincount(minlength=70)
        assert one.dtype == torch.int64
        assert set(counts.tolist()) == {len(one) // 70, len(one) // 70 + 1}
    assert not places[0].equal(next(p for p in places[1:] if len(p) == len(places[0])))
    assert not places[0].equal(places_of(compiled(seed=1))[0])
    ((_, theta),) = peftc.parameters(model).items()
    batch = zoo.inputs("llama", model)
    logits = reference(theta.detach(), places)(**batch).logits
    torch.testing.assert_close(model(**batch).logits, logits, rtol=0, atol=1e-10)
    with torch.no_grad():
        for one in places_of(model):
            one.copy_(one.flip(0))
    peftc.save(model, tmp_path / "adapter")
    loaded = peftc.load(tmp_path / "adapter", zoo.build("llama", torch.float64)).eval()
    assert all(map(torch.equal, places_of(loaded), places_of(model)))
    logits = reference(theta.detach(), [one.flip(0) for one in places])(**batch).logits
    torch.testing.assert_close(loaded(**batch).logits, logits, rtol=0, atol=1e-10)
    peftc.fold(loaded)
    torch.testing.assert_close(loaded(**batch).logits, logits, rtol=0, atol=1e-10)


def test_different_numbers_where_there_are_enough_of_them() -> None:
    form = "form g(n) { param v[n] = 1 fixed o[n] = choice(entries(out)) "
    form += "f = reshape(scatter(v, o, entries(out)), rows(out), cols(out)) }"
    text = f"peft 2\n{form}\nedit e at layer[*].attn.q {{ w += g(n=100) }}"
    model: Any = peftc.compile(text, zoo.build("llama", torch.float64), seed=0)
    base: Any = zoo.build("llama", torch.float64)
    peftc.fold(model)
    for own, other in zip(model.model.layers, base.model.layers, strict=True):
        change = own.self_attn.q_proj.weight - other.self_attn.q_proj.weight
        assert change.abs().gt(0.5).sum() == 100


@pytest.mark.parametrize(("groups", "m", "n"), [(1, 2, 3), (3, 4, 2), (2, 1, 5)])
def test_rows_are_shuffled_and_back(groups: int, m: int, n: int) -> None:
    part = 2
    a = torch.randn(groups * m * n * part, 3)
    b = shuffle(a, groups, m, n)
    for g in range(groups):
        for i in range(m):
            for j in range(n):
                first, second = ((g * m + i) * n + j) * part, ((g * n + j) * m + i) * part
                assert a[first : first + part].equal(b[second : second + part])
    assert shuffle(b, groups, n, m).equal(a)


@pytest.mark.parametrize("name", WAVELETS)
def test_wavelets_are_orthogonal_and_reconstruct(name: str) -> None:
    """As PEFT computes them, of even and of odd sizes."""
    low = torch.tensor(WAVELETS[name], dtype=torch.float64)
    taps = len(low)
    for shift in range(0, taps, 2):
        assert abs(float(low[: taps - shift] @ low[shift:]) - (shift == 0)) < 1e-11
    for rows, columns in ((6, 8), (7, 5), (9, 2)):
        a = torch.randn(rows, columns, dtype=torch.float64)
        sizes = [n + taps - 2 + n % 2 for n in a.shape]
        (top, left) = ((size - n) // 2 for size, n in zip(sizes, a.shape, strict=True))
        whole = F.pad(a, (left, sizes[1] - columns - left, top, sizes[0] - rows - top))
        upper, lower = (part.tensor_split(2, 1) for part in whole.tensor_split(2))
        theirs = waverec2d((upper[0], WaveletDetailTuple2d(upper[1], *lower)), name)
        torch.testing.assert_close(wavelet(a, name), theirs[:rows, :columns], rtol=0, atol=1e-12)


def test_noise_acts_while_training_alone() -> None:
    form = "form g(x) { param a[d(x)] = 1 param s[d(x)] = 2 f = a * normal_noise(x, exp(s)) }"
    text = f"peft 2\n{form}\nedit e at layer[0].attn.q {{ h += g(x) }}"
    model: Any = peftc.compile(text, zoo.build("llama", torch.float64), seed=0).eval()
    base: Any = zoo.build("llama", torch.float64).eval()
    (form,) = (module for module in model.modules() if hasattr(module, "s"))
    x = torch.zeros(1000, form.s.shape[0], dtype=torch.float64)
    assert form(x).equal(x)
    form.train()
    torch.manual_seed(0)
    drawn = form(x)
    torch.manual_seed(0)
    assert drawn.equal(torch.randn_like(x) * form.s.exp())
    batch = zoo.inputs("llama", model)
    base.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, inputs, h: h + inputs[0])
    form.eval()
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-10)
    peftc.fold(model)
    torch.testing.assert_close(model(**batch).logits, base(**batch).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("param o[n] = choice(4) param g[4] = 1 f = mean(gather(g, o)) * x", "P105"),
        ("fixed o[2, n] = choice(4) param g[4] = 1 f = mean(gather(g, o)) * x", "P105"),
        ("fixed o[n] = choice param g[4] = 1 f = mean(gather(g, o)) * x", "P105"),
        ("fixed o[n] = choice(4, 5) param g[4] = 1 f = mean(gather(g, o)) * x", "P105"),
        ("fixed o[n] = choice(0) param g[4] = 1 f = mean(gather(g, o)) * x", "P318"),
        ("fixed o[n] = choice(5) param g[4] = 1 f = mean(gather(g, o)) * x", "P318"),
        ("fixed o[5] = choice(4) param g[5] = 1 f = mean(scatter(g, o, 4 * n)) * x", "P318"),
        ("fixed o[5] = choice(9) param g[5] = 1 f = mean(scatter(g, o, 4 * n)) * x", "P318"),
        ("param o[n] = 1 param g[4] = 1 f = mean(gather(g, o)) * x", "P105"),
        ("fixed o[n] = choice(4) f = gather(x, o)", "P301"),
        ("param g[6, 6] = 1 f = mean(shuffle(g, 2, n, 2)) @ x", "P301"),
        ("param g[4, 4] = 1 f = total(wavelet(g, db77)) * n * x", "P107"),
        ("param g[4, 4] = 1 f = total(wavelet(g, 4)) * n * x", "P106"),
        ("param g[4] = 1 f = total(wavelet(g, db2)) * n * x", "P301"),
        ("param g[n] = 1 f = normal_noise(x, g)", "P301"),
        ("param g[power(10, 400) * n] = 1 f = mean(g) * x", "P120"),
    ],
)
def test_refusals(lines: str, code: str) -> None:
    text = f"peft 2\nform g(x, n = 2) {{ {lines} }}\nedit e at layer[0].attn.o {{ h += g(x) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    assert code in [d.code for d in refused.value.diagnostics], refused.value


def test_a_wavelet_is_one_of_the_names() -> None:
    form = "form g(n, family = db2) { param v[rows(out), cols(out)] = 0 f = n * wavelet(v, family) }"
    text = f"peft 2\n{form}\nedit e at layer[0].attn.o {{ w += g(n=1, family=db22) }}"
    with pytest.raises(peftc.PeftcError) as refused:
        peftc.plan(text, zoo.build("llama"))
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "P106"
    assert "db2" in str(diagnostic)
