"""PEMA end to end on one core, compared with kNN-LM and LoRA: docstrings from the imperative
("Return a list.") to the third person ("Returns …").

The base, a small LLaMA, is first trained to repair sentences with replaced, missing or extra words.
It never sees the task. Its owner runs it once on the task's sentences, and shares the head's
inputs, the target tokens and a copy of the head. PEMA trains on these files without the base, and
then generates with it. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pema_sentences as text
import torch
import transformers
from external_memory import IGNORED, Batch, CausalLM, Memory, NearestNeighbours, collect, contexts, greedy
from pema_method import (
    Constant,
    Head,
    NextToken,
    Pema,
    PemaTokens,
    Share,
    Unrolling,
    generate,
    input_lengths,
    joint_loss,
    mix,
    reconstruct,
    retrain,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftc

LORA = """
peft 1
use lora from std
apply lora(r=8)
"""
RANK, KAPPA, ROWS, SENTENCES = 48, 0.2, 256, 32
SHARES = [i / 10 for i in range(1, 11)]
NEAREST = [(8, 1.0), (64, 10.0), (1024, 1.0), (1024, 10.0)]  # k and temperature
LEGEND = """
kB while training: frozen weights; trained weights with gradients and Adam's moments; what autograd
keeps of one batch (256 pairs, or 32 sentences of about as many tokens), counted by
saved_tensors_hooks. *: the memory has the contexts of right answers, not of the base's own.
"""


@dataclass(frozen=True)
class Effort:
    """How long to train: steps of the base, epochs over the task, and the maximum number of its
    sentences.
    """

    base: int = 700
    epochs: int = 20
    sentences: int = 1000


@dataclass(frozen=True)
class Held:
    """Memory during training, in bytes. The optimizer is Adam: two values for every trained
    parameter.
    """

    trained: int
    frozen: int
    activations: int

    @property
    def total(self) -> int:
        return self.frozen + 4 * self.trained + self.activations  # parameters, gradients, two moments


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sentences are short
        pad_token_id=text.PAD,
        bos_token_id=text.BOS,
        eos_token_id=text.EOS,
    )
    return LlamaForCausalLM(config)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of -log p over the target tokens; the head computes no others."""
    ids = torch.cat([batch.inputs, batch.target.clamp(min=0)], dim=1)
    mask = torch.cat([batch.mask, torch.ones_like(batch.target)], dim=1)
    positions, steps = (mask.cumsum(1) - 1).clamp(min=0), batch.target.shape[1]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=steps + 1).logits
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch.target, ignore_index=IGNORED)


