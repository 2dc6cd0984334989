"""Pairs (f(c), y) of a frozen causal LM in memory-mapped files; and kNN-LM, which searches them.

f(c) is the input of the head (`model.get_output_embeddings()`) for the context c: the last hidden
state, after the final norm. y is the true next token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

CausalLM = Any  # a causal LM of transformers, with `generate`
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Inputs, padded on the left, and what should follow each, padded on the right.

    Shapes:
        inputs, mask: (batch, tokens), mask 1 where there is a token
        target: (batch, steps), IGNORED where there is none
    """

    inputs: Tensor
    mask: Tensor
    target: Tensor


@dataclass(frozen=True)
class Memory:
    """The external memory (f(C), Y) = {(f(c_i), y_i)}: rows come into memory where they are read.

    Shapes:
        f: (n, d), float32
        y: (n), int32
    Source: PEMA, Kim et al. 2024, arXiv:2311.08590, Eq. 1; the datastore of kNN-LM,
    arXiv:1911.00172, Eq. 1.
    """

    f: Tensor
    y: Tensor

    @staticmethod
    def write(folder: Path, pairs: Iterable[tuple[Tensor, Tensor]]) -> Memory:
        """Writes pairs as they come, some rows at a time, and opens what it wrote."""
        n = d = 0
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "f.bin").open("wb") as contexts, (folder / "y.bin").open("wb") as tokens:
            for f, y in pairs:
                contexts.write(f.float().contiguous().cpu().numpy().tobytes())
                tokens.write(y.int().contiguous().cpu().numpy().tobytes())
                n, d = n + len(y), f.shape[-1]
        (folder / "memory.json").write_text(json.dumps({"n": n, "d": d}), encoding="utf-8")
        return Memory.open(folder)

    @staticmethod
    def open(folder: Path) -> Memory:
        """Maps the files; a write to the tensors would not reach them."""
        size = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
        n, d = size["n"], size["d"]
        f = torch.from_file(str(folder / "f.bin"), shared=False, size=n * d, dtype=torch.float32)
        return Memory(f.view(n, d), torch.from_file(str(folder / "y.bin"), shared=False, size=n, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every pair once, in an order drawn from the seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for index in order.split(rows):
            yield self.f[index], self.y[index].long()


class HeadInputs:
    """A context manager that records the last input of a model's head, one position for each token
    it predicts.
    """

    def __init__(self, model: CausalLM) -> None:
        self.head: nn.Module = model.get_output_embeddings()
        self.last: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> HeadInputs:
        self.handle = self.head.register_forward_hook(self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.handle.remove()

    def _keep(self, head: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
        self.last = args[0].detach(), logits.detach()

    def take(self) -> tuple[Tensor, Tensor]:
        """(f, head(f)) of the last forward pass, once.

        Raises: RuntimeError where the head has not run since: in assisted decoding, one pass is for
        several tokens.
        """
        if self.last is None:
            raise RuntimeError(
                "no forward pass since the last token: one pass a token is needed (no assisted decoding)"
            )
        last, self.last = self.last, None
        return last


def contexts(model: CausalLM, inputs: Tensor, mask: Tensor, continuation: Tensor) -> Tensor:
    """f of every context of a continuation: result[b, i] predicts the token after inputs[b],
    continuation[b, :i].

    Shapes:
        inputs, mask: (batch, tokens), padded on the left
        continuation: (batch, steps) -> (batch, steps, d)
    Raises: ValueError where the model does something to its logits after the head (a cap, a scale):
    softmax(head(f)) is not its p.
    """
    ids = torch.cat([inputs, continuation[:, :-1]], dim=1)
    full_mask = torch.cat([mask, torch.ones_like(continuation[:, :-1])], dim=1)
    with torch.no_grad(), HeadInputs(model) as head:
        positions = (full_mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=full_mask, position_ids=positions, use_cache=False).logits
    f, own = head.take()
    if not torch.equal(own, logits.to(own.dtype)):
        raise ValueError(
            "the model's logits are not its head's output: its probabilities cannot be had from f and the head"
        )
    return f[:, inputs.shape[1] - 1 :]


def collect(model: CausalLM, batches: Iterable[Batch], folder: Path, own: bool = True) -> Memory:
    """Runs the frozen base over training examples and writes (f(c_i), y_i) for each token y_i of
    their targets.

    `own`: c_i = {c_1, ŵ_1, …, ŵ_(i-1)} with the base's own greedy predictions ŵ (PEMA, section 3.1:
    its owner never sees a target), up to where the base ends its sentence. Else c_i = {c_1, y_1, …,
    y_(i-1)}, as in kNN-LM.
    """
    return Memory.write(folder, (pairs(model, batch, own) for batch in batches))


def pairs(model: CausalLM, batch: Batch, own: bool) -> tuple[Tensor, Tensor]:
    """The pairs of one batch: (n, d) and (n)."""
    valid = batch.target != IGNORED
    tokens = batch.target.clamp(min=0)
    if own:
        tokens = greedy(model, batch.inputs, batch.mask, batch.target.shape[1])
        ended = (tokens == model.generation_config.eos_token_id).long()
        valid &= ended.cumsum(1) - ended == 0
    return contexts(model, batch.inputs, batch.mask, tokens)[valid], batch.target[valid]


def greedy(model: CausalLM, inputs: Tensor, mask: Tensor, steps: int, **how: Any) -> Tensor:
    """(batch, steps): the model's greedy continuation, padded with end tokens."""
    ends = model.generation_config.eos_token_id
    ids = model.generate(
        input_ids=inputs, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=ends, **how
    )
    return nn.functional.pad(ids[:, inputs.shape[1] :], (0, steps + inputs.shape[1] - ids.shape[1]), value=ends)


@dataclass(frozen=True)
class NearestNeighbours:
    """p_kNN(y | c) ∝ Σ over the k pairs (f_j, y_j) nearest to f(c) with y_j = y of exp(-‖f_j -
    f(c)‖² / T). The search is exact.

    Shapes: f: (rows, d) -> (rows, tokens of the vocabulary)
    Args:
        k: pairs
        temperature: T; 1 in the paper, more where distances are large
    Source: Khandelwal et al. 2020, arXiv:1911.00172, Eq. 2; squared distance: section 3.
    """

    memory: Memory
    vocabulary: int
    k: int = 1024
    temperature: float = 1.0

    def __call__(self, f: Tensor) -> Tensor:
        mode = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(f.float(), self.memory.f, compute_mode=mode).square()
        near, index = distance.topk(min(self.k, len(self.memory)), largest=False)
        weights = (-near / self.temperature).softmax(-1)
        return weights.new_zeros(len(f), self.vocabulary).scatter_add_(1, self.memory.y[index].long(), weights)
