"""Keys and values of attention in a graph: read, replaced, joined with rows."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from peftc.dataflow.einsum import is_einsum
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.recognition.attention.manual_attention import Step, joining, visible_value
from peftc.recognition.attention.patterns import Attention, attention_at, factors
from peftc.rewriting.node_builder import NodeBuilder
from peftc.runtime.attention import attention_with_rows, extend_mask, rows_like_operand, scores_like, sdpa_with_rows
from peftc.tracing.operations import attention
from peftc.tracing.region_trace import RegionTrace


class AttentionCall:
    """A call of transformers' or torch's attention, with the numbers of joined rows in front."""

    def __init__(self, call: fx.Node) -> None:
        self.call = call
        if call.target is nn.functional.scaled_dot_product_attention:
            make_positional(call, ("query", "key", "value"))
        elif call.target is attention:
            make_positional(call, ("module", "eager", "query", "key", "value", "attention_mask"))
        self.row_counts = 2 if call.target in (attention_with_rows, sdpa_with_rows) else 0
        self.query = self.row_counts + (2 if call.target in (attention, attention_with_rows) else 0)

    def get(self, name: str) -> Any:
        return self.call.args["qkv".index(name) + self.query]

    def set(self, name: str, value: Any) -> None:
        self.call.update_arg("qkv".index(name) + self.query, value)

    def join(self, key: Any, value: Any, before: int, after: int) -> None:
        """Sets keys and values that have `before` and `after` more rows than the present ones."""
        first, last = self.call.args[: self.row_counts] or (0, 0)
        assert isinstance(first, int)
        assert isinstance(last, int)
        self.set("k", key)
        self.set("v", value)
        self.call.args = (first + before, last + after, *self.call.args[self.row_counts :])
        self.call.target = attention_with_rows if self.query > self.row_counts else sdpa_with_rows


def make_positional(call: fx.Node, names: tuple[str, ...]) -> None:
    """Passes the first arguments of a call by position; None for missing ones."""
    kwargs = dict(call.kwargs)
    call.args = (*call.args, *(kwargs.pop(name, None) for name in names[len(call.args) :]))
    call.kwargs = kwargs


class ManualAttention:
    """Attention that the model computes itself, identified by its softmax. With joined rows,

    softmax(s(q kᵀ)) v   becomes   softmax([s'(q Pₖᵀ), s(q kᵀ)]) [Pᵥ; v].
    """

    def __init__(self, softmax: fx.Node, trace: RegionTrace, builder: NodeBuilder) -> None:
        layer = LayerGraph(trace.graph, trace.root) if trace.root is not None else None
        pattern = attention_at(softmax, layer) if layer is not None else None
        layouts = joining(pattern, layer) if pattern is not None and layer is not None else None
        if pattern is None or layouts is None:
            message = "in this call, the model computes attention differently from the sample forward"
            raise PeftcError(Diagnostic("P403", message))
        self.pattern: Attention = pattern
        self.softmax, self.layouts, self.builder = softmax, layouts, builder

    def batch_like(self, heads: int) -> fx.Node:
        """A tensor whose first dimension is the batch."""
        if self.layouts.keys.merged:
            return self.builder.method("unflatten", self.pattern.k, 0, (-1, heads))
        return self.builder.method("movedim", self.pattern.k, self.layouts.keys.order.index(0), 0)

    def join(self, key: fx.Node, value: fx.Node, after: bool) -> None:
        """Joins rows before or `after` the keys."""
        builder, pattern, softmax = self.builder, self.pattern, self.softmax
        scores, own = pattern.scores, softmax.args[0]
        assert scores is not None
        assert isinstance(own, fx.Node)
        builder.start_before(softmax)
        keys = builder.function(rows_like_operand, key, pattern.k, self.layouts.keys.order, self.layouts.keys.merged)
        new = self.apply_steps(self.row_scores(scores, pattern.k, keys), self.layouts.scores, scores)
        masks = [
            builder.function(extend_mask, mask, new, visible_value(softmax), after) if is_tensor(mask) else mask
            for mask in softmax.args[1:]
        ]
        softmax.args = (builder.function(torch.cat, [own, new] if after else [new, own], -1), *masks)
        row_probabilities, others = self.split_probabilities(own, new, after)
        builder.start_after(pattern.out)
        layout, steps = self.layouts.values, self.layouts.probabilities
        values = builder.function(rows_like_operand, value, pattern.v, layout.order, layout.merged)
        operands = {
            pattern.v: values,
            steps[-1].node if steps else others: self.apply_steps(row_probabilities, steps, others),
        }
        result = builder.function(torch.add, pattern.out, builder.copy(pattern.out, operands))
        pattern.out.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)

    def split_probabilities(self, own: fx.Node, new: fx.Node, after: bool) -> tuple[fx.Node, fx.Node]:
        """The probabilities of joined rows and of the other keys."""
        builder = self.builder
        builder.start_after(self.softmax)
        rows, count = builder.method("size", new, -1), builder.method("size", own, -1)
        parts = builder.method("split", self.softmax, [count, rows] if after else [rows, count], -1)
        joined, others = (builder.function(operator.getitem, parts, i) for i in ((1, 0) if after else (0, 1)))
        self.softmax.replace_all_uses_with(others, delete_user_cb=lambda user: user is not parts)
        return joined, others

    def row_scores(self, product: fx.Node, operand: fx.Node, rows: fx.Node) -> fx.Node:
        """The product with rows in place of the keys, without an addend of `baddbmm`."""
        if is_einsum(product):
            return self.builder.copy(product, {operand: rows})
        scores = self.builder.function(torch.matmul, *(rows if n is operand else n for n in factors(product)))
        alpha: Any = product.kwargs.get("alpha", 1)
        return self.builder.function(torch.mul, scores, alpha) if alpha != 1 else scores

    def apply_steps(self, rows: fx.Node, steps: Sequence[Step], first: fx.Node) -> fx.Node:
        """Repeats the steps for rows; `first` is the first step's operand."""
        for step in steps:
            if step.effect == "same":
                rows = self.builder.copy(step.node, {step.source: rows, first: rows})
            elif step.effect == "shape":
                rows = self.builder.function(scores_like, rows, step.node)
        return rows