def train(
    model: nn.Module, parameters: list[nn.Parameter], draw: Callable[[int], Batch], steps: int, rate: float
) -> nn.Module:
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 2), pct_start=0.1)
    model.train()
    for step in range(steps):
        loss = loss_of(model, draw(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def batches(pairs: list[text.Pair], rows: int = SENTENCES) -> list[Batch]:
    return [text.batch(pairs[i : i + rows]) for i in range(0, len(pairs), rows)]


def activations(loss: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Bytes that autograd saves for the backward pass of one batch: each storage once, without the
    weights.
    """
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(size for pointer, size in storages.items() if pointer not in own)


def memory_use(trained: list[nn.Parameter], frozen: Sequence[Tensor], loss: Callable[[], Tensor]) -> Held:
    return Held(size(trained), size(frozen), activations(loss, [*trained, *frozen]))


def size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def train_pema(memory: Memory, head: Head, effort: Effort) -> tuple[Pema, Held]:
    """Trains from the files and the copied head, without the base."""
    pema = Pema(memory.f.shape[1], RANK)
    first = reconstruct(pema, memory, effort.epochs, ROWS, rate=1e-2)
    last = retrain(pema, head, memory, effort.epochs, KAPPA, ROWS, rate=1e-2)
    print(f"PEMA: reconstruction {first:.3f}, then κ L_rct + (1 - κ) L_pd {last:.3f}, from {len(memory):,} pairs")
    f, y = next(memory.batches(ROWS, seed=0))
    return pema, memory_use([pema.A, pema.B_pd], [head.weight, pema.B_rct], lambda: joint_loss(pema, head, f, y, KAPPA))


def train_lora(model: nn.Module, learn: list[text.Pair], effort: Effort) -> Held:
    """Trains LoRA for as many epochs on the same sentences."""
    peftc.compile(LORA, model, seed=0)
    trained = list(peftc.parameters(model).values())
    every = batches(learn)
    train(model, trained, lambda step: every[step % len(every)], effort.epochs * len(every), rate=1e-2)
    own = {id(parameter) for parameter in trained}
    frozen = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return memory_use(trained, frozen, lambda: loss_of(model, every[0]))


@dataclass(frozen=True)
class HeldOut:
    """f before every token of held-out targets, the token, its position in its sentence, and the
    input's SL: (n, d), (n) × 3.
    """

    f: Tensor
    y: Tensor
    step: Tensor
    length: Tensor

    @staticmethod
    def of(model: CausalLM, pairs: list[text.Pair]) -> HeldOut:
        rows: list[tuple[Tensor, ...]] = []
        for batch in batches(pairs):
            valid = batch.target != IGNORED
            f = contexts(model, batch.inputs, batch.mask, batch.target.clamp(min=0))
            lengths = input_lengths(batch.mask, text.INSTRUCTION)[:, None].expand_as(valid)
            rows.append((f[valid], batch.target[valid], valid.nonzero()[:, 1], lengths[valid]))
        return HeldOut(*(torch.cat(part) for part in zip(*rows, strict=True)))

    @torch.no_grad()
    def plain(self, head: Head) -> float:
        """The perplexity of the model itself."""
        return nn.functional.cross_entropy(head(self.f), self.y).exp().item()

    @torch.no_grad()
    def perplexity(self, head: Head, memory: NextToken, share: Tensor) -> float:
        p = mix(share, memory(self.f), head(self.f).softmax(-1))
        return p.gather(1, self.y[:, None]).log().mean().neg().exp().item()


def right(pairs: list[text.Pair], answer: Callable[[Batch], Tensor]) -> float:
    """The share of sentences that are rewritten without a mistake."""
    correct = 0
    for batch in batches(pairs):
        expected = batch.target.masked_fill(batch.target == IGNORED, text.EOS)
        correct += int((answer(batch)[:, : expected.shape[1]] == expected).all(1).sum())
    return correct / len(pairs)


@dataclass(frozen=True)
class Mixture:
    """The mixture of a memory's distribution and the base's, with the share that is best on
    validation sentences.
    """

    memory: NextToken
    most: float
    gradual: bool

    @staticmethod
    def tuned(memories: list[NextToken], gradual: bool, head: Head, tune: HeldOut) -> Mixture:
        every = [Mixture(memory, most, gradual) for memory in memories for most in SHARES]
        return min(every, key=lambda one: one.perplexity(head, tune))

    def share(self, lengths: Tensor) -> Share:
        return Unrolling(lengths, self.most) if self.gradual else Constant(self.most)

    def perplexity(self, head: Head, data: HeldOut) -> float:
        return data.perplexity(head, self.memory, self.share(data.length)(data.step))

    def answer(self, model: CausalLM, batch: Batch, **how: object) -> Tensor:
        share = self.share(input_lengths(batch.mask, text.INSTRUCTION))
        return generate(model, batch.inputs, batch.mask, text.LONGEST + 1, self.memory, share, **how)


@dataclass(frozen=True)
class Table:
    """Prints a line for each method: parameters, memory while training, and results on the test
    sentences.
    """

    head: Head
    tune: HeldOut
    held_out: HeldOut
    test: list[text.Pair]

    @staticmethod
    def begun(base: CausalLM, head: Head, tune: list[text.Pair], test: list[text.Pair]) -> Table:
        titles = ("trained", "frozen", "training", "batch", "kB in all", "perplexity", "right")
        print(f"\n{'':34}" + "".join(f"{title:>11}" for title in titles))
        return Table(head, HeldOut.of(base, tune), HeldOut.of(base, test), test)

    def mixture(
        self, name: str, base: CausalLM, memories: list[NextToken], gradual: bool, memory: Held | None
    ) -> Mixture:
        best = Mixture.tuned(memories, gradual, self.head, self.tune)
        name += f", λ_max = {best.most}, unrolled" if gradual else f", λ = {best.most}"
        answers = right(self.test, lambda batch: best.answer(base, batch))
        self.line(name, memory, best.perplexity(self.head, self.held_out), answers)
        return best

    def model(self, name: str, model: CausalLM, memory: Held | None) -> None:
        answers = right(self.test, lambda batch: base_answer(model, batch))
        self.line(name, memory, HeldOut.of(model, self.test).plain(self.head), answers)

    def line(self, name: str, memory: Held | None, perplexity: float, answers: float) -> None:
        sizes = ["–"] * 5
        if memory is not None:
            thousands = (memory.frozen, 4 * memory.trained, memory.activations, memory.total)
            sizes = [f"{memory.trained // 4:,}", *(f"{n / 1e3:,.0f}" for n in thousands)]
        print(f"{name:34}" + "".join(f"{entry:>11}" for entry in sizes) + f"{perplexity:11.3f}{answers:11.1%}")


def base_answer(model: CausalLM, batch: Batch) -> Tensor:
    return greedy(model, batch.inputs, batch.mask, text.LONGEST + 1)


def at_the_papers_size() -> None:
    """Memory of weights, gradients and moments for the model of the paper's Table 1, with the
    authors' rank; no weights are read.
    """
    plan = peftc.plan(LORA, "facebook/opt-1.3b")
    d, vocabulary, r = 2048, 50272, 512
    lora = Held(4 * plan.totals.trained, 4 * plan.totals.base, 0)
    pema = Held(4 * 2 * r * d, 4 * (vocabulary * d + r * d), 0)
    print("\nOPT 1.3B in float32, counted without what a batch takes:")
    for name, memory in (("LoRA, r = 8, q and v", lora), ("PEMA, r = 512", pema)):
        print(f"  {name:21} {memory.trained // 4:9,} trained, {memory.total / 1e9:.2f} GB while training")
    print(f"  {pema.total / lora.total:.2f} of LoRA's; the paper measures a tenth (Table 1)")


def main(effort: Effort | None = None) -> None:
    effort, start = effort or Effort(), time.perf_counter()
    torch.set_num_threads(1)  # stable timing on a busy machine
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    sentences = text.read()
    task = sentences.task[: effort.sentences]
    cut, end = len(task) * 7 // 10, len(task) * 8 // 10
    learn, tune, test = task[:cut], task[cut:end], task[end:]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = small_llama(len(sentences.words))
        repair = text.Repair(sentences, seed=1)
        train(base, list(base.parameters()), lambda _: text.batch(repair.pairs(48)), effort.base, rate=5e-3)
        base.save_pretrained(folder / "base")
        print(f"base: {base.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s")
        print(f"sentences: {len(learn)} to learn from, {len(tune)} to choose λ with, {len(test)} to test with")

        collect(base, batches(learn), folder / "own")
        collect(base, batches(learn), folder / "wanted", own=False)
        head, alive = Head.copied(base), weakref.ref(base)
        del base
        gc.collect()
        print(f"the base is in memory: {alive() is not None}")
        memory, other = (Memory.open(folder / part) for part in ("own", "wanted"))
        print(f"external memory: {len(memory):,} pairs, {(memory.f.nbytes + memory.y.nbytes) / 1e6:.1f} MB of files")
        (pema, used), (second, _) = (train_pema(pairs, head, effort) for pairs in (memory, other))

        base = LlamaForCausalLM.from_pretrained(folder / "base").eval()
        table = Table.begun(base, head, tune, test)
        table.model("base", base, None)
        neighbours: list[NextToken] = [NearestNeighbours(memory, len(sentences.words), k, t) for k, t in NEAREST]
        table.mixture("kNN-LM", base, neighbours, False, None)
        table.mixture("kNN-LM", base, neighbours, True, None)
        table.mixture("PEMA", base, [PemaTokens(pema, head)], False, used)
        best = table.mixture("PEMA", base, [PemaTokens(pema, head)], True, used)
        table.mixture("PEMA*", base, [PemaTokens(second, head)], True, used)
        lora = copy.deepcopy(base)
        table.model("LoRA, r = 8, q and v", lora, train_lora(lora, learn, effort))
        print(LEGEND)

        some = text.batch(test[:8])
        answers = best.answer(base, some)
        print(f"without the cache the same: {torch.equal(answers, best.answer(base, some, use_cache=False))}")
        for (sentence, _), answer in list(zip(test, answers.tolist(), strict=False))[:4]:
            print(f"{sentences.written(sentence)} → {sentences.written(answer)}")
    at_the_papers_size()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
