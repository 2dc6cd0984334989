"""Law: a merged checkpoint computes what the adapter does on its base, for every recipe of the
package on every family that has its places. What does not fold is in the adapter beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import peftc
from tests.laws.harness import TOLERANCE
from tests.laws.test_specs import LAYERS
from tests.matrix import FULL
from tests.merging.families import FAMILIES, RECIPES, Checkpoint, compile_trained, families, output, save_base

NO_PLACE = ("P201", "P202", "P205", "P318")  # or no width that a block divides
FUSION = "adapterfusion"  # mixes adapters that were trained before; nothing of it folds
LAW = [recipe for recipe in sorted(RECIPES) if recipe != FUSION]
STRIDE = 1 if FULL else 20  # one family for each recipe, the families in turn; all in the full run
Bases = Callable[[str, str], Checkpoint]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Checkpoints by family and recipe: one for all recipes but those that need more layers."""
    root, saved = tmp_path_factory.mktemp("bases"), dict[tuple[str, int | None], Checkpoint]()

    def base(family: str, recipe: str) -> Checkpoint:
        key = (family, LAYERS.get(recipe))
        if key not in saved:
            saved[key] = save_base(root / str(len(saved)), family, recipe)
        return saved[key]

    return base


def difference(recipe: str, base: Checkpoint, folder: Path) -> float:
    """max |merged(x) - unfolded(x)|. Where all folds, the parameters are those of `peftc.fold`, to
    the last places of products with vectors, which depend on where in memory a matrix begins.
    """
    model = compile_trained(recipe, base)
    peftc.save(model, folder / "adapter")
    report = peftc.merge(base.folder, folder / "adapter", folder / "out", partial=True, verify=True)
    merged = base.load(folder / "out")
    assert (folder / "out/adapter").exists() == bool(report.refused)
    if report.refused:
        peftc.load(folder / "out/adapter", merged, strict=True)
    error = (output(merged, base.inputs) - output(model, base.inputs)).abs().max().item()
    if not report.refused:
        peftc.fold(model)
        expected, actual = dict(model.named_parameters()), dict(merged.named_parameters())
        assert expected.keys() == actual.keys()
        assert [n for n, p in expected.items() if not torch.allclose(p, actual[n], rtol=0, atol=1e-14)] == []
    return error


@pytest.mark.parametrize("recipe", LAW)
@pytest.mark.filterwarnings("ignore")
def test_merged_is_unfolded(recipe: str, bases: Bases, tmp_path: Path) -> None:
    errors, own = dict[str, float](), families(recipe)
    chosen = own[LAW.index(recipe) % STRIDE :: STRIDE]
    for family in (*chosen, *(one for one in own if one not in chosen)):
        if errors and family not in chosen:
            break
        try:
            errors[family] = difference(recipe, bases(family, recipe), tmp_path / family)
        except peftc.PeftcError as error:
            if error.diagnostics[0].code not in NO_PLACE:
                raise
    assert errors
    assert {family: error for family, error in errors.items() if not error < TOLERANCE} == {}


def test_the_law_is_over_many_families() -> None:
    assert len(set(FAMILIES)) == len(FAMILIES) >= 15
