"""Intercepts the operations of a running model: the residual sum behind a module, and the attention whose queries it computes.

Values are followed by labels: what a labelled tensor goes into has its label, until the operation that is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from peftc.verification.witness.interpreter import Pair
from peftc.verification.witness.locations import Unreachable

SUMS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
SOFTMAX = frozenset({"softmax"})


class Label(NamedTuple):
    """`sum`: the result of a sub-layer on its way to the residual sum; `summed`: the same, as a part of a sum of two results that
    are on it together (parallel blocks); `query`, `scores`, `probabilities`: of its attention.
    """

    what: str
    owner: str


class Observer(Protocol):
    """What is done with the values that are found."""

    def arrived(self, owner: str, state: str, value: Tensor) -> None: ...
    def attention(self, owner: str, query: Tensor, pair: Pair) -> tuple[Tensor, Pair]: ...
    def heads(self, owner: str, result: Tensor) -> Tensor: ...
    def reads_residual(self, owner: str) -> bool: ...
    def result(self, owner: str, value: Tensor) -> Tensor: ...
    def residual(self, owner: str, value: Tensor) -> None: ...
    def total(self, owners: Collection[str], value: Tensor) -> Tensor: ...


class Operations(TorchFunctionMode):
    """Follows labelled tensors through torch's functions. `paused`: calls that are not the model's own. `roles`: scores have gradients,
    which tell queries and keys apart.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer, self.paused, self.roles = observer, False, False
        self.factors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # scores and what they are the product of, by owner
        self.labels: dict[int, frozenset[Label]] = {}
        self.held: list[Tensor] = []  # so that no number stands for another tensor
        self.live: set[Label] = set()
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}  # of sums of two results, with equations that wait
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}  # joined to keys and values, while scores are computed

    def label(self, value: Tensor, label: Label) -> None:
        """Begins to follow a tensor."""
        self.live.add(label)
        self.mark(value, frozenset({label}))

    def mark(self, value: Any, labels: frozenset[Label]) -> None:
        if isinstance(value, Tensor) and labels:
            self.labels[id(value)] = self.labels.get(id(value), frozenset()) | labels
            self.held.append(value)
        elif isinstance(value, tuple | list):
            for part in value:  # pyright: ignore[reportUnknownVariableType]
                self.mark(part, labels)

    def drop(self, owners: Iterable[str]) -> None:
        """Follows nothing of these sub-layers any more."""
        chosen = set(owners)
        self.live = {label for label in self.live if label.owner not in chosen}
        if not self.live:
            self.labels.clear()
            self.parts.clear()
            self.held.clear()

    def of(self, value: object) -> frozenset[Label]:
        return self.labels.get(id(value), frozenset()) & self.live

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or not self.live:
            return func(*args, **kwargs)
        labels = frozenset[Label]().union(*(self.of(value) for value in tensors((args, kwargs))))
        if not labels:
            return func(*args, **kwargs)
        result, labels = self.call(func, args, kwargs, labels)
        self.mark(result, labels & self.live)
        return result

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], labels: frozenset[Label]
    ) -> tuple[Any, frozenset[Label]]:
        """The result of an operation, and the labels that it has."""
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            for label in labels:
                if label.what == "query":
                    return self.attention(label, args, kwargs), labels - {label}
        if name in PRODUCTS and (done := self.product(func, args, kwargs, labels)) is not None:
            return done
        if name in SUMS and (done := self.sum(func, args, kwargs)) is not None:
            return done
        result = func(*self.widened(args, labels), **kwargs)
        if name in SOFTMAX and self.roles:
            self.compare(result, {label.owner for label in labels if label.what == "scores"})
        return result, self.renamed(name, labels)

    def consume(self, label: Label) -> None:
        self.live.discard(label)

    def start(self, label: Label) -> Label:
        self.live.add(label)
        return label

    # The residual sum ------------------------------------------------------------------------------------------------

    def results(self, value: object) -> frozenset[Label]:
        """The labels of a value that are on the way to a residual sum."""
        return frozenset(label for label in self.of(value) if label.what in ("sum", "summed"))

    def sum(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, frozenset[Label]] | None:
        """The residual sum behind one sub-layer or several, or the sum of two results before it; None for a sum of something else."""
        if len(args) < 2 or not all(isinstance(value, Tensor) for value in args[:2]):
            return None
        if args[0].shape != args[1].shape or any(isinstance(value, nn.Parameter) for value in args[:2]):
            return None
        first, second = self.results(args[0]), self.results(args[1])
        others = (self.of(args[0]) | self.of(args[1])) - (first ^ second)
        if first - second and second - first:
            value, labels = self.parallel(func, args, kwargs)
            return value, others | labels
        if first == second:
            return None
        where = int(not first - second)
        labels = first ^ second
        for label in labels:
            self.consume(label)
            self.observer.residual(label.owner, args[1 - where])
        changed = list(args)
        changed[where] = self.written(args[where], labels)
        return self.observer.total({label.owner for label in labels}, func(*changed, **kwargs)), others

    def parallel(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, frozenset[Label]]:
        """The sum of the results of two sub-layers. What their equations say is put into it, but where one reads the residual,
        which comes later: that equation waits for the residual sum.
        """
        first, second = self.results(args[0]), self.results(args[1])
        labels = first ^ second
        if any(label.what == "sum" and self.observer.reads_residual(label.owner) for label in labels):
            parts = (args[0].clone(), args[1])  # the sum may be written into the first
            for part, own in zip(parts, (first - second, second - first), strict=True):
                self.mark(part, own)
            value = func(*args, **kwargs)
            if not kwargs and len(args) == 2:
                self.parts[id(value)] = parts
                self.held += [value, *parts]
            return value, labels
        value = func(self.written(args[0], first - second), self.written(args[1], second - first), *args[2:], **kwargs)
        for label in labels:
            self.consume(label)
        return value, frozenset(self.start(Label("summed", label.owner)) for label in labels)

    def written(self, value: Tensor, labels: frozenset[Label]) -> Tensor:
        """A result, or a sum of several, with what the equations say of each."""
        waiting = sorted(label for label in labels if label.what == "sum")
        if (parts := self.parts.get(id(value))) is not None:
            first, second = (self.written(part, self.labels.get(id(part), frozenset()) & labels) for part in parts)
            return first + second
        if len(waiting) > 1 and any(self.observer.reads_residual(label.owner) for label in waiting):
            raise Unreachable("the sum of two sub-layers is changed on its way to the residual that an equation reads")
        for label in waiting:
            value = self.observer.result(label.owner, value)
        return value

    # Attention -------------------------------------------------------------------------------------------------------

    def attention(self, label: Label, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """torch's attention function on other operands."""
        self.consume(label)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for state, name in zip("qkv", names, strict=False):
            self.observer.arrived(label.owner, state, given[name])
        query, pair = self.observer.attention(label.owner, given["query"], Pair(given["key"], given["value"]))
        given |= {"query": query, "key": pair.key, "value": pair.value}
        if pair.rows:
            key, value = spread(pair)
            mask = given.get("attn_mask")
            if mask is None and given.get("is_causal"):
                shape = (query.shape[-2], pair.key.shape[-2])
                mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
            given |= {"key": torch.cat([key, pair.key], -2), "value": torch.cat([value, pair.value], -2)}
            given |= {"attn_mask": None if mask is None else widen(mask, key.shape[-2]), "is_causal": False}
        result = F.scaled_dot_product_attention(**given)
        return self.observer.heads(label.owner, result)

    def product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], labels: frozenset[Label]
    ) -> tuple[Any, frozenset[Label]] | None:
        """The product of queries and keys, or of probabilities and values, of an attention that is written out."""
        places = [i for i, value in enumerate(args) if isinstance(value, Tensor)][-2:]
        if len(places) < 2 or any(isinstance(args[i], nn.Parameter) for i in places):
            return None
        for label in labels:
            if label.what == "query":
                return self.scores(func, label, places, args, kwargs), frozenset({Label("scores", label.owner)})
            if label.what == "probabilities":
                place = places[label in self.of(args[places[0]])]
                return self.mixture(func, label, place, args, kwargs), labels - {label}
        return None

    def scores(
        self, func: Callable[..., Any], label: Label, places: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        self.consume(label)
        self.start(Label("scores", label.owner))
        q, k = (args[i] for i in places)
        if self.roles:
            scores = func(*args, **kwargs).detach().requires_grad_()
            self.factors[label.owner] = (scores, *factors(func, q, k, args))
            return scores
        if label not in self.labels.get(id(q), frozenset()):
            return self.reversed(func, label, places, args, kwargs)
        whole = k.ndim == 4 and k.shape[-2] == q.shape[-1]
        keys = k.transpose(-1, -2) if whole else k
        query, pair = self.observer.attention(label.owner, q, Pair(keys, keys))
        changed = list(args)
        changed[places[0]] = query
        if pair.key is not keys or pair.value is not keys or (pair.rows and (not whole or kwargs or len(args) > 2)):
            raise Unreachable("the attention is written out in a way that shows no keys and values")
        if pair.rows:
            self.rows[label.owner] = key, _ = spread(pair)
            changed[places[1]] = torch.cat([key, pair.key], -2).transpose(-1, -2)
        return func(*changed, **kwargs)

    def reversed(
        self, func: Callable[..., Any], label: Label, places: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The product of keys and queries: no equation can be put into it."""
        k, q = (args[i] for i in places)
        query, pair = self.observer.attention(label.owner, q, Pair(k, k))
        if query is not q or pair.key is not k or pair.value is not k or pair.rows:
            raise Unreachable("the attention multiplies keys with queries, in this order")
        return func(*args, **kwargs)

    def compare(self, probabilities: Tensor, owners: Iterable[str]) -> None:
        """Tells queries and keys apart: a probability depends on the scores of one query with all keys."""
        for owner in owners:
            scores, first, second = self.factors.pop(owner)
            (gradient,) = torch.autograd.grad(probabilities.flatten()[-1], scores, retain_graph=True)
            rows, columns = (int((gradient != 0).any(dim).sum(-1).max()) for dim in (-1, -2))
            q, k = (second, first) if rows > columns else (first, second)
            self.observer.arrived(owner, "q", q)
            self.observer.arrived(owner, "k", k)

    def mixture(
        self, func: Callable[..., Any], label: Label, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The product of probabilities with the values at `place`."""
        self.consume(label)
        self.observer.arrived(label.owner, "v", args[place])
        changed = list(args)
        if (rows := self.rows.pop(label.owner, None)) is not None:
            if not any(isinstance(value, Tensor) for value in args[:place]):
                raise Unreachable("the attention multiplies values with probabilities, in this order")
            changed[place] = torch.cat([rows[1], args[place]], -2)
        return self.observer.heads(label.owner, func(*changed, **kwargs))

    def widened(self, args: tuple[Any, ...], labels: frozenset[Label]) -> tuple[Any, ...]:
        """Operands of scores that have columns of joined rows: masks and biases, with columns of zeros for them."""
        owners = [label.owner for label in labels if label.what in ("scores", "probabilities")]
        count = next((self.rows[owner][0].shape[-2] for owner in owners if owner in self.rows), 0)
        width = max((v.shape[-1] for v in tensors(args) if self.of(v) and v.ndim), default=0)
        return tuple(
            widen(v, count) if count and isinstance(v, Tensor) and v.ndim and v.shape[-1] == width - count else v
            for v in args
        )

    def renamed(self, name: str, labels: frozenset[Label]) -> frozenset[Label]:
        """Scores are probabilities behind a softmax."""
        if name not in SOFTMAX:
            return labels
        scores = {label for label in labels if label.what == "scores"}
        for label in scores:
            self.consume(label)
        return (labels - scores) | {self.start(Label("probabilities", label.owner)) for label in scores}


def factors(func: Callable[..., Any], first: Tensor, second: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, the one of its rows first."""
    if getattr(func, "__name__", "") == "einsum":
        inputs, _, result = str(args[0]).replace(" ", "").partition("->")
        texts = inputs.split(",")
        if result and result[-1] in texts[0] and result[-1] not in texts[1]:
            return second, first
    return first, second


def spread(pair: Pair) -> tuple[Tensor, Tensor]:
    """All joined rows, as many times as each head of keys is repeated."""
    repeats = pair.key.shape[1] // pair.rows[0][0].shape[1]
    key, value = (torch.cat([rows[i] for rows in pair.rows], -2) for i in (0, 1))
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def widen(mask: Tensor, count: int) -> Tensor:
    """A mask, of truths or added, with `count` open columns before the others."""
    return F.pad(mask, (count, 0), value=mask.dtype == torch.bool)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, in lists and dictionaries too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from tensors(part)


def flattened(value: Tensor, stream: tuple[int, ...] | None) -> bool:
    """Whether a value has batch and tokens of the stream in one dimension."""
    return stream is not None and len(stream) == 2 and value.ndim == 2 and len(value) == prod(stream)
