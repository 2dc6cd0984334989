"""GaLore, Adam and LoRA on the same weights of a small LLaMA: what the optimizers keep, and what
they reach on docstrings of another kind.

GaLore is an optimizer, so there is nothing to compile: a `train` statement selects the weights,
and the optimizer gets them from `peftc.parameters`. Nothing is downloaded.

python examples/galore.py
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import small_lm
import torch
from galore_optimizer import GaLore, state_entries
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftc

SITES = "layer[*].attn.{q, k, v, o} | layer[*].ffn.{gate, up, down}"
WEIGHTS = f"peft 1  train weights = [w] at {SITES}"
RANK = 8
LORA = f"peft 1  edit low at {SITES} {{ h += lora(x, r={RANK}, alpha={2 * RANK}) }}"
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Formula = Callable[[Iterable[torch.Size], int], int]


@dataclass(frozen=True)
class Row:
    """What one method trains and keeps, in numbers, and its loss on held-out text in nats."""

    name: str
    trained: int
    state: int
    formula: int
    loss: float

    def __str__(self) -> str:
        return (
            f"{self.name:22}{self.trained:12,}{self.state:14,}{self.formula:14,}{4 * self.state:12,}{self.loss:11.3f}"
        )


def sides(shapes: Iterable[torch.Size]) -> list[tuple[int, int]]:
    """(m, n) of each matrix, m ≤ n."""
    return [(min(shape), max(shape)) for shape in shapes]


# Table 1 of the paper: the numbers that an optimizer keeps for a weight of m × n.
def adam_entries(shapes: Iterable[torch.Size], rank: int) -> int:
    return sum(2 * m * n for m, n in sides(shapes))


def galore_entries(shapes: Iterable[torch.Size], rank: int) -> int:
    return sum(m * rank + 2 * n * rank for m, n in sides(shapes))


def lora_entries(shapes: Iterable[torch.Size], rank: int) -> int:
    return sum(2 * m * rank + 2 * n * rank for m, n in sides(shapes))


def fine_tune(base: small_lm.CausalLM, spec: str, optimizer: Optimizer, steps: int) -> tuple[int, int, float]:
    """Trained numbers, numbers in the optimizer's state, and the held-out loss."""
    learn, held_out = small_lm.corpus(small_lm.TASK)
    model = peftc.compile(spec, copy.deepcopy(base), seed=0)
    parameters = list(peftc.parameters(model).values())
    running = optimizer(parameters)
    small_lm.train(model, running, learn, steps)
    trained = sum(parameter.numel() for parameter in parameters)
    return trained, state_entries(running), small_lm.held_out_loss(model, held_out)


def compare(base: small_lm.CausalLM, steps: int) -> list[Row]:
    shapes = trained_shapes(base)
    methods: list[tuple[str, str, Optimizer, Formula]] = [
        ("Adam", WEIGHTS, lambda p: torch.optim.Adam(p, lr=3e-3), adam_entries),
        (f"GaLore, r = {RANK}", WEIGHTS, lambda p: GaLore(p, lr=2e-2, rank=RANK, scale=1.0), galore_entries),
        (f"LoRA, r = {RANK}", LORA, lambda p: torch.optim.Adam(p, lr=1e-2), lora_entries),
    ]
    rows: list[Row] = []
    for name, spec, optimizer, formula in methods:
        trained, state, loss = fine_tune(base, spec, optimizer, steps)
        rows.append(Row(name, trained, state, formula(shapes, RANK), loss))
    return rows


def trained_shapes(model: nn.Module) -> list[torch.Size]:
    sites = peftc.plan(WEIGHTS, model).edit("weights").sites
    return [model.get_parameter(f"{site.module}.weight").shape for site in sites]


def at_the_papers_size(rank: int = 512) -> None:
    """Memory of the paper's LLaMA 1B in bfloat16, on the meta device: nothing is allocated."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5461, num_hidden_layers=24, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    every = model.num_parameters()
    shapes = trained_shapes(model)
    linear = sum(shape.numel() for shape in shapes)
    own = lora_entries(shapes, rank) // 2  # parameters of LoRA, which are weights, too
    print(f"\nThe paper's LLaMA 1B, {every:,} parameters in bfloat16, r = {rank}:")
    for name, formula, beside in (
        ("Adam", adam_entries, 0),
        ("GaLore", galore_entries, 0),
        ("LoRA", lora_entries, own),
    ):
        entries = formula(shapes, rank) + 2 * (every - linear)  # embeddings, head and norms have Adam's moments
        saved = 1 - entries / (2 * every)
        states, weights = 2 * entries / 1e9, 2 * (every + beside) / 1e9
        print(f"  {name:7} states {states:5.2f} GB, {saved:6.1%} less; with the weights {states + weights:5.2f} GB")
    saved = 1 - galore_entries(shapes, rank) / adam_entries(shapes, rank)
    print(f"  of the Linears alone GaLore keeps {saved:.1%} less; the paper: up to 65.5 % less (abstract)")


def main(steps: int = 80) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # stable timing on a busy machine
    torch.manual_seed(0)
    base = small_lm.pretrained(small_lm.small_llama(), 2 * steps)
    _, held_out = small_lm.corpus(small_lm.TASK)
    print(f"base: {base.num_parameters():,} parameters, {small_lm.held_out_loss(base, held_out):.3f} nats a character")
    print(f"\n{'':22}{'trained':>12}{'state':>14}{'Table 1':>14}{'bytes':>12}{'nats':>11}")
    for row in compare(base, steps):
        print(row)
    at_the_papers_size()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
