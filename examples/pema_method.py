"""PEMA: an adapter on the head's input, trained on an external memory and a copy of the head alone,
mixed in while generating.

Kim et al. 2024, "PEMA: An Offsite-Tunable Plug-in External Memory Adaptation for Language Models",
arXiv:2311.08590.

There is no `.peft` for it: an edit changes a hidden state, and Eq. 6 mixes two distributions, whose
share falls from token to token. No edit of the head's input or output is that, so it is a logits
processor; and what it trains never sees the base.

Where the authors' code (github.com/agwaBom/PEMA) differs from the paper, this follows the paper:

* f is the input of W_hd, as Eq. 2 has it. The code stores the last layer's output, and copies the
  final norm along with the head.
* λ is CS² from the first token on. In the code the first token gets λ_max itself.
* SL is the length of the input, without instruction. The code reads it off the reference answer,
  which nobody has at inference.
* Each sentence has its CS. In the code no CS of a batch falls any more as soon as one would reach
  zero.
* No scale and no dropout. The code multiplies A by 1/r and drops a fifth of f.

Two things that the paper leaves open are as in the code: reconstruction trains an A of its own with
B_rct, and the joint phase draws another and leaves B_rct as it is; losses are means over tokens and
features, on which the meaning of κ depends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from external_memory import CausalLM, HeadInputs, Memory, greedy
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

NextToken = Callable[[Tensor], Tensor]  # f: (rows, d) -> probabilities: (rows, tokens of the vocabulary)
Share = Callable[[int | Tensor], Tensor]  # step, from 0 -> λ: () or (batch)


class Pema(nn.Module):
    """h_rct = B_rct A f, h_pd = B_pd A f.

    Shapes: A: (r, d); B_rct, B_pd: (d, r); f: (…, d) -> (…, d)
    Source: Eq. 2. First values as in LoRA: A random, both B zero.
    """

    def __init__(self, d: int, r: int) -> None:
        super().__init__()
        if not 0 < r < d:
            raise ValueError(f"the rank must be between 1 and {d - 1}, one less than the width of f; it is {r}")
        self.A = nn.Parameter(torch.empty(r, d))
        self.B_rct = nn.Parameter(torch.zeros(d, r))
        self.B_pd = nn.Parameter(torch.zeros(d, r))
        self.draw()

    def draw(self) -> None:
        """Draws A (again)."""
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def reconstruct(self, f: Tensor) -> Tensor:
        """h_rct"""
        return f @ self.A.T @ self.B_rct.T

    def forward(self, f: Tensor) -> Tensor:
        """h_pd"""
        return f @ self.A.T @ self.B_pd.T

    def only(self, *names: str) -> list[nn.Parameter]:
        """Lets these train and nothing else."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names)
            parameter.grad = None
        return [self.get_parameter(name) for name in names]


@dataclass(frozen=True)
class Head:
    """W_hd, frozen: all of the base that training and p_PEMA need. A copy, so that the base can
    go.
    """

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def copied(model: CausalLM) -> Head:
        own = model.get_output_embeddings()
        bias = getattr(own, "bias", None)
        return Head(own.weight.detach().clone(), None if bias is None else bias.detach().clone())

    def __call__(self, h: Tensor) -> Tensor:
        """(…, d) -> (…, tokens of the vocabulary)"""
        return nn.functional.linear(h, self.weight, self.bias)


def reconstruction_loss(pema: Pema, f: Tensor) -> Tensor:
    """L_rct = mean (f - B_rct A f)². Source: Eq. 3."""
    return nn.functional.mse_loss(pema.reconstruct(f), f)


def joint_loss(pema: Pema, head: Head, f: Tensor, y: Tensor, kappa: float) -> Tensor:
    """L_total = κ L_rct + (1 - κ) L_pd, L_pd = -mean log softmax(W_hd B_pd A f)[y]. Source: Eq. 4
    and 5.
    """
    prediction = nn.functional.cross_entropy(head(pema(f)), y)
    return kappa * reconstruction_loss(pema, f) + (1 - kappa) * prediction


