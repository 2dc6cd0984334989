"""Two threads compute what one computes: the same bits, and the same report."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from peftc.folding import threads
from peftc.folding.report import Change
from peftc.folding.rounding import WeightSums, rounded_change
from peftc.forms.affine_module import ENTRIES, Affine

ROWS, COLUMNS = 2700, 400  # several blocks for each thread
assert ROWS * COLUMNS > 4 * ENTRIES


def change(first: int = 0) -> tuple[Tensor, Change, Tensor]:
    """A weight of which the rows from `first` on change: the new one, the report, and the sum."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
    b, a = torch.randn(ROWS - first, 4, generator=generator), torch.randn(4, COLUMNS, generator=generator)
    sums, rows = WeightSums(weight), weight[first:]
    sums.add(rows, Affine(products=((b, a),), weight=rows))
    expected = weight.float()
    expected[first:] += b @ a
    return *rounded_change("w", weight, sums, ("e",)), expected.bfloat16()


@pytest.mark.parametrize("first", [0, 1500])
def test_the_bits_and_the_report_are_those_of_one_thread(first: int) -> None:
    one, report, expected = change(first)
    with threads.threads(2):
        two, other, _ = change(first)
    assert torch.equal(one, expected)
    assert torch.equal(one, two)
    assert report == other
    assert report.total == ROWS * COLUMNS
    assert 0 < report.entries <= (ROWS - first) * COLUMNS


def test_parts_are_in_threads_of_their_own_there_alone() -> None:
    def thread(part: int) -> tuple[int, int]:
        return part, threading.get_ident()

    assert [part for part, _ in threads.in_parts(thread)] == list(range(threads.PARTS))
    assert len({ident for _, ident in threads.in_parts(thread)}) == 1
    with threads.threads(threads.PARTS):
        assert len({ident for _, ident in threads.in_parts(thread)}) == threads.PARTS
    assert len({ident for _, ident in threads.in_parts(thread)}) == 1


def test_an_error_waits_for_the_other_parts() -> None:
    ended = list[int]()
    begun = threading.Event()

    def work(part: int) -> None:
        if part == 0:
            begun.set()
            raise KeyboardInterrupt
        begun.wait()
        ended.append(part)

    with threads.threads(threads.PARTS):
        with pytest.raises(KeyboardInterrupt):
            threads.in_parts(work)
        assert ended == list(range(1, threads.PARTS))
