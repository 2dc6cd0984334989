"""A recipe under test: a spec, the same equations by hand, and the promises about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests import zoo
from tests.reference.methods import Method

ENCODER_DECODER = ("bart", "t5")
WITH_BIAS = ("bart", "bert", "roberta", "gpt2", "opt")
TIED = ("bart", "bert", "roberta", "t5", "gpt2", "opt")  # head and embedding are one matrix
GATED = ("llama", "qwen3")


@dataclass(frozen=True)
class Recipe:
    """`identity`: a no-op at initialisation. `folds`: the names of the edits that fold; a bool
    means all or none; None accepts the planner's verdict, which must then be true.
    """

    name: str
    spec: str
    method: Method
    identity: bool
    folds: bool | frozenset[str] | None = False
    on: tuple[str, ...] = zoo.ARCHITECTURES
    edits: tuple[str, ...] = field(default=("e",))

    @property
    def text(self) -> str:
        return "peft 1\n" + self.spec

    def foldable(self, edit: str, name: str) -> bool:
        if self.name == "head" and name in TIED:
            return False  # the fold would change the embedding, too
        assert self.folds is not None
        return self.folds if isinstance(self.folds, bool) else edit in self.folds


def shipped(name: str, arguments: str) -> str:
    """A recipe of `specs/`, with sizes for small models."""
    return f"use {name} from std\napply {name}({arguments})"


def at(site: str, value: str, op: str = "+=") -> str:
    """One equation of h in one edit, `e`."""
    return f"edit e at {site} {{ h {op} {value} }}"
