"""A small LLaMA on the characters of docstrings, for the examples beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from docstrings import docstrings
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

CausalLM = Any  # a causal LM of transformers
CONTEXT, ROWS = 64, 16  # characters of a block, blocks of a batch
PROSE = ("asyncio", "email", "logging", "unittest", "importlib", "inspect", "urllib", "xml", "http", "idlelib")
TASK = ("turtle",)  # docstrings with a form of their own: arguments and examples in fixed words


def small_llama(layers: int = 4, d: int = 64) -> CausalLM:
    """A random LLaMA with a token for each ASCII character."""
    config = LlamaConfig(
        hidden_size=d,
        intermediate_size=3 * d,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=128,
        initializer_range=0.06,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def encode(text: str) -> Tensor:
    """(characters): a token each, `?` for what is not ASCII."""
    return torch.tensor(list(text.encode("ascii", "replace")))


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("ascii")


@cache
def corpus(modules: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Blocks to learn from, in an order that is always the same, and held-out ones, at most 200:
    (n, CONTEXT + 1) each.
    """
    tokens = torch.cat([encode(f"{text}\n") for module in modules for text in docstrings(module)])
    blocks = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held_out = torch.arange(len(blocks)) % 8 == 7
    learn = blocks[~held_out]
    return learn[torch.randperm(len(learn), generator=torch.Generator().manual_seed(0))], blocks[held_out][:200]


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    """The mean of -log p of each next character, in nats."""
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.transpose(1, 2), blocks[:, 1:])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Tensor,
    steps: int,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> None:
    """Takes `steps` steps, a batch each, with a learning rate that rises over a tenth of them and
    then falls to zero.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, max(steps, 2), pct_start=0.1)
    model.train()
    for step in range(steps):
        start = step * ROWS % (len(blocks) - ROWS + 1)
        value = loss(model, blocks[start : start + ROWS])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: Tensor) -> float:
    """The loss on all blocks, in nats a character."""
    parts = [(loss_of(model, part), len(part)) for part in blocks.split(64)]
    return sum(float(loss) * n for loss, n in parts) / len(blocks)


def pretrained(model: CausalLM, steps: int) -> CausalLM:
    """Trains all weights on docstrings in prose; the task is none of them."""
    train(model, torch.optim.AdamW(model.parameters(), lr=4e-3), corpus(PROSE)[0], steps)
    return model
