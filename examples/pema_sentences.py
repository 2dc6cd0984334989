"""Sentences of docstrings as numbers: text for a base to repair, and the task of examples/pema.py,
imperative to third person.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from docstrings import docstrings
from external_memory import IGNORED, Batch
from torch import Tensor

MODULES = """
argparse ast asyncio bdb calendar cmd code codecs collections concurrent configparser contextlib csv
dataclasses datetime decimal difflib dis doctest email enum fractions ftplib functools gettext gzip http
imaplib importlib inspect ipaddress json logging mailbox multiprocessing optparse os pathlib pickle pydoc
random shutil smtplib socket ssl statistics string subprocess tarfile tempfile threading tkinter turtle typing
unittest urllib xml zipfile
"""
SPECIAL = ("<pad>", "<bos>", "<to>", "<eos>", "<unknown>")
PAD, BOS, TO, EOS, UNKNOWN = range(5)
INSTRUCTION = 2  # <bos> before an input and <to> after it
SHORTEST, LONGEST = 3, 12

Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Sentences:
    """The vocabulary, running text as token ids, and the task's pairs, which are not in
    the text.
    """

    words: tuple[str, ...]
    running: list[list[int]]
    task: list[Pair]

    def written(self, numbers: Iterable[int]) -> str:
        """The words up to the end of the sentence."""
        words = list(numbers)
        end = words.index(EOS) if EOS in words else len(words)
        return " ".join(self.words[i] for i in words[:end])


def third_person(verb: str) -> str:
    """process → processes, copy → copies, return → returns"""
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + ("es" if re.search(r"(s|x|ch|sh|o)$", verb) else "s")


def tokens(sentence: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", sentence.lower())


def read(modules: str = MODULES, size: int = 1500) -> Sentences:
    """The task: summary lines that begin with a verb whose third person begins another docstring.
    The rest is running text.
    """
    sentences = dict.fromkeys(text for module in modules.split() for text in docstrings(module))
    parts = [re.split(r"(?<=[.!?])\s+|\n\s*\n", text, maxsplit=1) for text in sentences]
    summaries = [tokens(summary) for summary, *_ in parts]
    bodies = [tokens(" ".join(rest)) for _, *rest in parts]
    words = SPECIAL + tuple(w for w, _ in Counter(w for line in summaries + bodies for w in line).most_common(size))
    number = {word: i for i, word in enumerate(words)}
    begun = {line[0] for line in summaries if line}
    task: dict[tuple[str, ...], Pair] = {}
    running: list[list[int]] = []
    for line in summaries + bodies:
        ids = [number.get(word, UNKNOWN) for word in line]
        third = third_person(line[0]) if line else ""
        fits = SHORTEST <= len(line) <= LONGEST and UNKNOWN not in ids
        if fits and third in begun and third in number and line[0] not in ("a", "i"):
            task[tuple(line)] = ids, [number[third], *ids[1:]]
        elif len(line) >= SHORTEST:
            running.append(ids)
    pairs = list(task.values())
    random.Random(0).shuffle(pairs)
    return Sentences(words, running, pairs)


def batch(pairs: Iterable[Pair]) -> Batch:
    """<bos> input <to>, padded on the left; target <eos>, padded on the right."""
    givens, targets = zip(*(([BOS, *source, TO], [*target, EOS]) for source, target in pairs), strict=True)
    inputs = _padded([row[::-1] for row in givens], PAD).flip(1)
    return Batch(inputs, (inputs != PAD).long(), _padded(targets, IGNORED))


def _padded(rows: Iterable[list[int]], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


class Repair:
    """Random (damaged, whole) pieces of running text; a fifth are random words, which speeds up
    learning to copy.
    """

    def __init__(self, sentences: Sentences, seed: int) -> None:
        self.sentences, self.draw = sentences, random.Random(seed)
        self.weights = [len(line) for line in sentences.running]

    def pairs(self, n: int) -> list[Pair]:
        wholes = [self._random() if self.draw.random() < 0.2 else self._piece() for _ in range(n)]
        return [(self._damaged(whole), whole) for whole in wholes]

    def _word(self) -> int:
        return self.draw.randrange(len(SPECIAL), len(self.sentences.words))

    def _random(self) -> list[int]:
        return [self._word() for _ in range(self.draw.randint(SHORTEST, LONGEST))]

    def _piece(self) -> list[int]:
        (line,) = self.draw.choices(self.sentences.running, self.weights)
        n = self.draw.randint(SHORTEST, LONGEST)
        start = self.draw.randrange(max(1, len(line) - n + 1))
        return line[start : start + n]

    def _damaged(self, whole: list[int]) -> list[int]:
        """Of a hundred words, six are replaced, three are dropped, and three are followed by an
        inserted word.
        """
        words: list[int] = []
        for word in whole:
            chance = self.draw.random()
            if chance < 0.06:
                words.append(self._word())
            elif chance < 0.09:
                continue
            else:
                words += [word, self._word()] if chance < 0.12 else [word]
        return words
