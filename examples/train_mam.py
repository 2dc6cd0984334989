"""Trains MAM on a small BART and generates with it: class names of the standard library into
snake_case.

The base is first trained in full, to copy names; it never sees an underscore. Then it is frozen,
and the Mix-And-Match adapter alone learns to convert. `generate` runs with its cache, greedily and
with beams.
"""

from __future__ import annotations

import argparse
import random
import re
import string
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

import peftc

SPEC = """
peft 1
use mam from std
apply mam(l=8, r=64)
"""
HELD_OUT = 150
PAD, BOS, EOS = range(3)
LETTERS = "_" + string.ascii_letters
NUMBERS = {letter: number for number, letter in enumerate(LETTERS, start=3)}


def class_names() -> list[str]:
    """Names of 4 to 16 letters, of every class of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    classes: dict[str, None] = {}
    for path in sorted(library.rglob("*.py")):
        if not {"test", "tests", "site-packages"} & set(path.parts):
            classes |= dict.fromkeys(
                re.findall(r"^ *class ([A-Z][A-Za-z]{3,15})\b", path.read_text("utf-8", "replace"), re.M)
            )
    names = list(classes)
    random.Random(0).shuffle(names)
    return names


def snake(name: str) -> str:
    """HTTPConnection → http_connection"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def encode(names: Iterable[str]) -> Tensor:
    rows = [torch.tensor([*(NUMBERS[letter] for letter in name), EOS]) for name in names]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def decode(row: Tensor) -> str:
    return "".join(LETTERS[i - 3] for i in row.tolist() if i > EOS)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}


def small_bart() -> BartForConditionalGeneration:
    sizes = {f"{stack}_{what}": n for stack in ("encoder", "decoder") for what, n in SIZES.items()}
    tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=3 + len(LETTERS), d_model=64, max_position_embeddings=32, dropout=0.0, **sizes, **tokens)
    )


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    names: list[str],
    to: Callable[[str], str],
    steps: int,
    rate: float,
) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    draw = random.Random(1)
    model.train()
    for _ in range(steps):
        batch = draw.sample(names, 64)
        inputs, labels = encode(batch), encode(map(to, batch))
        loss = model(
            input_ids=inputs, attention_mask=inputs != PAD, labels=labels.masked_fill(labels == PAD, -100)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def convert(model: nn.Module, names: list[str], **how: object) -> list[str]:
    model.eval()
    inputs = encode(names)
    rows = model.generate(input_ids=inputs, attention_mask=inputs != PAD, max_new_tokens=24, do_sample=False, **how)
    return [decode(row) for row in rows]


def right(answers: list[str], names: list[str], to: Callable[[str], str]) -> str:
    return f"{sum(a == to(n) for a, n in zip(answers, names, strict=True)) / len(names):.1%}"


def main() -> None:
    torch.set_num_threads(1)  # the matrices are too small to share out
    torch.manual_seed(0)
    names = class_names()
    test, learn = names[:HELD_OUT], names[HELD_OUT:]
    model = small_bart()
    train(model, model.parameters(), learn, str, steps=400, rate=2e-3)
    print(f"base: copies {right(convert(model, test), test, str)}, converts {right(convert(model, test), test, snake)}")

    plan = peftc.plan(SPEC, model)
    peftc.compile(SPEC, model, seed=0)
    print(f"MAM: trains {plan.totals.trained:,} beside {plan.totals.base:,} frozen parameters")
    train(model, peftc.parameters(model).values(), learn, snake, steps=500, rate=5e-3)

    greedy = convert(model, test)
    print(f"greedy: converts {right(greedy, test, snake)}")
    print(f"the same without the cache: {greedy == convert(model, test, use_cache=False)}")
    print(f"four beams: converts {right(convert(model, test, num_beams=4), test, snake)}")
    print(", ".join(f"{name} → {answer}" for name, answer in list(zip(test, greedy, strict=True))[:4]))
    with peftc.disabled(model):
        print(f"disabled: copies {right(convert(model, test), test, str)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
