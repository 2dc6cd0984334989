"""Every shipped recipe computes its equations, on one model each; every model of the zoo occurs.
All pairs: `make verify`.
"""

from __future__ import annotations

import pytest

import peftc
from tests import zoo
from tests.verification.pairs import RECIPES, compiled, sampled_pairs


@pytest.mark.parametrize(("recipe", "name"), sampled_pairs())
def test_a_recipe_computes_its_equations(recipe: str, name: str) -> None:
    report = peftc.verify(compiled(recipe, name))
    assert report.ok, str(report)
    assert report.witnessed == report.sites > 0, str(report)
    checked = {check.name for check in report.checks if check.outcome == "holds"}
    assert {"disabled equals the base", "outputs equal the equations, parameters moved"} <= checked


def test_every_recipe_and_every_model_occurs() -> None:
    pairs = sampled_pairs()
    assert {recipe for recipe, _ in pairs} == set(RECIPES)
    assert {name for _, name in pairs} == set(zoo.SPECIES)
