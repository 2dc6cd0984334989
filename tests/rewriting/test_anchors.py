"""How a state is named from a part of its layer."""

from __future__ import annotations

import pytest

from peftc.rewriting.anchors import Anchor


@pytest.mark.parametrize(
    ("frame", "called", "region", "expected"),
    [
        ("", "ff.dropout", "", ("", "ff.dropout")),
        ("ff", "dropout", "", ("ff", "dropout")),
        ("ff", "dropout", "ff", ("", "dropout")),  # named from the code that calls it
        ("block.ff", "inner.dropout", "block", ("ff", "inner.dropout")),
        ("block.ff", "block.shared", "block", ("ff", "shared")),  # another part's module
    ],
)
def test_one_of_several_calls_of_a_module(frame: str, called: str, region: str, expected: tuple[str, str]) -> None:
    anchor = Anchor("node", frame, (f"call_module {called}", 1)).relative(region)
    assert (anchor.module, anchor.key) == (expected[0], (f"call_module {expected[1]}", 1))
