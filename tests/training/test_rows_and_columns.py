"""`lines`: whole rows and columns selected from data: the selection, their biases, that nothing
else changes, files, tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.installation.contents import states
from tests import zoo
from tests.laws.harness import close

LR = 1e-2
FAR = (
    "peft 1\nedit m at layer[*].ffn.up | layer[*].ffn.down {{ w += lines(density=0.1{0})  b += lines(density=0.1{0}) }}"
)
TRANSPOSED = ("gpt2",)


def batches(name: str, model: nn.Module) -> list[dict[str, Tensor]]:
    return [zoo.inputs(name, model, labels=True, seed=seed) for seed in (1, 2)]


def linears(name: str) -> dict[str, str]:
    """The Linears of the ffn at each site."""
    result = peftc.sites(zoo.build(name)).sites
    return {site.path: site.module for site in result if site.path.endswith((".ffn.up", ".ffn.down"))}


def compiled(name: str, text: str, **how: Any) -> Any:
    return peftc.compile(text, zoo.build(name, torch.float64), seed=0, **how)


def primed(name: str, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The change of every ffn weight after one pass of AdamW, (out, in)."""
    base: Any = zoo.build(name, torch.float64).train()
    names = [f"{module}.{part}" for module in linears(name).values() for part in ("weight", "bias")]
    before = {n: base.get_parameter(n).detach().clone() for n in names}
    optimizer = torch.optim.AdamW([base.get_parameter(n) for n in names], lr=LR, weight_decay=0.0)
    for batch in data:
        base.zero_grad()
        base(**batch).loss.backward()
        optimizer.step()
    changes = {n: base.get_parameter(n).detach() - before[n] for n in names}
    return {n: c.t() if name in TRANSPOSED and c.ndim == 2 else c for n, c in changes.items()}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_rows_are_those_that_change_most_and_biases_follow(name: str) -> None:
    model = compiled(name, FAR.format(""))
    data = batches(name, model)
    counts = peftc.calibrate(model, data, lr=LR)
    changes, places = primed(name, data), states(model)
    for path, module in linears(name).items():
        norms = changes[f"{module}.weight"].abs().sum(1)
        count = round(0.1 * len(norms))
        want = norms.topk(count)[1].sort()[0].tolist()
        assert places[f"m/{path}/lines.places"].tolist() == want
        assert places[f"m/{path}/lines_2.places"].tolist() == want
    assert counts == {"m": sum(len(p) for p in places.values())}
    plan = peftc.plan(FAR.format(""), zoo.build(name))
    trained = sum(p.numel() for p in peftc.parameters(model).values())
    assert plan.totals.trained == plan.totals.stored == trained


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_only_selected_rows_are_trained_and_folded(name: str, tmp_path: Path) -> None:
    model, base = compiled(name, FAR.format("")), zoo.build(name, torch.float64)
    arguments = batches(name, model)[0]
    plain = base.eval()(**arguments).logits
    assert torch.equal(model.eval()(**arguments).logits, plain)
    with pytest.raises(peftc.PeftcError, match="P540"):
        model.train()(**arguments)
    with pytest.raises(peftc.PeftcError, match=r"P540[^$]*`m` has its initial values"):
        peftc.save(model, tmp_path / "a")
    peftc.calibrate(model, batches(name, model), lr=LR)
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(**arguments).loss.backward()
        optimizer.step()
    model.eval()
    assert all(bool((values != 0).any()) for values in peftc.parameters(model).values())
    want = model(**arguments).logits
    assert not torch.allclose(want, plain)
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build(name, torch.float64)).eval()
    assert torch.equal(loaded(**arguments).logits, want)
    loaded.train()(**arguments)
    twin = compiled(name, FAR.format("")).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(**arguments).logits, want)
    peftc.fold(model)
    close(model(**arguments).logits, want, "folded")
    places = states(loaded)
    for path, module in linears(name).items():
        for part, form in (("weight", "lines"), ("bias", "lines_2")):
            delta = model.get_parameter(f"{module}.{part}") != base.get_parameter(f"{module}.{part}")
            delta = (delta.t() if name in TRANSPOSED and part == "weight" else delta).reshape(len(delta.view(-1)), -1)
            if part == "weight":
                size = base.get_parameter(f"{module}.weight").shape
                delta = delta.view(size[::-1] if name in TRANSPOSED else size)
            assert delta.any(1).nonzero()[:, 0].tolist() == places[f"m/{path}/{form}.places"].tolist()


def test_columns_have_scores_of_their_own() -> None:
    text = "peft 1\nedit m at layer[*].ffn.down { w += lines(density=0.1, by=column, select=magnitude) }"
    model, base = compiled("llama", text), zoo.build("llama", torch.float64)
    peftc.calibrate(model)
    for path, module in linears("llama").items():
        if path.endswith("down"):
            norms = base.get_parameter(f"{module}.weight").abs().sum(0)
            want = norms.topk(round(0.1 * len(norms)))[1].sort()[0].tolist()
            assert states(model)[f"m/{path}/lines.places"].tolist() == want


def test_random_rows_apply_to_the_bias_and_differ_between_sites() -> None:
    places = states(compiled("bert", FAR.format(", select=random")))
    assert all(torch.equal(places[k], places[k.replace("lines.", "lines_2.")]) for k in places if "lines." in k)
    assert len({tuple(p.tolist()) for p in places.values()}) > 1
    for others in (FAR.format(", select=random"), FAR.format(", select=random, seed=1")):
        again = states(peftc.compile(others, zoo.build("bert"), seed=9))
        same = all(torch.equal(places[k], again[k]) for k in places)
        assert same == ("seed" not in others)


def test_each_task_selects_its_own_rows() -> None:
    text = FAR.format(", select=fisher").replace(" {", " per task {", 1)
    model = compiled("bert", text, tasks=("a", "b"))
    one, two = batches("bert", model)
    with peftc.task(model, "a"):
        peftc.calibrate(model, [one])
        model.train()(**one)
    with pytest.raises(peftc.PeftcError, match="P540"), peftc.task(model, "b"):
        model(**two)
    with peftc.task(model, "b"):
        peftc.calibrate(model, [two])
    places = states(model)
    assert any(not torch.equal(p, places[k.replace(".tasks.a.", ".tasks.b.")]) for k, p in places.items() if ".a." in k)
    assert all(int(p.min()) >= 0 for p in places.values())
