"""Memory of tensors that were written is that of later ones, and never that of those in use."""

from __future__ import annotations

import torch

from peftc.folding import memory


def test_memory_comes_again_after_some_rounds() -> None:
    with memory.reused(2):
        taken = list[list[torch.Tensor]]()
        for size in (4, 8, 2, 6):
            memory.next_round()
            taken.append([memory.empty((size, 3), torch.bfloat16), memory.empty((size,), torch.float64)])
            for i, tensor in enumerate(taken[-1]):
                tensor.fill_(len(taken) * 10 + i)
            for number, tensors in enumerate(taken[-2:], max(1, len(taken) - 1)):  # this round, and the one before
                assert all(bool((one == number * 10 + i).all()) for i, one in enumerate(tensors))
        places = [[tensor.data_ptr() for tensor in tensors] for tensors in taken]
        assert places[0] != places[1]
        assert places[1] == places[3]  # which is as large, at most
    assert memory.empty((2,), torch.float32).shape == (2,)


def test_large_tensors_are_not_kept() -> None:
    with memory.reused(1):
        tensors = [memory.empty((memory.LARGEST + 1,), torch.uint8) for _ in range(2) if memory.next_round() is None]
    assert tensors[0].data_ptr() != tensors[1].data_ptr()
