"""Keys and values of an attention in a graph: read, replaced, joined with rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.recognition.attention.manual_attention import Step, joining, visible_value
from peftc.recognition.attention.patterns import Attention, attention_at, factors
from peftc.runtime.attention import attention_with_rows, extend_mask, rows_like_operand, scores_like, sdpa_with_rows
from peftc.tracing.operations import attention
from peftc.tracing.region_trace import RegionTrace


class Adding(Protocol):
    """Adds nodes to a graph, each behind the last."""

    def start_after(self, node: fx.Node) -> None: ...
    def start_before(self, node: fx.Node) -> None: ...
    def function(self, target: Any, *args: Any) -> fx.Node: ...
    def method(self, name: str, *args: Any) -> fx.Node: ...
    def copied(self, node: fx.Node, instead: Mapping[fx.Node, Any]) -> fx.Node: ...


class Called:
    """A call of transformers' attention interface or of torch's function. Rows that were joined come first in its arguments."""

    def __init__(self, call: fx.Node) -> None:
        self.call = call
        if call.target is nn.functional.scaled_dot_product_attention:
            positional(call, ("query", "key", "value"))
        elif call.target is attention:
            positional(call, ("module", "eager", "query", "key", "value", "attention_mask"))
        self.shift = 2 if call.target in (attention_with_rows, sdpa_with_rows) else 0
        self.first = self.shift + (2 if call.target in (attention, attention_with_rows) else 0)

    def get(self, name: str) -> Any:
        return self.call.args["qkv".index(name) + self.first]

    def set(self, name: str, value: Any) -> None:
        arguments = list(self.call.args)
        arguments["qkv".index(name) + self.first] = value
        self.call.args = tuple(arguments)

    def join(self, key: Any, value: Any, before: int, after: int) -> None:
        """New keys and values, which have so many more rows before and after the old ones."""
        old = self.call.args[: self.shift] or (0, 0)
        assert isinstance(old[0], int)
        assert isinstance(old[1], int)
        self.set("k", key)
        self.set("v", value)
        self.call.args = (old[0] + before, old[1] + after, *self.call.args[self.shift :])
        self.call.target = attention_with_rows if self.first > self.shift else sdpa_with_rows


def positional(call: fx.Node, names: tuple[str, ...]) -> None:
    """The first arguments of a call by position; None for what is not given."""
    given = dict(call.kwargs)
    call.args = (*call.args, *(given.pop(name, None) for name in names[len(call.args) :]))
    call.kwargs = given


class Written:
    """An attention that is written out, named by its softmax. Rows are joined to the scores, and their values to the result:

    softmax(s(q kᵀ)) v   becomes   softmax([s'(q Pₖᵀ), s(q kᵀ)]) [Pᵥ; v].
    """

    def __init__(self, softmax: fx.Node, traced: RegionTrace) -> None:
        layer = LayerGraph(traced.graph, traced.root) if traced.root is not None else None
        found = attention_at(softmax, layer) if layer is not None else None
        made = joining(found, layer) if found is not None and layer is not None else None
        if found is None or made is None:
            raise PeftcError(Diagnostic("P403", "in this call pattern the attention is not written as it was analysed"))
        self.found: Attention = found
        self.softmax, self.joining = softmax, made

    def like(self, add: Adding, heads: int) -> fx.Node:
        """A tensor whose first dimension is the batch."""
        if self.joining.keys.merged:
            return add.method("unflatten", self.found.k, 0, (-1, heads))
        return add.method("movedim", self.found.k, self.joining.keys.order.index(0), 0)

    def join(self, add: Adding, key: fx.Node, value: fx.Node, after: bool) -> None:
        """Joins rows behind the keys where `after`, else before them."""
        found, keys, values = self.found, self.joining.keys, self.joining.values
        scores, own = found.scores, self.softmax.args[0]
        assert scores is not None
        assert isinstance(own, fx.Node)
        add.start_before(self.softmax)
        rows = add.function(rows_like_operand, key, found.k, keys.order, keys.merged)
        made = self.taken(add, self.product(add, scores, found.k, rows), self.joining.scores, scores)
        shown = visible_value(self.softmax)
        together = [own, made] if after else [made, own]
        rest = [add.function(extend_mask, a, made, shown, after) if is_tensor(a) else a for a in self.softmax.args[1:]]
        self.softmax.args = (add.function(torch.cat, together, -1), *rest)
        add.start_after(self.softmax)
        length = add.method("size", made, -1)
        count = add.method("size", own, -1)
        sizes = [count, length] if after else [length, count]
        parts = add.method("split", self.softmax, sizes, -1)
        mine, others = (add.function(operator.getitem, parts, i) for i in ((1, 0) if after else (0, 1)))
        self.softmax.replace_all_uses_with(others, delete_user_cb=lambda user: user is not parts)
        add.start_after(found.out)
        rows = add.function(rows_like_operand, value, found.v, values.order, values.merged)
        swapped = {found.v: rows}
        probabilities = self.taken(add, mine, self.joining.probabilities, others)
        last = self.joining.probabilities[-1].node if self.joining.probabilities else others
        new = add.function(torch.add, found.out, add.copied(found.out, swapped | {last: probabilities}))
        found.out.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def product(self, add: Adding, product: fx.Node, operand: fx.Node, rows: fx.Node) -> fx.Node:
        """The same product with rows in place of an operand, and without what is added to it."""
        if product.target is torch.einsum:
            return add.copied(product, {operand: rows})
        made = add.function(torch.matmul, *(rows if n is operand else n for n in factors(product)))
        return add.function(torch.mul, made, alpha) if (alpha := scale(product)) != 1 else made

    def taken(self, add: Adding, rows: fx.Node, steps: Sequence[Step], first: fx.Node) -> fx.Node:
        """Rows after the steps of the way that concern them; `first` is what the first step takes."""
        for step in steps:
            if step.effect == "same":
                rows = add.copied(step.node, {step.source: rows, first: rows})
            elif step.effect == "shape":
                rows = add.function(scores_like, rows, step.node)
        return rows


def scale(product: fx.Node) -> Any:
    """The factor in a `baddbmm`."""
    return product.kwargs.get("alpha", 1)
