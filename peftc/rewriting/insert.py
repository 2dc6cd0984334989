"""Inserts the equations of edits into the graph of a region."""

import operator
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from peftc.addressing.sites import parameter_name
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_edit, is_tensor
from peftc.dataflow.operations import Op
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.form_code import FormCode
from peftc.equation_code.functions import add_to
from peftc.forms.shapes import Ids, KeyValue
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor
from peftc.rewriting.attention import AttentionCall, ManualAttention
from peftc.rewriting.boundary import base_call, wrap_base_call
from peftc.rewriting.edits import (
    EQUATIONS,
    STREAM,
    RegionEdit,
    RegionState,
    contains_state,
    equation_comment,
    has_sum,
    is_inline,
    owners_of,
    place_of,
    row_count,
)
from peftc.rewriting.linear_products import OWN_DTYPE
from peftc.rewriting.node_builder import NodeBuilder, StackedWeight
from peftc.rewriting.prompts import prepend_tokens, prompted_call, stack_call
from peftc.rewriting.states import PASS, REPLACES, StateLookup, copy_operands_of_edits, copy_value
from peftc.runtime.layouts import (
    as_before,
    image_patches,
    tokens_to_image,
    unflatten_tokens,
)
from peftc.runtime.parameters import as_stored, full_precision, stored_as
from peftc.runtime.prompts import batch_like
from peftc.syntax.numbers import ARITHMETIC
from peftc.tracing.region_trace import RegionTrace


class Inserter:
    """Inserts edits one after the other. A later edit reads what an earlier one wrote."""

    def __init__(self, trace: RegionTrace, base: type | None = None, calls_forms: bool = False) -> None:
        self.trace, self.graph, self.base, self.calls_forms = trace, trace.graph, base, calls_forms
        self.replacements: dict[fx.Node, fx.Node] = {}
        self.query_readers: list[tuple[fx.Node, list[fx.Node]]] = []  # calls, and the nodes of equations
        self.lookup = StateLookup(trace)
        self.numbers = count()  # of the nodes of all edits

    def insert(self, edit: RegionEdit) -> None:
        """Raises: P403 where this trace has no such state, P404, P405, P415."""
        memo: dict[int, Any] = {}
        if (own := stack_call(edit)) is not None:
            call = wrap_base_call(self.graph, own.function, *own.arguments)
            call.meta[EQUATIONS] = (own.comment,)
        for i, assign in enumerate(edit.assigns):
            lets = [term for before, term in edit.lets if before == i]
            EquationInserter(self, edit, assign, memo, lets).insert()
        copy_operands_of_edits(self.graph)
        try:
            self.graph.lint()
        except RuntimeError as error:
            message = f"`{edit.edit}` reads a state that the model computes from the one that it writes"
            raise PeftcError(Diagnostic("P405", message, notes=(str(error),))) from error

    def latest(self, node: fx.Node) -> fx.Node:
        """The node that holds a state's value after the edits so far."""
        while node in self.replacements:
            node = self.replacements[node]
        return node


