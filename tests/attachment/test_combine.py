"""Attached adapters combined into one, beside `add_weighted_adapter` of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import merge_utils
from torch import nn

import peftc
from tests import zoo
from tests.attachment.test_attach import disturb, output
from tests.laws.harness import close

LORA = "peft 2\nedit qv at layer[*].attn.{{q, v}} {{ h += {scale} * lora(x, r={r}) }}"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT

WEIGHTS = {"A": 0.3, "B": -0.7}
PAIRS = {
    "linear": ("linear", {}),
    "cat": ("cat", {}),
    "svd": ("svd", {"svd_rank": 4}),
    "ties": ("ties", {"density": 0.5}),
}


def two(tmp_path: Path, ranks: tuple[int, int] = (4, 4)) -> Any:
    """A model with two attached adapters, and their folders in the format of PEFT."""
    for seed, (name, r) in enumerate(zip("AB", ranks, strict=True)):
        model = peftc.compile(LORA.format(scale=2 + seed, r=r), zoo.build("llama", torch.float64), seed=seed)
        disturb(model, seed)
        peftc.save(model, tmp_path / name)
        peftc.export(model, tmp_path / f"peft-{name}")
    model = zoo.build("llama", torch.float64)
    for name in "AB":
        peftc.attach(tmp_path / name, model)
    return model


def theirs(tmp_path: Path, method: str, **options: Any) -> Any:
    model: Any = peft.PeftModel.from_pretrained(
        zoo.build("llama", torch.float64), tmp_path / "peft-A", adapter_name="A"
    )
    model.load_adapter(tmp_path / "peft-B", "B")
    model.add_weighted_adapter([*WEIGHTS], [*WEIGHTS.values()], "C", combination_type=method, **options)
    model.set_adapter("C")
    return model.eval()


@pytest.mark.parametrize("method", PAIRS)
def test_a_combination_is_that_of_peft(method: Any, tmp_path: Path) -> None:
    model = two(tmp_path)
    base = output("llama", model)
    assert peftc.combine(model, WEIGHTS, method=method, name="C") is model
    assert torch.equal(output("llama", model), base)
    peftc.activate(model, "C")
    name, options = PAIRS[method]
    reference = output("llama", theirs(tmp_path, name, **options))
    assert not torch.allclose(reference, base)
    torch.testing.assert_close(output("llama", model), reference, rtol=1e-5, atol=1e-6)  # PEFT weighs in float32


def test_dare_drops_entries_as_peft_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the masks that peftc draws, in the order in which PEFT asks for them."""
    model = two(tmp_path)
    peftc.combine(model, WEIGHTS, method="dare", name="C", density=0.4, seed=3)
    generator, order = torch.Generator().manual_seed(3), list[Any]()

    def prune(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
        order.append(tensor.shape)
        return tensor * torch.empty_like(tensor).bernoulli_(density, generator=generator) / density

    monkeypatch.setattr(merge_utils, "random_pruning", prune)
    reference = theirs(tmp_path, "dare_linear", density=0.4)
    peftc.activate(model, "C")
    torch.testing.assert_close(output("llama", model), output("llama", reference), rtol=1e-5, atol=1e-6)
    assert len(order) == 2 * 2 * 6


def test_cat_is_exact_also_for_different_ranks_and_equations(tmp_path: Path) -> None:
    model = two(tmp_path, (4, 2))
    peftc.compile(
        "peft 2\nedit o at layer[*].attn.{q, o} { w += lowrank(r=3) }", other := zoo.build("llama", torch.float64)
    )
    disturb(other, 5)
    peftc.save(other, tmp_path / "D")
    peftc.attach(tmp_path / "D", model)
    weights = {**WEIGHTS, "D": 0.5}
    peftc.combine(model, weights, method="cat")
    assert peftc.attached(model)[-1] == "A-B-D"
    peftc.activate(model, "A-B-D")
    by_hand: nn.Module = zoo.build("llama", torch.float64)
    for adapter, weight in weights.items():
        folded = peftc.load(tmp_path / adapter, zoo.build("llama", torch.float64))
        peftc.fold(folded)
        with torch.no_grad():
            for own, new, old in zip(
                by_hand.parameters(), folded.parameters(), zoo.build("llama", torch.float64).parameters(), strict=True
            ):
                own += weight * (new - old)
    close(output("llama", model), output("llama", by_hand), "the sum of the changes")
    for adapter in ("A", "B", "D"):
        peftc.detach(model, adapter)
    close(output("llama", model), output("llama", by_hand), "without its parts")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"weights": {"A": 1.0, "C": 1.0}}, "P547"),
        ({"weights": {}}, "P545"),
        ({"weights": {"A": float("nan")}}, "P545"),
        ({"weights": WEIGHTS, "method": "sum"}, "P545"),
        ({"weights": WEIGHTS, "method": "linear"}, "P545"),  # of different ranks
        ({"weights": WEIGHTS, "method": "cat", "rank": 3}, "P545"),
        ({"weights": WEIGHTS, "method": "ties", "density": 0}, "P545"),
        ({"weights": WEIGHTS, "method": "cat", "name": "A"}, "P548"),
        ({"weights": {"A": 1.0, "V": 1.0}, "method": "cat"}, "P801"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, Any], code: str, several: tuple[Any, Any]) -> None:
    model, before = several
    with pytest.raises(peftc.PeftcError) as error:
        peftc.combine(model, **options)
    assert [one.code for one in error.value.diagnostics] == [code]
    assert torch.equal(output("llama", model), before)
    assert peftc.attached(model) == ("A", "B", "V")


def test_what_is_no_product_names_its_adapter(several: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = several
    with pytest.raises(peftc.PeftcError) as error:
        peftc.combine(model, {"A": 1.0, "V": 1.0}, method="cat")
    assert error.value.diagnostics[0].message.startswith("adapter `V`: edit `f` is no product of low rank: ")


def test_what_is_attached_folds_when_it_is_loaded_alone(several: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = several
    assert "`peftc.save(model, directory, name=…)`" in str(peftc.fold(model))
    with pytest.raises(peftc.PeftcError) as error:
        peftc.export(model, tmp_path / "out")
    assert "`peftc.save(model, directory, name=…)`" in (error.value.diagnostics[0].help or "")
    alone = peftc.load(peftc.save(model, tmp_path / "A", name="A"), zoo.build("llama", torch.float64))
    assert not peftc.fold(alone).refused


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, torch.Tensor]:
    tmp_path = tmp_path_factory.mktemp("several")
    model = two(tmp_path, (4, 2))
    spec = "peft 2\nedit f at layer[*].ffn { h += adapter(h, r=2) }"
    peftc.save(peftc.compile(spec, zoo.build("llama", torch.float64), seed=0), tmp_path / "V")
    peftc.attach(tmp_path / "V", model)
    return model, output("llama", model)
