"""The GaLore optimizer of the examples, against its equations written out."""

from __future__ import annotations

import copy

import pytest
import torch
from galore_optimizer import GaLore, principal_vectors, state_entries
from torch import Tensor, nn

SHAPES = [(6, 10), (10, 6), (5, 5)]


def weight_of(shape: tuple[int, ...], seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(i + 1), dtype=torch.float64) for i in range(steps)
    ]


def run(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: list[Tensor]) -> None:
    for gradient in steps:
        weight.grad = gradient.clone()
        optimizer.step()


def by_hand(weight: Tensor, steps: list[Tensor], rank: int, gap: int, scale: float) -> Tensor:
    """Algorithm 2, on the transpose where that is wide."""
    tall = weight.shape[0] > weight.shape[1]
    w, m, v, p = (weight.T if tall else weight).clone(), 0.0, 0.0, torch.empty(0)
    for t, step in enumerate(steps):
        g = step.T if tall else step
        if t % gap == 0:
            left, _, right = torch.linalg.svd(step)  # the signs of singular vectors are arbitrary
            p = (right.T if tall else left)[:, :rank]
        r = p.T @ g
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r**2
        w -= 0.01 * scale * p @ ((m / (1 - 0.9 ** (t + 1))) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8))
    return w.T if tall else w


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_the_algorithm(shape: tuple[int, int]) -> None:
    weight, steps = weight_of(shape), gradients(shape, 5)
    expected = by_hand(weight.detach(), steps, rank=2, gap=3, scale=0.25)
    run(weight, GaLore([weight], rank=2, gap=3), steps)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_state_has_the_entries_of_table_1(shape: tuple[int, int]) -> None:
    weight, rank = weight_of(shape), 2
    optimizer = GaLore([weight], rank=rank)
    run(weight, optimizer, gradients(shape, 2))
    m, n = sorted(shape)
    assert state_entries(optimizer) == m * rank + 2 * n * rank
    stored = optimizer.state[weight]["projection"].untyped_storage()
    assert stored.nbytes() == 8 * m * rank  # no view of all vectors


def test_changes_between_two_choices_have_the_rank() -> None:
    weight = weight_of((6, 10))
    before = weight.detach().clone()
    optimizer = GaLore([weight], rank=2, gap=4)
    run(weight, optimizer, gradients((6, 10), 4))
    assert torch.linalg.matrix_rank(weight.detach() - before, atol=1e-10) == 2
    run(weight, optimizer, gradients((6, 10), 5)[4:])
    assert torch.linalg.matrix_rank(weight.detach() - before, atol=1e-10) == 4  # another subspace


@pytest.mark.parametrize("shape", [(7,), (2, 9), (9, 2), (2, 3, 4)])
def test_what_is_no_larger_than_the_rank_has_adam(shape: tuple[int, ...]) -> None:
    one, other, steps = weight_of(shape), weight_of(shape), gradients(shape, 4)
    run(one, GaLore([one], rank=2), steps)
    run(other, torch.optim.Adam([other], lr=1e-2), steps)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_stored_state_goes_on() -> None:
    weight, steps = weight_of((6, 10)), gradients((6, 10), 6)
    first = GaLore([weight], rank=2, gap=4)
    run(weight, first, steps[:3])
    other = nn.Parameter(weight.detach().clone())
    second = GaLore([other], rank=2, gap=4)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(weight, first, steps[3:])
    run(other, second, steps[3:])
    assert torch.equal(weight, other)


def test_vectors_are_orthonormal_and_those_of_the_largest_values() -> None:
    gradient = gradients((8, 5), 1)[0].float()
    rows = principal_vectors(gradient, 3)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3), rtol=0, atol=1e-5)
    rest = gradient - gradient @ rows.T @ rows
    values = torch.linalg.svdvals(gradient)
    torch.testing.assert_close(torch.linalg.svdvals(rest)[:2], values[3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rank", "gap"), [(0, 1), (1, 0)])
def test_a_rank_or_gap_below_one_is_refused(rank: int, gap: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        GaLore([weight_of((3, 4))], rank=rank, gap=gap)
