"""Intercepts torch functions of a running model: residual sums and attentions.

Tensors are labelled, and an operation passes the labels of its operands to its result, until the
operation that is searched for is reached.
"""

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from peftc.verification.reference.interpreter import KeyValues
from peftc.verification.reference.locations import Kind, ReferenceUnavailable
from peftc.verification.reference.outputs import named_tensors

# `x.lerp(h, a)` is x + a (h - x)
SUMS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "lerp", "lerp_"})
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
SOFTMAX = "softmax"
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Label(NamedTuple):
    """What a tensor is to the sub-layer `owner`.

    - `sum`: its result, on the way to the residual sum.
    - `edited sum`: the same after its edits, as one summand of parallel sub-layers.
    - `query`, `scores`, `probabilities`: of its attention.
    """

    kind: str
    owner: str


Labels = frozenset[Label]


class OperationHandler(Protocol):
    """Reads and replaces the values that the interceptor reaches."""

    on_operand: Callable[[str, str, Tensor], None]

    def observes(self, kind: Kind, owner: str) -> bool: ...
    def edit(self, kind: Kind, owners: Collection[str], value: Any) -> Any: ...


class OperationInterceptor(TorchFunctionMode):
    """Propagates labels through torch functions."""

    def __init__(self, handler: OperationHandler) -> None:
        super().__init__()
        self.handler, self.paused = handler, False
        self.identify_roles = False  # attention scores require gradients, which tell queries from keys
        self.active: set[Label] = set()
        self.labels: dict[int, Labels] = {}  # by tensor id
        self.references: list[Tensor] = []  # keeps labelled tensors alive, so that ids stay unique
        self.score_operands: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # scores and their two factors, by owner
        self.pending_sums: dict[int, tuple[Tensor, Tensor]] = {}  # operands whose edits wait for the residual, by sum
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}  # concatenated to keys and values, by owner

    @contextmanager
    def pause(self) -> Generator[None]:
        """Inside the block operations are those of equations, not of the model."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused

    def label(self, value: Tensor, label: Label) -> None:
        self.active.add(label)
        self._add_labels(value, frozenset({label}))

    def _add_labels(self, value: Any, labels: Labels) -> None:
        for _, tensor in named_tensors(value) if labels else ():
            self.labels[id(tensor)] = self.labels.get(id(tensor), frozenset()) | labels
            self.references.append(tensor)

    def drop(self, owners: Iterable[str]) -> None:
        names = set(owners)
        self.active = {label for label in self.active if label.owner not in names}
        if not self.active:
            self.labels.clear()
            self.pending_sums.clear()
            self.references.clear()

    def labels_of(self, value: object) -> Labels:
        return self.labels.get(id(value), frozenset()) & self.active

    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not self.active:
            return func(*args, **kwargs)
        labels = frozenset[Label]().union(*(self.labels_of(tensor) for _, tensor in named_tensors((args, kwargs))))
        if not labels:
            return func(*args, **kwargs)
        result, labels = self._call(func, args, kwargs, labels)
        self._add_labels(result, labels & self.active)
        return result

    def _call(self, func: Function, args: Args, kwargs: Kwargs, labels: Labels) -> tuple[Any, Labels]:
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            for label in labels:
                if label.kind == "query":
                    return self._attention(label, args, kwargs), labels - {label}
        if name in PRODUCTS and (product := self._product(func, args, kwargs, labels)) is not None:
            return product
        if name in SUMS and (total := self._sum(func, args, kwargs)) is not None:
            return total
        result = func(*self._pad_for_rows(func, args, labels), **kwargs)
        if name != SOFTMAX:
            return result, labels
        scores = {label for label in labels if label.kind == "scores"}
        if self.identify_roles:
            self._identify_roles(result, {label.owner for label in scores})
        self.active -= scores
        return result, (labels - scores) | {self._activate("probabilities", label.owner) for label in scores}

    def _activate(self, kind: str, owner: str) -> Label:
        label = Label(kind, owner)
        self.active.add(label)
        return label

    # The residual sum -----------------------------------------------------------------------------

    def _sum_labels(self, value: object) -> Labels:
        return frozenset(label for label in self.labels_of(value) if label.kind in ("sum", "edited sum"))

    def _sum(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[Any, Labels] | None:
        """A residual sum, or the sum of parallel sub-layers before it; None for any other sum."""
        if len(args) < 2 or not all(isinstance(value, Tensor) for value in args[:2]):
            return None
        if args[0].shape != args[1].shape or any(isinstance(value, nn.Parameter) for value in args[:2]):
            return None
        first, second = self._sum_labels(args[0]), self._sum_labels(args[1])
        labels = first ^ second
        others = (self.labels_of(args[0]) | self.labels_of(args[1])) - labels
        if first - second and second - first:
            value, labels = self._parallel_sum(func, args, kwargs)
            return value, others | labels
        if not labels:
            return None
        result_index = int(not first - second)
        self.active -= labels
        for label in labels:
            self.handler.edit("residual", [label.owner], args[1 - result_index])
        operands = list(args)
        operands[result_index] = self._edit_summands(args[result_index], labels)
        total, owners = func(*operands, **kwargs), {label.owner for label in labels}
        if total is not args[0]:
            return self.handler.edit("total", owners, total), others
        before = total.clone()  # the sum is written in place, and other code may hold the tensor
        edited = self.handler.edit("total", owners, before)
        return total if edited is before else total.copy_(edited), others

    def _parallel_sum(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[Tensor, Labels]:
        """The sum of two edited results; edits that read the residual wait for the residual sum."""
        first, second = self._sum_labels(args[0]), self._sum_labels(args[1])
        labels = first ^ second
        if any(label.kind == "sum" and self.handler.observes("residual", label.owner) for label in labels):
            operands = (args[0].clone(), args[1])  # the sum may be written into the first operand
            self._add_labels(operands[0], first - second)
            self._add_labels(operands[1], second - first)
            value = func(*args, **kwargs)
            if not kwargs and len(args) == 2:
                self.pending_sums[id(value)] = operands
                self.references += [value, *operands]
            return value, labels
        edited = (self._edit_summands(args[0], first - second), self._edit_summands(args[1], second - first))
        value = func(*edited, *args[2:], **kwargs)
        self.active -= labels
        return value, frozenset(self._activate("edited sum", label.owner) for label in labels)

    def _edit_summands(self, value: Tensor, labels: Labels) -> Tensor:
        """A sub-layer's result, or a sum of several, after the edits of each."""
        if (operands := self.pending_sums.get(id(value))) is not None:
            own = (self.labels.get(id(operand), frozenset[Label]()) & labels for operand in operands)
            first, second = map(self._edit_summands, operands, own)
            return first + second
        owners = sorted(label.owner for label in labels if label.kind == "sum")
        if len(owners) > 1 and any(self.handler.observes("residual", owner) for owner in owners):
            reason = "an equation reads the residual, but the sum of two sub-layers is changed before it is added"
            raise ReferenceUnavailable(reason)
        for owner in owners:
            value = self.handler.edit("sum", [owner], value)
        return value

    # Attention ------------------------------------------------------------------------------------

    def _edit_operands(self, owner: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, KeyValues]:
        query = self.handler.edit("query", [owner], query)
        pair = KeyValues(self.handler.edit("keys", [owner], key), value)
        pair = KeyValues(pair.key, self.handler.edit("values", [owner], pair.value))
        return query, self.handler.edit("pair", [owner], pair)

    def _edit_heads(self, owner: str, result: Tensor) -> Tensor:
        """Edits a result (batch, heads, tokens, d_head) as (batch, tokens, heads, d_head)."""
        if not self.handler.observes("heads", owner):
            return result
        return self.handler.edit("heads", [owner], result.transpose(1, 2)).transpose(1, 2)

    def _attention(self, label: Label, args: Args, kwargs: Kwargs) -> Tensor:
        self.active.discard(label)
        arguments = {**dict(zip(ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
        for state, name in zip("qkv", ATTENTION_ARGUMENTS, strict=False):
            self.handler.on_operand(label.owner, state, arguments[name])
        query, pair = self._edit_operands(label.owner, *(arguments[name] for name in ATTENTION_ARGUMENTS[:3]))
        arguments |= {"query": query, "key": pair.key, "value": pair.value}
        if pair.rows:
            key, value = rows_per_head(pair)
            mask = arguments.get("attn_mask")
            if mask is None and arguments.get("is_causal"):
                mask = torch.ones((query.shape[-2], pair.key.shape[-2]), dtype=torch.bool, device=query.device).tril()
            arguments |= {"key": torch.cat([key, pair.key], -2), "value": torch.cat([value, pair.value], -2)}
            mask = None if mask is None else pad_columns(mask, key.shape[-2])
            arguments |= {"attn_mask": mask, "is_causal": False}
        return self._edit_heads(label.owner, F.scaled_dot_product_attention(**arguments))

    def _product(self, func: Function, args: Args, kwargs: Kwargs, labels: Labels) -> tuple[Any, Labels] | None:
        places = [i for i, value in enumerate(args) if isinstance(value, Tensor)][-2:]
        if len(places) < 2 or any(isinstance(args[i], nn.Parameter) for i in places):
            return None
        for label in labels:
            if label.kind == "query":
                self.active.discard(label)
                scores = self._activate("scores", label.owner)
                return self._scores(func, label, places, args, kwargs), frozenset({scores})
            if label.kind == "probabilities":
                place = places[label in self.labels_of(args[places[0]])]
                return self._weighted_values(func, label, place, args, kwargs), labels - {label}
        return None

    def _scores(self, func: Function, label: Label, places: list[int], args: Args, kwargs: Kwargs) -> Tensor:
        first, second = (args[i] for i in places)
        if self.identify_roles:
            scores = func(*args, **kwargs).detach().requires_grad_()
            self.score_operands[label.owner] = (scores, *row_factor_first(func, first, second, args))
            return scores
        keys_first = label not in self.labels.get(id(first), frozenset())
        transposed = not keys_first and second.ndim == 4 and second.shape[-2] == first.shape[-1]
        keys = second.transpose(-1, -2) if transposed else first if keys_first else second
        query, pair = self._edit_operands(label.owner, second if keys_first else first, keys, keys)
        if keys_first and (query is not second or pair.key is not keys or pair.value is not keys or pair.rows):
            raise ReferenceUnavailable("the attention multiplies keys by queries, in this order")
        is_plain = transposed and not kwargs and len(args) == 2
        if pair.key is not keys or pair.value is not keys or (pair.rows and not is_plain):
            raise ReferenceUnavailable("the matrix products of the attention do not show its keys and values")
        operands = list(args)
        if not keys_first:
            operands[places[0]] = query
        if pair.rows:
            self.rows[label.owner] = key, _ = rows_per_head(pair)
            operands[places[1]] = torch.cat([key, pair.key], -2).transpose(-1, -2)
        return func(*operands, **kwargs)

    def _identify_roles(self, probabilities: Tensor, owners: Iterable[str]) -> None:
        """Tells queries from keys: a probability depends on one query and all keys."""
        for owner in owners:
            scores, first, second = self.score_operands.pop(owner)
            (gradient,) = torch.autograd.grad(probabilities.flatten()[-1], scores, retain_graph=True)
            rows, columns = (int((gradient != 0).any(dim).sum(-1).max()) for dim in (-1, -2))
            query, key = (second, first) if rows > columns else (first, second)
            self.handler.on_operand(owner, "q", query)
            self.handler.on_operand(owner, "k", key)

    def _weighted_values(self, func: Function, label: Label, place: int, args: Args, kwargs: Kwargs) -> Tensor:
        self.active.discard(label)
        self.handler.on_operand(label.owner, "v", args[place])
        operands = list(args)
        if (rows := self.rows.pop(label.owner, None)) is not None:
            if not any(isinstance(value, Tensor) for value in args[:place]):
                raise ReferenceUnavailable("the attention multiplies values by probabilities, in this order")
            operands[place] = torch.cat([rows[1], args[place]], -2)
        return self._edit_heads(label.owner, func(*operands, **kwargs))

    def _pad_for_rows(self, func: Function, args: Args, labels: Labels) -> Args:
        """Pads masks and biases of scores that have columns for concatenated rows."""
        owners = [label.owner for label in labels if label.kind in ("scores", "probabilities")]
        count = next((self.rows[owner][0].shape[-2] for owner in owners if owner in self.rows), 0)
        width = max((v.shape[-1] for _, v in named_tensors(args) if self.labels_of(v) and v.ndim), default=0)
        fills = hides_where_true(func, args, self.labels_of)
        return tuple(
            pad_columns(v, count, fills)
            if count and isinstance(v, Tensor) and v.ndim and v.shape[-1] == width - count
            else v
            for v in args
        )


def row_factor_first(func: Function, first: Tensor, second: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """The two factors of a product. The first one has the rows of the result."""
    if getattr(func, "__name__", "") == "einsum":
        inputs, _, result = str(args[0]).replace(" ", "").partition("->")
        subscripts = inputs.split(",")
        if result and result[-1] in subscripts[0] and result[-1] not in subscripts[1]:
            return second, first
    return first, second


def rows_per_head(pair: KeyValues) -> tuple[Tensor, Tensor]:
    """All concatenated rows, repeated for each query head as the keys are."""
    repeats = pair.key.shape[1] // pair.rows[0][0].shape[1]
    key, value = (torch.cat([rows[i] for rows in pair.rows], -2) for i in (0, 1))
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def hides_where_true(func: Function, args: Args, labels_of: Callable[[Tensor], Labels]) -> bool:
    """Whether a boolean mask marks the scores that are replaced, not those that are kept."""
    name = getattr(func, "__name__", "")
    has_scores = [isinstance(value, Tensor) and bool(labels_of(value)) for value in args]
    return name.startswith("masked_fill") or (name == "where" and has_scores == [False, False, True])


def pad_columns(mask: Tensor, count: int, hides: bool = False) -> Tensor:
    """A boolean or additive mask with `count` visible columns before the others. `hides`: a boolean
    one marks what is hidden.
    """
    return F.pad(mask, (count, 0), value=mask.dtype == torch.bool and not hides)
