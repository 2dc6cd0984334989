"""One base with LoRA on all Linears, four ways, and the work that is timed: a forward, a train
step, one token.

base    the model as it is, frozen
peftc   compiled by peftc, unmerged
PEFT    `get_peft_model`, unmerged
inlined  each Linear with LoRA written into its forward by hand, without hooks, dtypes and choices
merged  compiled by peftc, trained values folded into the weights, edits removed
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from benchmarks.common import ALPHA, MODULES, SPEC, R, llama, table

Work = Callable[[], object]
WORK = ("forward", "train", "train and AdamW", "decode")
OTHERS = ("peftc", "PEFT", "inlined", "merged")


@dataclass(frozen=True)
class Shape:
    """A LLaMA, and its batch."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    tokens: int
    decoded: int = 16  # tokens, one by one, after `tokens` in the cache

    def base(self, dtype: torch.dtype, device: str) -> nn.Module:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        config = llama(self.hidden, self.ffn, self.layers, self.heads, self.kv_heads, self.vocabulary)
        with torch.device(device):
            return LlamaForCausalLM(config).to(dtype).requires_grad_(False)

    def __str__(self) -> str:
        return f"{self.name} (d {self.hidden}, {self.layers} layers, batch {self.batch} × {self.tokens} tokens)"


def contenders(base: nn.Module, adapters: str | None = None) -> dict[str, nn.Module]:
    """The four models with the same weights (merged has its own). `adapters`: the adapters' dtype,
    if it is not the library's default.
    """
    from peft import LoraConfig, get_peft_model

    memo = lambda: {id(p): p for p in base.parameters()}  # noqa: E731
    spec = SPEC if adapters is None else SPEC.replace("lora(x,", f"lora(x, dtype={adapters},")
    ours = peftc.compile(spec, copy.deepcopy(base, memo()), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = get_peft_model(
            copy.deepcopy(base, memo()),  # pyright: ignore[reportArgumentType]
            LoraConfig(r=R, lora_alpha=ALPHA, target_modules=MODULES),
            autocast_adapter_dtype=adapters in (None, "float32"),  # which is float32
        )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
        for name, parameter in peftc.parameters(ours).items():
            if name.endswith(".B"):
                parameter.normal_(0, 0.01)
    merged = copy.deepcopy(ours)
    peftc.fold(merged)
    inlined = with_inlined_lora(copy.deepcopy(base, memo()), ours)  # pyright: ignore[reportArgumentType]
    return {"base": base, "peftc": ours, "PEFT": theirs, "inlined": inlined, "merged": merged}


class InlinedLoRA(nn.Linear):
    """W x + alpha / r · B A x, as one would write it for a benchmark."""

    A: nn.Parameter
    B: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        h = F.linear(input, self.weight, self.bias)
        return torch.add(h, F.linear(F.linear(input, self.A), self.B), alpha=ALPHA / R)


def with_inlined_lora(model: nn.Module, compiled: nn.Module) -> nn.Module:
    """A model with the parameters of a compiled one, in its Linears."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in MODULES:
            own = {
                n.rpartition(".")[2]: p
                for n, p in compiled.get_submodule(name).named_parameters()
                if ".peftc." in f".{n}"
            }
            module.__class__ = InlinedLoRA
            module.A, module.B = (nn.Parameter(own[n].detach().clone()) for n in "AB")
    return model


def forward(model: nn.Module, shape: Shape) -> Work:
    ids = tokens(model, shape, shape.tokens)
    model.eval()

    def run() -> object:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    return run


def train(model: nn.Module, shape: Shape) -> Work:
    """Forward, and backward to the embeddings."""
    ids = tokens(model, shape, shape.tokens)
    own: Any = model
    with torch.no_grad():
        embedded = own.get_input_embeddings()(ids)
    embedded.requires_grad_()
    model.train()

    def run() -> object:
        embedded.grad = None
        loss = model(inputs_embeds=embedded, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    return run


def train_and_step(model: nn.Module, shape: Shape) -> Work:
    """The same, and a step of AdamW if anything is trained."""
    run = train(model, shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5) if trained else None

    def step() -> object:
        run()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    return step


def decode(model: nn.Module, shape: Shape) -> Work:
    """`decoded` tokens, one by one."""
    ids = tokens(model, shape, shape.tokens)
    with torch.no_grad():
        cache = model.eval()(input_ids=ids, use_cache=True).past_key_values

    def run() -> object:
        with torch.no_grad():
            for _ in range(shape.decoded):
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-shape.decoded)
        return cache

    return run


def tokens(model: nn.Module, shape: Shape, length: int) -> Tensor:
    device = next(model.parameters()).device
    return torch.arange(shape.batch * length, device=device).reshape(shape.batch, length) % shape.vocabulary


MAKE: Mapping[str, Callable[[nn.Module, Shape], Work]] = dict(
    zip(WORK, (forward, train, train_and_step, decode), strict=True)
)


def measured(works: Mapping[str, Work], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each work, in alternation; each round starts with another contender."""
    for work in works.values():
        work()
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = clock()
            works[name]()
            seconds[name].append(clock() - start)
    return seconds


def overheads(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The overhead of each: the median over the rounds of its time divided by the base's, minus
    one.
    """
    base = seconds["base"]
    others = ((name, own) for name, own in seconds.items() if name != "base")
    return {name: median(s / b for s, b in zip(own, base, strict=True)) - 1 for name, own in others}


def floor(model: nn.Module, shape: Shape, work: str) -> float:
    """The FLOPs that LoRA must add, relative to the base's.

    A product with a matrix of n entries costs 2n FLOPs a token forward, as much again for the
    gradient of its input, and once more for the gradient of a trained matrix. Attention: scores and
    values, 4·d for a pair of tokens, with both halves of the mask; both operands have gradients.
    """
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    inner = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in MODULES]
    extra = sum(R * (m.in_features + m.out_features) for m in inner)
    attention = 2 * shape.layers * shape.hidden * shape.tokens  # multiplications a token
    if work.startswith("train"):
        return 3 * extra / (2 * linears + 3 * attention)
    return extra / (linears + attention)


def line(shape: str, work: str, seconds: Mapping[str, list[float]], least: float) -> list[str]:
    """A row of the table: the base's median, and the overheads of the others."""
    overhead = overheads(seconds)
    costs = [f"{100 * overhead[name]:+.1f} %" for name in OTHERS]
    half = f"{overhead['peftc'] / overhead['PEFT']:.2f}" if overhead["PEFT"] > 0 else "-"
    return [shape, work, f"{1e3 * median(seconds['base']):.1f} ms", *costs, half, f"{100 * least:.1f} %"]


HEAD = ["shape", "work", "base", *OTHERS, "peftc : PEFT", "FLOP floor"]


def tabulated(lines: Iterable[list[str]]) -> str:
    return table(HEAD, list(lines))
