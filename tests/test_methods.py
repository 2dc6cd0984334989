"""The table of methods names every type of PEFT, and its counts are those of plans and of PEFT."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import peft
import pytest

from peftc.exchange.peft_format.table import TYPES, WITHOUT_EQUATION
from tests import zoo
from tests.exchange.adapterhub.models import FOLDER, NAMES
from tests.matrix import checkerboard
from tools import adapterhub_methods, methods_page
from tools.methods import PEFT, config_of, count_in_peft, plan_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Specified to not"),
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"
FAMILIES = dict(zip(("bert", "llama"), methods_page.MODELS, strict=True))
COUNTED = [name for name, method in PEFT.items() if method.values is not None]
NEED_BIASES = ("GLORA",)
CASES = [
    (name, "bert" if name in NEED_BIASES else "llama" if PEFT[name].causal else family)
    for name, family in checkerboard(COUNTED, tuple(FAMILIES))
]


def test_the_page_is_made_anew() -> None:
    assert PAGE.read_text(encoding="utf-8") == methods_page.page(), "run `make docs` and read what has changed"


def test_every_type_of_peft_is_in_the_table() -> None:
    assert set(PEFT) == {one.value for one in peft.PeftType} == {*TYPES, *WITHOUT_EQUATION}
    assert methods_page.recorded()["peft"]["versions"]["peft"] == version("peft"), "record the counts anew"


def test_every_type_with_an_equation_has_a_test_and_a_spec() -> None:
    assert set(methods_page.tests_of_peft()) == set(TYPES)
    assert all(hasattr(module, test) for module, _, test in methods_page.TABLES)
    assert all(hasattr(module, test) for module, test in methods_page.OTHER_TESTS.values())
    assert {name for name, method in PEFT.items() if method.recipe or method.equation[0]} == set(TYPES)
    assert {name for name, method in PEFT.items() if method.values is None} <= {n for n, m in PEFT.items() if m.note}


@pytest.mark.parametrize("name", COUNTED)
def test_plans_train_as_many_parameters_as_peft(name: str) -> None:
    counts = methods_page.recorded()["peft"]["counts"][name]
    assert counts
    assert counts == {model: methods_page.planned(name, model) for model in counts}


@pytest.mark.parametrize(("name", "family"), CASES)
def test_peft_counts_as_many_on_a_small_model(name: str, family: str) -> None:
    method, model = PEFT[name], zoo.build(family)
    plan = plan_of(name, method, zoo.build(family), small=True)
    config = config_of(name, method, plan, model, small=True)
    assert plan.totals.trained == count_in_peft(config, model) > 0


def test_every_configuration_of_adapterhub_is_in_the_table() -> None:
    names = json.loads((FOLDER / NAMES).read_text(encoding="utf-8"))
    assert sorted(one for method in adapterhub_methods.METHODS for one in method.names) == sorted(names)
    assert all(method.case or method.note for method in adapterhub_methods.METHODS)


@pytest.mark.parametrize("case", [method.case for method in adapterhub_methods.METHODS if method.case])
def test_plans_train_as_many_parameters_as_adapterhub(case: str) -> None:
    keys = {f"{model}/{case}" for model in adapterhub_methods.MODELS} & set(adapterhub_methods.counted())
    assert keys
    for key in keys:  # ReFT of the first tokens alone has parameters for the last ones, too, in the library
        factor = 2 if case in ("noreft", "direft") else 1
        assert factor * adapterhub_methods.trained(key) == adapterhub_methods.counted()[key]
