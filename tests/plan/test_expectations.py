"""`expect`: whether it holds, and its messages."""

import pytest

from tests.plan import tables
from tests.plan.specs import planned, refused, underlined

BART = tables.bart()
MAM = """
edit prefix at layer[*].attn { kv = concat(prefix(len=30), kv) }
edit ffn    at layer[*].ffn  { h += 4 * adapter(x, r=512, act=relu, init=lora) }
"""


@pytest.mark.parametrize(
    ("expectation", "holds"),
    [
        ("stored <= 6.8%", True),
        ("stored <= 6.7%", False),
        ("stored == 27414528", True),
        ("trained < 27.4M", False),
        ("trained < 27.5M", True),
        ("trained - stored == 0", True),
        ("trained == 27414.528K", True),
        ("stored + 1 > 27414528", True),
        ("2 * stored <= 13.5%", True),
        ("stored <= 3% + 3.8%", True),
        ("stored - 6% < 1%", True),
        ("stored / trained == 1", True),
        ("stored / trained == 100%", True),
        ("changed == 0", True),
        ("served >= 6%", True),
        ("served != stored", False),
        ("sites(prefix) == 36", True),
        ("sites(ffn) == 36", False),
        ("sites(prefix) > sites(ffn)", True),
        ("foldable(prefix)", False),
        ("foldable(prefix) == false", True),
        ("identity(ffn)", True),
        ("identity(ffn) != identity(prefix)", True),
        ("-stored < 0", True),
    ],
)
def test_expectations(expectation, holds):
    result = planned(f"{MAM}expect {expectation}", BART)
    (outcome,) = result.plan.expectations
    assert outcome.holds is holds
    assert [one.code for one in result.failed_expectations] == ([] if holds else ["P304"])


def test_expectations_are_shown_as_the_formatter_prints_them():
    result = planned(f"{MAM}expect stored<=3%+3.8%\nexpect   foldable( prefix )==false", BART)
    assert [outcome.text for outcome in result.plan.expectations] == [
        "stored <= 6.8%",
        "foldable(prefix) == false",
    ]


def test_a_failure_shows_the_actual_value():
    (diagnostic,) = planned(f"{MAM}expect stored <= 6.7%", BART).failed_expectations
    assert underlined(diagnostic) == "stored <= 6.7%"
    assert diagnostic.label == "`stored` is 27,414,528, 6.747 % of the base"
    assert diagnostic.notes == ("`prefix` has 2,211,840", "`ffn` has 25,202,688")
    (diagnostic,) = planned(f"{MAM}expect foldable(ffn)", BART).failed_expectations
    assert diagnostic.label == "`foldable(ffn)` is false"
    assert diagnostic.notes[0].startswith("`ffn` does not fold: `adapter(x)`")


@pytest.mark.parametrize(
    ("expectation", "code", "span"),
    [
        ("foldable(fnn)", "P117", "fnn"),
        ("storred <= 3%", "P116", "storred"),
        ("stored", "P116", "stored"),
        ("stored <= 1 / 0", "P120", "1 / 0"),
        ("stored / changed > 1", "P120", "stored / changed"),
        ("foldable(ffn) < 3", "P116", None),
    ],
)
def test_meaningless_expectations(expectation, code, span):
    (diagnostic,) = refused(f"{MAM}expect {expectation}", BART)
    assert diagnostic.code == code
    assert span is None or underlined(diagnostic) == span