class EquationInserter(NodeBuilder):
    """One equation of an edit. Its nodes follow all their operands.

    Args: `memo`: values of the edit's terms by id, each computed once. `lets`: of this equation.
    """

    def __init__(
        self, inserter: Inserter, edit: RegionEdit, assign: ir.Assign, memo: dict[int, Any], lets: Sequence[ir.Term]
    ) -> None:
        super().__init__(inserter.graph, inserter.numbers)
        self.inserter, self.edit, self.assign, self.memo, self.lets = inserter, edit, assign, memo, lets
        self.comment = equation_comment(edit.edit, assign)
        self.reads: dict[str, Any] = {}
        self.like: fx.Node | None = None  # gives dtype and device to forms without an input, where no state is read

    def insert(self) -> None:
        state = self.edit.states[self.assign.state]
        if state.weight is not None:
            self.write_parameter(state)
        elif state.anchor is not None and state.anchor.kind in ("tokens", "context"):
            self.write_tokens(state.anchor)
        elif state.anchor is not None and state.anchor.kind == "argument":
            for anchor in state.anchor.each():
                self.write_argument(anchor)
        else:
            self.write_value(state)

    def add(self, node: fx.Node) -> fx.Node:
        self.explain(node)
        return super().add(node)

    def explain(self, node: fx.Node) -> None:
        """The equation is printed above a node that it adds or changes."""
        node.meta[EQUATIONS] = tuple(dict.fromkeys([*node.meta.get(EQUATIONS, ()), self.comment]))

    # Writing -------------------------------------------------------------------------------------

    def write_value(self, state: RegionState) -> None:
        state = self.inserter.lookup.in_trace(state)
        node = self.inserter.latest(self.inserter.lookup.node_of(state, self.assign.state))
        self.start_after(node)
        new = self.own_rows(self.edit.own_form, self.value(), self.assign.state, self.read)
        if self.is_unflattened(state):
            new = self.method("flatten", new, 0, 1)
        if state.rows is not None:
            new = self.put_rows(self.with_features_last(node, state), state.rows, new, -1, state.size)
        if state.image:
            new = self.function(tokens_to_image, new, node, state.image == "channels first")
        if state.dims is not None:
            new = self.function(as_before, new, node, state.dims.tokens, state.dims.features)
        own = {*self.nodes, *(user for user in node.users if PASS in user.meta)}
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in own)
        new.meta[REPLACES] = node.meta.get(REPLACES, node)
        self.inserter.replacements[node] = new

    def write_tokens(self, anchor: Anchor) -> None:
        """Puts tokens before a stack's input, or before the context that it attends to."""
        call = prompted_call(self.graph)
        self.explain(call)
        assert isinstance(self.assign.value, ir.Concat)
        if anchor.kind == "context":
            prepend_tokens(call, context=row_count(self.assign.value))
            return
        self.start_before(call)
        embedding, keep = anchor.key
        self.like = self.function(batch_like, *call.args[2:4], self.add(self.graph.get_attr(f"{embedding}.weight")))
        prepend_tokens(call, [self.term(part) for part in self.assign.value.parts[:-1]], embedding, keep)

    def write_argument(self, anchor: Anchor) -> None:
        call, name = self.inserter.lookup.node_at(anchor), anchor.key[2]
        self.explain(call)
        self.start_before(call)
        for let in self.lets:
            self.term(let)
        root = self.inserter.trace.root
        if root is not None and LayerGraph(self.graph, root).op(call) is Op.SOFTMAX:
            self.join_manually(ManualAttention(call, self.inserter.trace, self))
            return
        attention = AttentionCall(call)
        if name == "kv":
            attention.join(*self.key_value(self.assign.value, attention))
        else:
            old = attention.get(name)
            new = self.own_rows(self.edit.own_form, self.term(self.assign.value), name, self.read)
            attention.set(name, new)
            self.replace_reads(call, old, new)

    def replace_reads(self, call: fx.Node, old: Any, new: Any) -> None:
        """Earlier equations of what the attention returns read the new query, too."""
        readers = [nodes for of, nodes in self.inserter.query_readers if of is call and nodes is not self.nodes]
        own = {node for nodes in readers for node in nodes}
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in own)

    def join_manually(self, attention: ManualAttention) -> None:
        term = self.assign.value
        parts = term.parts if isinstance(term, ir.Concat) else (term,)
        own = next(i for i, part in enumerate(parts) if contains_state(part))
        if not isinstance(parts[own], ir.Read):
            message = f"`{self.edit.edit}` can only join rows to the attention here, which the model computes itself"
            raise PeftcError(Diagnostic("P415", message, help="join rows: `kv = concat(prefix(len=l), kv)`"))
        assert isinstance(term.shape, KeyValue)
        like = self.like = attention.batch_like(term.shape.kv_heads)
        for i in [*reversed(range(own)), *range(own + 1, len(parts))]:
            self.start_before(attention.softmax)
            key, value, _, _ = self.key_value(parts[i], None, like)
            attention.join(key, value, after=i > own)

    def key_value(self, term: ir.Term, call: AttentionCall | None, like: Any = None) -> tuple[Any, Any, int, int]:
        """Keys, values, and the numbers of rows joined before and after the own ones."""
        if isinstance(term, ir.Read):
            assert call is not None
            return call.get("k"), call.get("v"), 0, 0
        if isinstance(term, ir.Concat):
            parts = [self.key_value(part, call, like) for part in term.parts]
            i = next(i for i, part in enumerate(term.parts) if contains_state(part))
            before = sum(map(row_count, term.parts[:i])) + parts[i][2]
            after = sum(map(row_count, term.parts[i + 1 :])) + parts[i][3]
            keys, values = [part[0] for part in parts], [part[1] for part in parts]
            return self.function(torch.cat, keys, 2), self.function(torch.cat, values, 2), before, after
        if isinstance(term, ir.FormCall):
            pair = self.form_call(term, like=like if call is None else call.get("k"))
            key, value = pair if isinstance(pair, tuple) else (self.function(operator.getitem, pair, i) for i in (0, 1))
            return key, value, 0, 0
        assert isinstance(term, ir.Arithmetic), term  # of keys and values with a factor, or with others
        left_is_pair = isinstance(term.left.shape, type(term.shape))
        own, factor = (term.left, term.right) if left_is_pair else (term.right, term.left)
        key, value, before, after = self.key_value(own, call, like)
        if isinstance(factor.shape, type(term.shape)):
            factors = self.key_value(factor, call, like)[:2]
        else:
            scale = self.term(factor)
            if getattr(factor.shape, "per_example", False):  # (batch, 1, 1) times (batch, heads, tokens, d_head)
                scale = self.method("unsqueeze", scale, 1)
            factors = (scale, scale)
        operands = [(x, y) if left_is_pair else (y, x) for x, y in zip((key, value), factors, strict=True)]
        key, value = (self.function(ARITHMETIC[term.op], *both) for both in operands)
        return key, value, before, after

    def write_parameter(self, state: RegionState) -> None:
        """Replaces every read of the parameter (`w` or `b`) by the model's code."""
        assert state.weight is not None
        if state.weight.stacked_slice is not None:
            stacked = StackedWeight(self, state, self.inserter.latest)
            parameter = stacked.write(self.value)
            if parameter is not stacked.node:
                self.inserter.replacements[stacked.node] = parameter
            return
        name = parameter_name(state.weight)
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == name]
        if not reads:
            raise PeftcError(Diagnostic("P404", f"the forward here does not read `{name}`", help="edit its `h`"))
        node = self.inserter.latest(reads[0])
        self.start_after(node)
        new = self.function(stored_as, self.value(), node)
        instances = [term.instance for term in ir.subterms(self.assign.value) if isinstance(term, ir.FormCall)]
        new.meta[OWN_DTYPE] = any(instance.args.get("dtype") is not None for instance in instances)
        if state.weight.rows is not None:
            new = self.put_rows(self.matrix(node, state.weight), state.weight.rows, new, 0, state.size)
        if state.weight.layout is not None:
            new = self.function(as_stored, new, node, state.weight.layout.order)
        if state.weight.transposed:
            new = self.method("contiguous", self.method("t", new))  # as it was stored
        for read in reads:  # earlier equations keep the value that they read; the device is the stored weight's
            self.inserter.latest(read).replace_all_uses_with(
                new, delete_user_cb=lambda user: not is_edit(user) and (user.target is not getattr or is_tensor(user))
            )
        self.inserter.replacements[node] = new

    # Reading -------------------------------------------------------------------------------------

    def read(self, state: str) -> Any:
        """The present value of a state, the same node for all reads of this equation."""
        if state not in self.reads:
            self.reads[state] = self.new_read(state)
        if isinstance(self.reads[state], fx.Node):
            self.move_after(self.reads[state])
        return self.reads[state]

    def new_read(self, name: str) -> Any:
        state = self.edit.states[name]
        if state.weight is not None:
            return self.read_parameter(state)
        assert state.anchor is not None
        if state.anchor.kind == "argument":
            call = self.inserter.lookup.node_at(state.anchor)
            self.inserter.query_readers.append((call, self.nodes))
            return AttentionCall(call).get(state.anchor.key[2])
        node = self.inserter.latest(self.inserter.lookup.node_of(state, name))
        self.move_after(node)
        if state.overwritten:
            node = copy_value(node)
        state = self.inserter.lookup.in_trace(state)
        value = self.with_features_last(node, state)
        value = value if state.rows is None else self.take_rows(value, state.rows, -1, state.size)
        if (kernel := state.kernel) is not None:
            geometry = (kernel.size, kernel.stride, kernel.dilation, kernel.padding, kernel.mode)
            return self.function(image_patches, value, *geometry)
        return self.function(unflatten_tokens, value, self.read(STREAM)) if self.is_unflattened(state) else value

    def is_unflattened(self, state: RegionState) -> bool:
        """Whether the edit needs the batch of a state kept as (batch · tokens, d)."""
        return state.flat and STREAM in self.edit.states

    def read_parameter(self, state: RegionState) -> fx.Node:
        assert state.weight is not None
        if state.weight.stacked_slice is not None:
            node = StackedWeight(self, state, self.inserter.latest).read()
        else:
            name = parameter_name(state.weight)
            node = next((n for n in self.graph.nodes if n.op == "get_attr" and n.target == name), None)
            node = self.inserter.latest(node if node is not None else self.add(self.graph.get_attr(name)))
            self.move_after(node)
        value = self.function(full_precision, node)
        value = self.matrix(value, state.weight)
        rows = state.weight.rows
        return value if rows is None else self.take_rows(value, rows, 0, state.size)

    # Terms ---------------------------------------------------------------------------------------

    def value(self) -> Any:
        for let in self.lets:
            self.term(let)
        return self.term(self.assign.value)

    def term(self, term: ir.Term) -> Any:
        if id(term) not in self.memo:
            self.memo[id(term)] = self.new_term(term)
        value = self.memo[id(term)]
        if isinstance(value, fx.Node):
            self.move_after(value)
        return value

    def new_term(self, term: ir.Term) -> Any:
        match term:
            case ir.Read(state=state):
                return self.read(state)
            case ir.Constant(value=value):
                return value
            case ir.FormCall():
                return self.form_call(term, like=None)
            case ir.FrozenCall(function=function, input=value):
                argument, name = self.term(value), self.edit.functions[function]  # without: the region's own forward
                return self.module(name, argument) if name else self.function(base_call, self.inserter.base, argument)
            case ir.Feature(input=value, index=index):
                return self.function(torch.narrow, self.term(value), -1, index, 1)
            case ir.Arithmetic(op="+" | "-" as op, left=left, right=right) if parts := self.scaled_form(right):
                state = self.term(left)
                if isinstance(state, fx.Node):
                    return self.sum_with_form(op, state, *parts)
                return self.function(ARITHMETIC[op], state, self.term(right))
            case ir.Arithmetic(op=op, left=left, right=right):
                return self.function(ARITHMETIC[op], self.term(left), self.term(right))
            case ir.Concat(parts=parts):  # of weights; `key_value` and `write_tokens` handle the others
                return self.function(torch.cat, list(map(self.term, parts)))

    def sum_with_form(self, op: str, state: fx.Node, form: ir.FormCall, factor: float) -> fx.Node:
        """A state plus, or minus, a form times a factor."""
        if has_sum(form) and op == "+" and factor == 1 and not self.inserter.calls_forms:
            module = self.add(self.graph.get_attr(self.form_name(form)))
            return self.method("added_to", module, state, *self.inputs_of(form, None))
        value, own = self.equation(form)
        factor *= own if op == "+" else -own
        return self.function(add_to, state, value, *(() if factor == 1 else (factor,)))

    def is_inline(self, instance: ir.FormInstance) -> bool:
        return is_inline(instance) and not self.inserter.calls_forms

    def scaled_form(self, term: ir.Term) -> tuple[ir.FormCall, float] | None:
        """A form that a sum computes, and the number that multiplies it; None for other terms."""
        match term:
            case _ if id(term) in self.memo:
                return None
            case ir.FormCall(instance=instance) if is_inline(instance) or has_sum(term):
                return term, 1.0
            case ir.Arithmetic(op="*", left=ir.Constant() as number, right=right):
                return None if (form := self.scaled_form(right)) is None else (form[0], self.term(number) * form[1])
            case ir.Arithmetic(op="*", left=left, right=ir.Constant() as number):
                return None if (form := self.scaled_form(left)) is None else (form[0], self.term(number) * form[1])
            case _:
                return None

    def equation(self, term: ir.FormCall) -> tuple[Any, float]:
        """The value of a form by the operations of its equation, and a factor of it."""
        if not self.is_inline(term.instance):
            return self.form_call(term, None), 1.0
        return self.form_code(term, self.inputs_of(term, None)).product()

    def form_code(self, term: ir.FormCall, inputs: Sequence[fx.Node]) -> FormCode:
        module = self.add(self.graph.get_attr(self.form_name(term)))
        training = self.function(getattr, module, "training")
        return FormCode(place_of(term.instance), self.function, module, owners_of(term.instance), inputs, training)

    def inputs_of(self, term: ir.FormCall, like: Any) -> list[Any]:
        """The inputs of a form. One without takes batch, dtype and device from the state."""
        if term.input is None:
            return [like or self.like or self.read(self.assign.state)]
        return list(map(self.term, term.inputs))

    def form_name(self, term: ir.FormCall) -> str:
        return f"{self.edit.place}.{term.instance.key}"

    def form_call(self, term: ir.FormCall, like: Any) -> Any:
        if id(term) in self.memo:
            return self.memo[id(term)]
        inputs = self.inputs_of(term, like)
        if self.is_inline(term.instance):
            value = self.form_code(term, inputs).value_like(inputs[0])
        else:
            value = self.module(self.form_name(term), *inputs)
        if term.input is not None and isinstance(term.input.shape, Ids):  # which have no dtype for the result
            value = self.method("type_as", value, self.read(self.assign.state))
        self.memo[id(term)] = value
        return value