def reconstruct(pema: Pema, memory: Memory, epochs: int, rows: int = 256, rate: float = 3e-3) -> float:
    """The first phase, which trains B_rct, with an A that is then drawn again; the last loss.
    Source: section 3.3.
    """
    optimizer = torch.optim.Adam(pema.only("A", "B_rct"), lr=rate)
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        for f, _ in memory.batches(rows, seed=epoch):
            loss = reconstruction_loss(pema, f)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pema.draw()
    return loss.item()


def retrain(
    pema: Pema, head: Head, memory: Memory, epochs: int, kappa: float = 0.2, rows: int = 256, rate: float = 3e-3
) -> float:
    """The second phase, which trains A and B_pd with B_rct frozen; the last loss. κ = 0.2 is what
    the authors' script has.

    Source: section 3.3, "joint retraining".
    """
    optimizer = torch.optim.Adam(pema.only("A", "B_pd"), lr=rate)
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        for f, y in memory.batches(rows, seed=epoch):
            loss = joint_loss(pema, head, f, y, kappa)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


@dataclass(frozen=True)
class PemaTokens:
    """p_PEMA = softmax(W_hd B_pd A f): (rows, d) -> (rows, tokens of the vocabulary). Source: Eq.
    2.
    """

    pema: Pema
    head: Head

    def __call__(self, f: Tensor) -> Tensor:
        return self.head(self.pema(f.to(self.pema.A))).softmax(-1)


@dataclass(frozen=True)
class Constant:
    """λ, whatever the step: kNN-LM's, and PEMA's without gradual unrolling."""

    share: float

    def __call__(self, step: int | Tensor) -> Tensor:
        return torch.full(step.shape if isinstance(step, Tensor) else (), self.share)


@dataclass(frozen=True)
class Unrolling:
    """Gradual unrolling: CS_0 = λ_max, CS_i = CS_(i-1) - λ_max / SL, λ_i = CS_i²; once CS is zero,
    it stays.

    Args:
        lengths: SL, tokens of each input without its instruction: (batch)
        most: λ_max
    Source: section 4.
    """

    lengths: Tensor
    most: float

    def __call__(self, step: int | Tensor) -> Tensor:
        return (self.most * (1 - step / self.lengths).clamp(min=0)).square()


def input_lengths(mask: Tensor, instruction: int) -> Tensor:
    """SL: the tokens of each input, (batch, tokens) -> (batch), less those of the instruction that
    all inputs have. Source: section 4.
    """
    return (mask.sum(1) - instruction).clamp(min=1)


def mix(share: Tensor, memory: Tensor, base: Tensor) -> Tensor:
    """p = λ p_memory + (1 - λ) p_LM: share: (rows); memory, base: (rows, tokens of the vocabulary).
    Source: Eq. 6.
    """
    return share[:, None] * memory + (1 - share[:, None]) * base


class Interpolation(LogitsProcessor):
    """Mixes in `generate`: f of the present step comes from the head's own call, so caches,
    sampling and beams are as they were.

    Args:
        inputs: entered around `generate`
        start: tokens of the input, padding included
    Raises: RuntimeError where one forward pass is for several tokens (assisted decoding, prompt
    lookup).
    """

    def __init__(self, inputs: HeadInputs, memory: NextToken, share: Share, start: int) -> None:
        self.inputs, self.memory, self.share, self.start = inputs, memory, share, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        f, _ = self.inputs.take()
        share = self.share(input_ids.shape[1] - self.start).reshape(-1)
        share = share.repeat_interleave(len(scores) // len(share))  # the beams of an input lie side by side
        p = mix(share.to(scores), self.memory(f[:, -1]).to(scores), scores.softmax(-1))
        return p.log().masked_fill(scores == -torch.inf, -torch.inf)  # what others forbade stays so


def generate(
    model: CausalLM, inputs: Tensor, mask: Tensor, steps: int, memory: NextToken, share: Share, **how: Any
) -> Tensor:
    """(batch, steps): the base with the mixture in place of its own distribution."""
    with torch.no_grad(), HeadInputs(model) as head:
        mixing = LogitsProcessorList([Interpolation(head, memory, share, start=inputs.shape[1])])
        return greedy(model, inputs, mask, steps, logits_processor=mixing, **how)
