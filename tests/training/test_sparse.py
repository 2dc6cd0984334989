"""`sparse`: entries selected from data: the selection, that nothing else changes, that `remove`
restores, files.
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
from tests.laws.harness import Before, close

SITES = {
    "llama": "layer[*].attn.q | layer[*].ffn.down",
    "gpt2": "layer[*].attn.v | layer[*].ffn.up",  # rows of a fused Conv1D, which is stored transposed
    "bart": "layer[*].attn.k",
}


def spec(name: str, select: str, density: float = 0.02) -> str:
    return f"peft 1\nedit m at {SITES[name]} {{ w += sparse(density={density}, select={select}) }}"


def batches(name: str, model: nn.Module) -> list[dict[str, Tensor]]:
    return [zoo.inputs(name, model, labels=True, seed=seed) for seed in (1, 2)]


def compiled(name: str, select: str) -> Any:
    return peftc.compile(spec(name, select), zoo.build(name, torch.float64), seed=0)


def views(name: str, model: nn.Module, of: dict[str, Tensor]) -> list[Tensor]:
    """Slices of the parameters with the size of each site's weight."""
    result: list[Tensor] = []
    fused = {"q": 0, "k": 1, "v": 2}
    arms = [arm.rpartition(".")[2] for arm in SITES[name].split(" | ")]
    for site in peftc.sites(zoo.build(name)).sites:
        if site.path.rpartition(".")[2] in arms and "layer[" in site.path:
            tensor = of[f"{site.module}.weight"]
            if name == "gpt2":
                tensor = tensor.t()
                role = site.path.rpartition(".")[2]
                tensor = tensor.chunk(3)[fused[role]] if role in fused else tensor
            result.append(tensor)
    return result


def expected(name: str, select: str) -> tuple[Tensor, list[tuple[int, ...]]]:
    """The scores of all entries by hand, site by site, and the sizes of the sites."""
    base = zoo.build(name, torch.float64).eval()
    scores = {n: torch.zeros_like(p) for n, p in base.named_parameters()}
    if select == "magnitude":
        scores = {n: p.detach().abs() for n, p in base.named_parameters()}
    elif select == "fisher":
        for batch in batches(name, base):
            base.zero_grad()
            base(**batch).loss.backward()
            for n, p in base.named_parameters():
                scores[n] += p.grad.square() if p.grad is not None else 0.0
    result = views(name, base, scores)
    return torch.cat([v.reshape(-1) for v in result]), [tuple(v.shape) for v in result]


@pytest.mark.parametrize("select", ["fisher", "magnitude"])
@pytest.mark.parametrize("name", SITES)
def test_entries_with_the_largest_scores_are_selected(name: str, select: str) -> None:
    model = compiled(name, select)
    before = Before.of(model)
    counts = peftc.calibrate(model, batches(name, model))
    scores, _ = expected(name, select)
    count = round(0.02 * len(scores))
    assert counts == {"m": count}
    ((_, places),) = states(model).items()
    assert set(places.tolist()) == set(scores.topk(count)[1].tolist())
    assert peftc.plan(spec(name, select), zoo.build(name)).totals.trained == count
    assert {k: p.requires_grad for k, p in model.named_parameters()} == before.requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_only_selected_entries_are_trained_and_folded(name: str, tmp_path: Path) -> None:
    model, base = compiled(name, "fisher"), zoo.build(name, torch.float64)
    arguments = batches(name, model)[0]
    plain = base.eval()(**arguments).logits
    peftc.calibrate(model, batches(name, model))
    assert torch.equal(model.eval()(**arguments).logits, plain)
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(**arguments).loss.backward()
        optimizer.step()
    model.eval()
    ((_, values),) = peftc.parameters(model).items()
    assert bool((values != 0).all())
    want = model(**arguments).logits
    assert not torch.allclose(want, plain)
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build(name, torch.float64)).eval()
    assert torch.equal(loaded(**arguments).logits, want)
    twin = peftc.compile(spec(name, "fisher"), zoo.build(name, torch.float64), seed=5).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(**arguments).logits, want)
    peftc.fold(model)
    close(model(**arguments).logits, want, "folded")
    ((_, places),) = states(loaded).items()
    new, old = (views(name, m, dict(m.named_parameters())) for m in (model, base))
    differing = torch.cat([(a != b).reshape(-1) for a, b in zip(new, old, strict=True)])
    assert differing.nonzero()[:, 0].tolist() == places.tolist()


