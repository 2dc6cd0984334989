"""Writes the equations of edits into the graph of a region."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import EDIT, is_edit
from peftc.dataflow.operations import Op
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor
from peftc.rewriting.attention import Called, Written
from peftc.rewriting.base_call import base_call
from peftc.rewriting.container import CONTAINER
from peftc.rewriting.edits import (
    EQUATIONS,
    STREAM,
    Bound,
    RegionEdit,
    contains_state,
    equation_comment,
    heads_of,
    rows,
)
from peftc.rewriting.overwritten import STANDS_FOR, copy_of, keep_reads
from peftc.rewriting.positions import located_call, tells
from peftc.rewriting.prompts import prompted_call, set_tokens
from peftc.rewriting.stacked_weights import StackedWeights, layout
from peftc.rewriting.state_lookup import Lookup
from peftc.runtime.layouts import image_to_tokens, tokens_to_image, unflatten_tokens
from peftc.runtime.parameters import full_precision, rows_of, stored_as, with_rows
from peftc.runtime.prompts import batch_like
from peftc.tracing.region_trace import RegionTrace

OPERATORS: dict[str, Callable[..., Any]] = dict(
    zip("+-*/", (operator.add, operator.sub, operator.mul, operator.truediv), strict=True)
)


class Inserter:
    """Inserts edits one after the other. A later edit reads what an earlier one wrote."""

    def __init__(self, traced: RegionTrace, base: type | None = None) -> None:
        self.traced, self.graph, self.base = traced, traced.graph, base
        self.latest: dict[fx.Node, fx.Node] = {}
        self.lookup = Lookup(traced)
        self.made = 0

    def insert(self, edit: RegionEdit) -> None:
        memo: dict[int, Any] = {}
        if tells(edit):
            located_call(self.graph)
        for i, assign in enumerate(edit.assigns):
            lets = [term for at, term in edit.lets if at == i]
            _Assignment(self, edit, assign, memo, lets).run()
        keep_reads(self.graph)
        try:
            self.graph.lint()
        except RuntimeError as error:
            raise PeftcError(
                Diagnostic(
                    "P405", f"`{edit.edit}` reads a state that is computed after the one it writes", notes=(str(error),)
                )
            ) from error

    def now(self, node: fx.Node) -> fx.Node:
        while node in self.latest:
            node = self.latest[node]
        return node


class _Assignment:
    """One equation of one edit: nodes are added after everything they depend on, then the state's users are redirected."""

    def __init__(
        self, inserter: Inserter, edit: RegionEdit, assign: ir.Assign, memo: dict[int, Any], lets: list[ir.Term]
    ) -> None:
        self.inserter, self.edit, self.assign = inserter, edit, assign
        self.graph = inserter.graph
        self.comment = equation_comment(edit.edit, assign)
        self.made: list[fx.Node] = []
        self.memo = memo  # of the whole edit: what `let` bound is computed once
        self.lets = lets
        self.present: dict[str, Any] = {}
        self.like: fx.Node | None = None  # gives forms without an input dtype and device, where no state is read

    def run(self) -> None:
        bound = self.edit.states[self.assign.state]
        if bound.weight is not None:
            self.write_parameter(bound)
        elif bound.anchor is not None and bound.anchor.kind in ("tokens", "context"):
            self.write_tokens(bound.anchor)
        elif bound.anchor is not None and bound.anchor.kind == "argument":
            for anchor in bound.anchor.each():
                self.write_argument(anchor)
        else:
            self.write_value(bound)

    # Writing -----------------------------------------------------------------------------------------------------

    def write_value(self, bound: Bound) -> None:
        assert bound.anchor is not None
        node = self.inserter.now(self.inserter.lookup.state(bound, self.assign.state))
        self.start_after(node)
        new = self.value()
        if self.unflattened(bound):
            new = self.method("flatten", new, 0, 1)
        if bound.map:
            new = self.function(tokens_to_image, new, node, bound.map == "second")
        if bound.rows is not None:
            new = self.joined(node, bound.rows, new, -1, bound.width)
        mine = set(self.made)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in mine)
        new.meta[STANDS_FOR] = node.meta.get(STANDS_FOR, node)
        self.inserter.latest[node] = new

    def write_tokens(self, anchor: Anchor) -> None:
        """Tokens before those that a stack takes, or before those that it attends to."""
        call = prompted_call(self.graph)
        self.explain(call)
        assert isinstance(self.assign.value, ir.Concat)
        if anchor.kind == "context":
            set_tokens(call, context=rows(self.assign.value))
            return
        self.start_before(call)
        embedding, keep = anchor.key
        self.like = self.function(batch_like, *call.args[2:4], self.add(self.graph.get_attr(f"{embedding}.weight")))
        made = [self.term(part) for part in self.assign.value.parts[:-1]]
        set_tokens(call, made, embedding, keep)

    def write_argument(self, anchor: Anchor) -> None:
        call, name = self.attention_call(anchor)
        self.explain(call)
        self.start_before(call)
        for let in self.lets:
            self.term(let)
        if self.is_written(call):
            self.join_written(Written(call, self.inserter.traced))
            return
        attention = Called(call)
        if name == "kv":
            attention.join(*self.pair(self.assign.value, attention))
        else:
            attention.set(name, self.term(self.assign.value))

    def is_written(self, call: fx.Node) -> bool:
        root = self.inserter.traced.root
        return root is not None and LayerGraph(self.graph, root).op(call) is Op.SOFTMAX

    def join_written(self, attention: Written) -> None:
        """Rows joined to an attention without a call that takes keys and values."""
        term = self.assign.value
        parts = term.parts if isinstance(term, ir.Concat) else (term,)
        own = next(i for i, p in enumerate(parts) if contains_state(p))
        if not isinstance(parts[own], ir.Read):
            help_ = "join rows: `kv = concat(prefix(len=l), kv)`"
            message = f"`{self.edit.edit}` changes the keys and values of an attention that is written out in the model"
            raise PeftcError(Diagnostic("P415", message, help=help_))
        like = attention.like(self, heads_of(self.assign.value))
        for i in [*reversed(range(own)), *range(own + 1, len(parts))]:
            self.start_before(attention.softmax)
            key, value, _, _ = self.pair(parts[i], None, like)
            attention.join(self, key, value, after=i > own)

    def pair(self, term: ir.Term, call: Called | None, like: Any = None) -> tuple[Any, Any, int, int]:
        """Keys, values, and how many rows were joined before and after, of a term of keys and values."""
        if isinstance(term, ir.Read):
            assert call is not None
            return call.get("k"), call.get("v"), 0, 0
        if isinstance(term, ir.Concat):
            parts = [self.pair(p, call, like) for p in term.parts]
            own = next(i for i, p in enumerate(term.parts) if contains_state(p))
            before = sum(rows(p) for p in term.parts[:own]) + parts[own][2]
            after = sum(rows(p) for p in term.parts[own + 1 :]) + parts[own][3]
            keys, values = [p[0] for p in parts], [p[1] for p in parts]
            return self.function(torch.cat, keys, 2), self.function(torch.cat, values, 2), before, after
        if isinstance(term, ir.FormCall):
            made = self.applied(term, like=like if call is None else call.get("k"))
            return self.function(operator.getitem, made, 0), self.function(operator.getitem, made, 1), 0, 0
        if isinstance(term, ir.Arithmetic):
            return self.scaled_pair(term, call, like)
        raise AssertionError(term)

    def scaled_pair(self, term: ir.Arithmetic, call: Called | None, like: Any) -> tuple[Any, Any, int, int]:
        """A number or a gate times keys and values."""
        sides = [isinstance(t.shape, type(term.shape)) for t in (term.left, term.right)]
        which = 0 if sides[0] else 1
        inner, factor = (term.left, term.right) if which == 0 else (term.right, term.left)
        key, value, before, after = self.pair(inner, call, like)
        if isinstance(factor.shape, type(term.shape)):
            other = self.pair(factor, call, like)
            both = ((key, other[0]), (value, other[1]))
        else:
            by = self.per_head(self.term(factor), factor)
            both = ((key, by), (value, by))
        made = [self.function(OPERATORS[term.op], *(pair if which == 0 else pair[::-1])) for pair in both]
        return made[0], made[1], before, after

    def per_head(self, value: Any, term: ir.Term) -> Any:
        """A number an example, (batch, 1, 1), made to fit (batch, heads, tokens, d_head)."""
        per_example = getattr(term.shape, "per_example", False)
        return self.method("unsqueeze", value, 1) if per_example else value

    def write_parameter(self, bound: Bound) -> None:
        """`w` and `b`: every read of the parameter by the model gets the new value."""
        assert bound.weight is not None
        if bound.weight.stacked_slice is not None:
            StackedWeights(self, bound).write()
            return
        name = f"{bound.weight.module}.{bound.weight.attribute}".lstrip(".")
        nodes = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == name and n not in set(self.made)]
        if not nodes:
            raise PeftcError(Diagnostic("P404", f"the forward of the module at this site does not read `{name}`"))
        node = self.inserter.now(nodes[0])
        self.start_after(node)
        new = self.value()
        new = self.function(stored_as, new, node)
        if bound.weight.rows is not None:
            seen = self.method("t", node) if bound.weight.transposed else node
            new = self.joined(seen, bound.weight.rows, new, 0, bound.width)
        if bound.weight.transposed:
            new = self.method("contiguous", self.method("t", new))  # as it was stored
        for read in nodes:  # an equation that has read the parameter keeps the value that it read
            self.inserter.now(read).replace_all_uses_with(new, delete_user_cb=lambda user: not is_edit(user))
        self.inserter.latest[node] = new

    # Reading -----------------------------------------------------------------------------------------------------

    def read(self, state: str) -> Any:
        """The present value of a state, the same node wherever this equation reads it."""
        if state not in self.present:
            self.present[state] = self.new_read(state)
        if isinstance(self.present[state], fx.Node):
            self.move_after(self.present[state])
        return self.present[state]

    def new_read(self, state: str) -> Any:
        bound = self.edit.states[state]
        if bound.weight is not None:
            return self.read_parameter(bound)
        assert bound.anchor is not None
        if bound.anchor.kind == "argument":
            call, name = self.attention_call(bound.anchor)
            return Called(call).get(name)
        node = self.inserter.now(self.inserter.lookup.state(bound, state))
        self.move_after(node)
        if bound.overwritten:
            node = copy_of(node)
        value = node if bound.rows is None else self.cut(node, bound.rows, -1, bound.width)
        if bound.map:
            return self.function(image_to_tokens, value, bound.map == "second")
        return self.function(unflatten_tokens, value, self.read(STREAM)) if self.unflattened(bound) else value

    def unflattened(self, bound: Bound) -> bool:
        """Whether a state that the model keeps as (batch · tokens, d) is given its batch back in this edit."""
        return bound.flat and STREAM in self.edit.states

    def read_parameter(self, bound: Bound) -> fx.Node:
        assert bound.weight is not None
        if bound.weight.stacked_slice is not None:
            return StackedWeights(self, bound).read()
        name = f"{bound.weight.module}.{bound.weight.attribute}".lstrip(".")
        node = next((n for n in self.graph.nodes if n.op == "get_attr" and n.target == name), None)
        if node is None:
            node = self.add(self.graph.get_attr(name))
        node = self.inserter.now(node)
        self.move_after(node)
        seen = self.function(full_precision, node)
        seen = self.method("t", seen) if bound.weight.transposed else seen
        return seen if bound.weight.rows is None else self.cut(seen, bound.weight.rows, 0, bound.width)

    def attention_call(self, anchor: Anchor) -> tuple[fx.Node, str]:
        return self.inserter.lookup.at(anchor, str(anchor.key[2])), str(anchor.key[2])

    def value(self) -> Any:
        for let in self.lets:
            self.term(let)
        return self.term(self.assign.value)

    # Terms -------------------------------------------------------------------------------------------------------

    def term(self, term: ir.Term) -> Any:
        if id(term) not in self.memo:
            self.memo[id(term)] = self.new_term(term)
        made = self.memo[id(term)]
        if isinstance(made, fx.Node):
            self.move_after(made)
        return made

    def new_term(self, term: ir.Term) -> Any:
        match term:
            case ir.Read(state=state):
                return self.read(state)
            case ir.Constant(value=value):
                return value
            case ir.FormCall():
                return self.applied(term, like=None)
            case ir.FrozenCall(function=function, input=value):
                argument, name = self.term(value), self.edit.functions[function]
                if not name:  # the region itself, as it is without edits
                    return self.function(base_call, self.inserter.base, argument)
                return self.module(name, argument)
            case ir.Arithmetic(op="+", left=left, right=ir.FormCall() as form) if self.adds(form, left):
                return self.applied(form, like=None, plus=self.term(left))
            case ir.Arithmetic(op=op, left=left, right=right):
                a, b = self.term(left), self.term(right)
                return self.function(OPERATORS[op], a, b)
            case ir.Concat():
                raise AssertionError("keys and values are written in pairs")

    def adds(self, term: ir.FormCall, to: ir.Term) -> bool:
        """Whether a form's own module can add its value to that of another term, of the same shape."""
        instance = term.instance
        return (
            instance.form.adds
            and instance.has_site_parameters
            and not instance.tasks
            and term.shape == to.shape
            and id(term) not in self.memo
        )

    def applied(self, term: ir.FormCall, like: Any, plus: Any = None) -> Any:
        if id(term) in self.memo:
            return self.memo[id(term)]
        argument = self.term(term.input) if term.input is not None else like
        if argument is None:
            argument = self.like or self.read(
                self.assign.state
            )  # a form without an input takes dtype and batch from the state
        name = f"{CONTAINER}.{self.edit.edit_name}.{self.edit.slug}.{term.instance.key}"
        arguments = (argument,) if term.second is None else (argument, self.term(term.second))
        if plus is not None:
            return self.module(name, *arguments, plus=plus)
        self.memo[id(term)] = made = self.module(name, *arguments)
        return made

    # Nodes -------------------------------------------------------------------------------------------------------

    def start_after(self, node: fx.Node) -> None:
        self.point = node
        while self.point.op == "placeholder" and self.point.next.op == "placeholder":
            self.point = self.point.next

    def start_before(self, node: fx.Node) -> None:
        self.start_after(node.prev)

    def move_after(self, node: fx.Node) -> None:
        """What is read must have been computed: later nodes go behind it."""
        if node.op != "placeholder" and self.point < node:
            self.point = node

    def add(self, node: fx.Node) -> fx.Node:
        node.meta["origin"] = (EDIT, self.inserter.made, 0)
        self.explain(node)
        self.inserter.made += 1
        self.point.append(node)
        self.point = node
        self.made.append(node)
        return node

    def explain(self, node: fx.Node) -> None:
        node.meta[EQUATIONS] = tuple(dict.fromkeys([*node.meta.get(EQUATIONS, ()), self.comment]))

    def function(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.add(self.graph.call_function(target, args))

    def method(self, name: str, *args: Any) -> fx.Node:
        return self.add(self.graph.call_method(name, args))

    def module(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.add(self.graph.create_node("call_module", name, args, kwargs))

    def copied(self, node: fx.Node, instead: Mapping[fx.Node, Any]) -> fx.Node:
        """The same operation on other values."""
        return self.add(self.graph.node_copy(node, lambda n: instead.get(n, n)))

    def cut(self, node: Any, rows: Slice, dim: int, width: int) -> fx.Node:
        if rows.count > 1:
            return self.function(rows_of, node, dim, *layout(rows, width))
        piece = slice(rows.start, rows.stop)
        return self.function(operator.getitem, node, (..., piece) if dim == -1 else piece)

    def joined(self, whole: fx.Node, rows: Slice, new: Any, dim: int, width: int) -> fx.Node:
        """`whole`, `width` long, with `rows` of it replaced."""
        if rows.count > 1:
            return self.function(with_rows, whole, new, dim, *layout(rows, width))
        pieces: list[Any] = [new]
        if rows.start > 0:
            pieces.insert(0, self.cut(whole, Slice(0, rows.start), dim, width))
        if rows.stop < width:
            pieces.append(self.cut(whole, Slice(rows.stop, width), dim, width))
        return self.function(torch.cat, pieces, dim)
