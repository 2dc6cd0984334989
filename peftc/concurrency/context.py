"""What the present context, a thread or a coroutine, has chosen for a model: the edits that do not act, and the task.

Eager code reads a `ContextVar`. Dynamo cannot trace one, so code under `torch.compile` reads an attribute of `VIEW`: dynamo
guards on it, and every evaluation of the guard reads the `ContextVar` of the calling context. One choice, one specialisation.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from peftc.concurrency.interrupts import Shielded
from peftc.diagnostics import Diagnostic, PeftcError

ALL = "*"  # in the place of the names of edits: all of them, those of later specs too
CHOICE = "peftc_choice"  # the name of a `ChoiceVar` in the attributes of a module

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rows:
    """The number of the task of each row (batch,), and the names that are numbered."""

    numbers: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """`off`: the edits that do not act, `ALL` among them where none does. `task`: of the batch, or of each of its rows."""

    off: frozenset[str] = frozenset()
    task: str | Rows | None = None
    key: str = field(init=False)  # of `off`: equal exactly where `off` is; empty where all edits act

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", ALL if ALL in self.off else " ".join(sorted(self.off)))

    def then(self, *others: Choice) -> Choice:
        """This choice, changed by others inside of it."""
        task = next((o.task for o in reversed(others) if o.task is not None), self.task)
        return Choice(self.off.union(*(o.off for o in others)), task)


NONE = Choice()


@dataclass(frozen=True, eq=False)
class Open:
    """The choices of the blocks that a context is in, for one model, and what they amount to where `default` is the model's."""

    blocks: tuple[Choice, ...]
    default: Choice
    choice: Choice


_open: ContextVar[Mapping[int, Open] | None] = ContextVar("peftc_choices", default=None)
_count = itertools.count()
_variables: weakref.WeakValueDictionary[int, ChoiceVar] = weakref.WeakValueDictionary()


class ChoiceVar:
    """A context variable of one model. A copy of the model has one of its own, with the same `default` and no open block.

    `default`: what the model does where no block says anything else; kept in copies and pickles.
    """

    def __init__(self, default: Choice = NONE) -> None:
        self.default = default
        self.number = next(_count)
        self.off_name, self.task_name = f"off_{self.number}", f"task_{self.number}"
        _variables[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> ChoiceVar:
        return ChoiceVar(self.default)

    def __reduce__(self) -> Any:
        return (restored, (self.default.off, self.default.task))

    def get(self) -> Choice:
        """The choice of the present context. Not under `torch.compile`."""
        opened = _open.get()
        if opened is None:
            return self.default
        own = opened.get(self.number)
        if own is None:
            return self.default
        return own.choice if own.default is self.default else self.default.then(*own.blocks)

    @property
    def off(self) -> str:
        """The `key` of the edits that do not act."""
        if is_dynamo_compiling():
            return getattr(VIEW, self.off_name)
        return self.default.key if _open.get() is None else self.get().key  # the quick way is for every forward

    @property
    def task(self) -> str | Rows | None:
        if is_dynamo_compiling():
            return getattr(VIEW, self.task_name)
        return self.get().task

    def is_off(self, edit: str) -> bool:
        off = self.off
        return bool(off) and (off == ALL or edit in off.split(" "))

    def blocks(self) -> tuple[Choice, ...]:
        """Those that the present context is in."""
        own = (_open.get() or {}).get(self.number)
        return () if own is None else own.blocks

    def set_blocks(self, blocks: tuple[Choice, ...]) -> None:
        others = {n: one for n, one in (_open.get() or {}).items() if n != self.number}
        own = {self.number: Open(blocks, self.default, self.default.then(*blocks))} if blocks else {}
        _open.set({**others, **own} or None)

    def fixed(self) -> ChoiceVar:
        """One that keeps the present choice in every context: for a replica of the model that another thread will run."""
        return ChoiceVar(self.get())


def restored(off: frozenset[str], task: str | None) -> ChoiceVar:
    return ChoiceVar(Choice(off, task))


def _view(name: str) -> Any:
    kind, _, number = name.rpartition("_")
    variable = _variables.get(int(number)) if number.isdigit() else None
    if variable is None or kind not in ("off", "task"):
        raise AttributeError(name)
    choice = variable.get()
    return choice.key if kind == "off" else choice.task


VIEW = types.ModuleType("peftc.concurrency.context.view", "The present choices as attributes, for dynamo.")
vars(VIEW)["__getattr__"] = _view


class ChoiceBlock(Shielded[nn.Module]):
    """`with`: inside, the present context has made a choice for a model. It may be entered again, and in several contexts."""

    def __init__(self, model: nn.Module, variable: ChoiceVar, choice: Choice) -> None:
        super().__init__()
        self.model, self.variable, self.choice = model, variable, choice

    def open(self) -> nn.Module:
        self.variable.set_blocks((*self.variable.blocks(), self.choice))
        return self.model

    def close(self, *_: object) -> None:
        """Raises: P431 in another context than that in which the block was entered."""
        blocks = self.variable.blocks()
        last = max((i for i, block in enumerate(blocks) if block is self.choice), default=None)
        if last is None:
            raise PeftcError(Diagnostic("P431", "this block was entered in another context", help=FOREIGN))
        self.variable.set_blocks(blocks[:last] + blocks[last + 1 :])


FOREIGN = "close a generator in the thread or coroutine that has begun it"


def bind_context(function: Callable[..., T]) -> Callable[..., T]:
    """The function, run with the present choices whoever calls it, and whenever."""
    opened = _open.get()

    def run(*args: Any, **kwargs: Any) -> T:
        token = _open.set(opened)
        try:
            return function(*args, **kwargs)
        finally:
            _open.reset(token)

    return run