def test_the_first_fine_tuning_is_undone() -> None:
    model = compiled("llama", "change")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    peftc.calibrate(model, batches("llama", model), lr=1e-2)
    differing = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert [k.rpartition(".")[2] for k in differing] == ["places"]
    assert model.training
    ((_, first),) = states(model).items()
    other = compiled("llama", "fisher")
    peftc.calibrate(other, batches("llama", other))
    ((_, second),) = states(other).items()
    assert set(first.tolist()) != set(second.tolist())


def test_random_entries_come_from_the_seed_of_the_text() -> None:
    result = [
        next(iter(states(peftc.compile(text, zoo.build("llama"), seed=seed)).values())).tolist()
        for text, seed in (
            (spec("llama", "random"), 0),
            (spec("llama", "random"), 1),
            (spec("llama", "random, seed=4"), 0),
        )
    ]
    assert result[0] == result[1] != result[2]
    assert len(set(result[0])) == len(result[0])


def test_refusals() -> None:
    model = compiled("llama", "fisher")
    arguments = batches("llama", model)[0]
    model.eval()(**arguments)
    with pytest.raises(peftc.PeftcError, match="P540"):
        model.train()(**arguments)
    for data in ((), [{"input_ids": arguments["input_ids"]}]):
        with pytest.raises(peftc.PeftcError, match="P541"):
            peftc.calibrate(model, data)
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(model, [arguments], loss=lambda model, batch: model(**batch).logits.sum() * 0.0)
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(compiled("llama", "random"), [arguments])
    with pytest.raises(peftc.PeftcError, match="P310"):
        peftc.compile("peft 1\nedit m at layer[*].ffn { h += sparse(density=0.1) }", zoo.build("llama"))


def test_a_zero_factor_and_a_non_finite_loss_are_different_errors() -> None:
    model = peftc.compile("peft 1\nedit m at layer[*].attn.q { w *= sparse(density=0.1) }", zoo.build("llama"))
    data = batches("llama", model)
    with pytest.raises(peftc.PeftcError, match=r"P541[^$]*all scores are zero[^$]*write `w \+= …`"):
        peftc.calibrate(model, data)
    with pytest.raises(peftc.PeftcError, match=r"P541[^$]*scores are NaN or infinite"):
        peftc.calibrate(compiled("llama", "fisher"), data, loss=lambda model, batch: model(**batch).loss * torch.inf)


def test_each_task_selects_its_own_entries(tmp_path: Path) -> None:
    text = spec("llama", "fisher").replace(" {", " per task {", 1)
    model = peftc.compile(text, zoo.build("llama", torch.float64), tasks=("a", "b"))
    one, two = batches("llama", model)
    with pytest.raises(peftc.PeftcError, match=r"P533[^$]*peftc.task\(model, \"a\"\)"):
        peftc.calibrate(model, [one])
    with pytest.raises(peftc.PeftcError, match="P540"):
        peftc.save(model, tmp_path)
    for task, batch in (("a", one), ("b", two)):
        with peftc.task(model, task):
            peftc.calibrate(model, [batch])
        peftc.save(model, tmp_path)  # one task after the other
    first, second = (set(places.tolist()) for places in states(model).values())
    assert first != second
    assert -1 not in first | second


def test_calibration_under_no_grad() -> None:
    model, second = compiled("llama", "fisher"), compiled("llama", "fisher")
    with torch.no_grad():
        peftc.calibrate(model, batches("llama", model))
    peftc.calibrate(second, batches("llama", second))
    for key, value in second.named_buffers():
        assert torch.equal(model.get_buffer(key), value)


def test_a_loss_without_a_gradient_is_refused() -> None:
    model = compiled("llama", "change")
    with pytest.raises(peftc.PeftcError, match="P541"):
        peftc.calibrate(model, batches("llama", model), loss=lambda model, batch: model(**batch).loss.detach())
