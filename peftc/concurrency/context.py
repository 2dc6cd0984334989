"""What a context (thread or coroutine) chooses for a model: disabled edits, the task, the adapter.

Eager code reads a `ContextVar`. Dynamo cannot trace one, so code under `torch.compile` reads an
attribute of the module `DYNAMO_VIEW`. Dynamo guards on it, and each evaluation of the guard reads
the `ContextVar` of the calling context: one specialization per choice.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils import checkpoint

from peftc.concurrency.interrupts import Shielded
from peftc.diagnostics import Diagnostic, PeftcError

ALL = "*"  # instead of names: all edits, including those of later specs
NO_ADAPTER = ""  # the name of the base among attached adapters
CHOICE = "peftc_choice"  # the module attribute that holds a `ChoiceVar`

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rows:
    """The index of the task, or of the adapter, of each row (batch,), into `names`.

    `present` are the names that rows have; of adapters, `NO_ADAPTER` is the last name. `groups`
    caches what follows from the numbers, so that no site of a forward sorts rows again.
    """

    numbers: Tensor
    names: tuple[str, ...]
    present: tuple[str, ...]
    groups: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def all_have(self, names: tuple[str, ...], key: str) -> bool:
        """Whether each row has one of these. `key`: a text of the names, which has its hash."""
        result: bool | None = self.groups.get(key)
        if result is None:
            result = self.groups[key] = set(self.present) <= set(names)
        return result


class AttachedEdits(dict[str, frozenset[str]]):
    """The edits of each attached adapter, by its name. It does not change."""

    @cached_property
    def edits(self) -> frozenset[str]:
        """Those of all adapters."""
        return frozenset[str]().union(*self.values())


@dataclass(frozen=True, eq=False)
class Choice:
    """The names of the disabled edits (or `ALL`), and the task and adapter of the batch or of each
    row; None where they are not chosen.

    Args: `attached`: the edits of each attached adapter. They act where it, or another one that has
    them, is chosen.
    """

    off: frozenset[str] = frozenset()
    task: str | Rows | None = None
    adapter: str | Rows | None = None
    attached: AttachedEdits = field(default_factory=AttachedEdits)
    key: str = field(init=False)  # identifies what does not act; empty if all edits do

    def __post_init__(self) -> None:
        off = self.off | self.idle if self.attached else self.off
        object.__setattr__(self, "key", ALL if ALL in off else " ".join(sorted(off)))

    @property
    def idle(self) -> frozenset[str]:
        """The edits of adapters that are not chosen."""
        adapters = self.adapter.present if isinstance(self.adapter, Rows) else (self.adapter,)
        return self.attached.edits.difference(*(self.attached.get(name or NO_ADAPTER, ()) for name in adapters))

    def then(self, *inner: Choice) -> Choice:
        """This choice with those of inner blocks applied."""
        task = next((choice.task for choice in reversed(inner) if choice.task is not None), self.task)
        adapter = next((choice.adapter for choice in reversed(inner) if choice.adapter is not None), self.adapter)
        return Choice(self.off.union(*(choice.off for choice in inner)), task, adapter, self.attached)


NO_CHOICE = Choice()
NO_EDITS = Choice(frozenset({ALL}))


@dataclass(frozen=True, eq=False)
class OpenBlocks:
    """The open blocks of a context for one model, and the choice that they make of `default`."""

    blocks: tuple[Choice, ...]
    default: Choice
    choice: Choice


_open_blocks: ContextVar[Mapping[int, OpenBlocks] | None] = ContextVar("peftc_choices", default=None)
_count = itertools.count()
_variables: weakref.WeakValueDictionary[int, ChoiceVar] = weakref.WeakValueDictionary()


class ChoiceVar:
    """The choice variable of one model; `default` acts outside blocks. A copy has its own."""

    def __init__(self, default: Choice = NO_CHOICE) -> None:
        self.default = default
        self.number = next(_count)
        self.off_name = f"off_{self.number}"
        self.task_name, self.adapter_name = f"task_{self.number}", f"adapter_{self.number}"
        _variables[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> ChoiceVar:
        return ChoiceVar(self.default)

    def __reduce__(self) -> Any:
        default = self.default
        return (_unpickle, (default.off, default.task, default.adapter, default.attached))

    def get(self) -> Choice:
        """The choice of the current context. Not traceable by `torch.compile`."""
        contexts = _open_blocks.get()
        own = None if contexts is None else contexts.get(self.number)
        if own is None:
            return self.default
        return own.choice if own.default is self.default else self.default.then(*own.blocks)

    @property
    def off(self) -> str:
        """The `key` of the disabled edits."""
        if is_dynamo_compiling():
            return getattr(DYNAMO_VIEW, self.off_name)
        return self.default.key if _open_blocks.get() is None else self.get().key  # fast path

    @property
    def task(self) -> str | Rows | None:
        if is_dynamo_compiling():
            return getattr(DYNAMO_VIEW, self.task_name)
        return self.get().task

    @property
    def adapter(self) -> str | Rows | None:
        if is_dynamo_compiling():
            return getattr(DYNAMO_VIEW, self.adapter_name)
        return self.get().adapter

    def is_off(self, edit: str) -> bool:
        off = self.off
        return bool(off) and (off == ALL or edit in off.split(" "))

    def set_default(self, default: Choice) -> None:
        self.default = default

    def blocks(self) -> tuple[Choice, ...]:
        """The open blocks of the current context."""
        own = (_open_blocks.get() or {}).get(self.number)
        return () if own is None else own.blocks

    def set_blocks(self, blocks: tuple[Choice, ...]) -> None:
        others = {number: own for number, own in (_open_blocks.get() or {}).items() if number != self.number}
        own = {self.number: OpenBlocks(blocks, self.default, self.default.then(*blocks))} if blocks else {}
        _open_blocks.set({**others, **own} or None)

    def fixed(self) -> ChoiceVar:
        """A variable with the current choice in all contexts, for a replica in another thread."""
        return ChoiceVar(self.get())


def _unpickle(*parts: Any) -> ChoiceVar:
    return ChoiceVar(Choice(*parts))


def _view(name: str) -> Any:
    kind, _, number = name.rpartition("_")
    variable = _variables.get(int(number)) if number.isdigit() else None
    if variable is None or kind not in ("off", "task", "adapter"):
        raise AttributeError(name)
    choice = variable.get()
    return choice.key if kind == "off" else getattr(choice, kind)


DYNAMO_VIEW = types.ModuleType("peftc.concurrency.context.view", "The current choices as attributes, for dynamo.")
vars(DYNAMO_VIEW)["__getattr__"] = _view


class ChoiceBlock(Shielded[nn.Module]):
    """A context manager that makes a choice for a model. It is reentrant and reusable."""

    def __init__(self, model: nn.Module, variable: ChoiceVar, choice: Choice) -> None:
        super().__init__()
        self.model, self.variable, self.choice = model, variable, choice

    def open(self) -> nn.Module:
        self.variable.set_blocks((*self.variable.blocks(), self.choice))
        return self.model

    def close(self, *_: object) -> None:
        """Raises: P431 in another context than that which entered the block."""
        blocks = self.variable.blocks()
        last = max((i for i, block in enumerate(blocks) if block is self.choice), default=None)
        if last is None:
            help_ = "close a generator in the thread or coroutine that started it"
            raise PeftcError(Diagnostic("P431", "this block was entered in another context", help=help_))
        self.variable.set_blocks(blocks[:last] + blocks[last + 1 :])


def bind_context(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, run with the current choices in any later context."""
    blocks = _open_blocks.get()

    def run(*args: Any, **kwargs: Any) -> T:
        token = _open_blocks.set(blocks)
        try:
            return function(*args, **kwargs)
        finally:
            _open_blocks.reset(token)

    return run


@cache
def preserve_choices() -> None:
    """From now on, what `torch.utils.checkpoint` recomputes has the choices of its first run."""
    # torch has no hook for that: the two constructors that store the function are wrapped.
    reentrant: Any = checkpoint.CheckpointFunction
    frame: Any = vars(checkpoint)["_CheckpointFrame"]
    reentrant.forward = staticmethod(_bind_second(reentrant.forward))
    frame.__init__ = _bind_second(frame.__init__)


def _bind_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with its second argument, the recomputed function, bound to the context."""

    @wraps(function)
    def wrapper(first: Any, recomputed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(first, bind_context(recomputed), *args, **kwargs)

    return wrapper
