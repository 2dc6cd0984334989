"""A short test of peftc itself, on a model of two layers: LoRA from the plan to the fold."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import peftc
from peftc.installation.record import is_installed
from peftc.models.names import error_summary
from peftc.models.sources import resolve

SPEC = "peft 2  edit qv at layer[*].attn.{q, v} { h += lora(x, r=4, alpha=8) }"
LAYERS, WIDTH, RANK = 2, 16, 4
COUNT = LAYERS * 2 * RANK * (WIDTH + WIDTH)  # A and B, at the queries and values of each layer
MODEL = "meta-llama/Llama-3.2-1B"  # of the catalogue: its class, in other sizes
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // 2,
    "vocab_size": 32,
}
TOLERANCE = 1e-5  # of sums in float32 in another order


@dataclass(frozen=True)
class Step:
    """A step of the test. `detail`: what it has shown, or why it has failed."""

    name: str
    ok: bool
    detail: str


class Failure(Exception):
    """A step that has another result than it should have."""


def self_test(device: str = "cpu") -> tuple[Step, ...]:
    """The steps of the test on a device, up to the first that fails."""
    results: list[Step] = []
    subject = Subject(torch.device(device))
    for name, step in subject.steps():
        try:
            results.append(Step(name, True, step()))
        except Exception as error:  # whatever is wrong is what the test is for
            detail = str(error) if isinstance(error, Failure) else error_summary(error)
            return (*results, Step(name, False, detail))
    return tuple(results)


class Subject:
    """A model, its base, and what is done with them."""

    def __init__(self, device: torch.device) -> None:
        source = resolve(MODEL)
        assert source.model_class is not None
        config: Any = copy.deepcopy(source.config)
        for name, value in SIZES.items():
            setattr(config, name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.base: Any = cast(nn.Module, source.model_class(config)).to(device).eval()
        self.model: Any = copy.deepcopy(self.base)
        self.ids = torch.arange(12, device=device).view(2, 6)

    def steps(self) -> tuple[tuple[str, Callable[[], str]], ...]:
        return (
            ("plan", self.plan),
            ("compile", self.compile),
            ("train", self.train),
            ("save", self.save),
            ("fold", self.fold),
            ("remove", self.remove),
        )

    def plan(self) -> str:
        trained = peftc.plan(SPEC, self.base, cache=False).totals.trained
        require(trained == COUNT, f"LoRA of rank {RANK} has {COUNT:,} parameters here, and the plan says {trained:,}")
        return f"{trained:,} parameters"

    def compile(self) -> str:
        peftc.compile(SPEC, self.model, seed=0, cache=False)
        count = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        require(count == COUNT, f"{count:,} parameters are trained, and the plan says {COUNT:,}")
        require(torch.equal(logits(self.model, self.ids), logits(self.base, self.ids)), "the output is not the base's")
        return "the output is the base's, bit for bit"

    def train(self) -> str:
        optimizer = torch.optim.SGD(peftc.parameters(self.model).values(), lr=1.0)
        losses: list[float] = []
        for _ in range(3):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        require(losses[-1] < losses[0], f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f}")
        with peftc.disabled(self.model):
            require(torch.equal(logits(self.model, self.ids), logits(self.base, self.ids)), "the base has changed")
        return "the loss falls, and the base stays"

    def save(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            peftc.save(self.model, Path(folder) / "adapter")
            loaded = peftc.load(Path(folder) / "adapter", copy.deepcopy(self.base))
        require(torch.equal(logits(loaded, self.ids), logits(self.model, self.ids)), "what is loaded computes another")
        return "what is loaded computes the same, bit for bit"

    def fold(self) -> str:
        folded = copy.deepcopy(self.model)
        peftc.fold(folded)
        require(not is_installed(folded), "there are edits left")
        difference = (logits(folded, self.ids) - logits(self.model, self.ids)).abs().max().item()
        require(difference <= TOLERANCE, f"the folded model differs by {difference:.1e}")
        return f"the weights compute the same to {TOLERANCE:.0e}"

    def remove(self) -> str:
        peftc.remove(self.model)
        require(torch.equal(logits(self.model, self.ids), logits(self.base, self.ids)), "the output is not the base's")
        return "the base is back, bit for bit"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Failure(message)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits
