"""The operations of a form in a graph, and the forward of its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from peftc.equation_code import functions
from peftc.equation_code.code import VARIABLE, Code, Emit, Operation, emit_into
from peftc.equation_code.functions import add_linear, add_to, linear
from peftc.equations.analysis import Place
from peftc.equations.words import OUT, is_whole
from peftc.syntax import ast

LAYERS = "layers"  # of the code that has values of other layers
STATE = "_state"  # that a form is added to; no name of a text
Forward = Callable[..., Tensor]


class FormCode:
    """The operations of a form in a graph: inputs in the dtype of the parameters, and the equation.

    Args:
        module: the node of the module of the form.
        owners: parameters with the attribute of the module that has them, if not the module.
        training: the node of whether the model is being trained.
        values: the nodes of parameters that are not read from a module.
    """

    def __init__(
        self,
        place: Place,
        emit: Emit,
        module: fx.Node,
        owners: Mapping[str, str],
        inputs: Sequence[fx.Node],
        training: fx.Node,
        linear: Callable[..., Tensor] = F.linear,
        values: Mapping[str, fx.Node] | None = None,
    ) -> None:
        self.emit, self.module, self.owners, self.training = emit, module, owners, training
        self.parameters = dict(values or {})
        self.owner_nodes: dict[str, fx.Node] = {}
        self.place = place
        cast_inputs = dict(zip(place.inputs, map(self._cast, place.inputs, inputs), strict=False))
        self.code = Code(place, emit, cast_inputs, self.parameter, training, linear, self.attribute)

    def parameter(self, name: str) -> fx.Node:
        if name not in self.parameters:
            module = self._owner(self.owners.get(name, ""))
            selection = self.place.selection
            if selection is not None and name in selection[:2]:
                self.parameters[name] = self.emit(functions.selection_part, self.module, name, selection.units)
            elif name in self.place.buffers:
                self.parameters[name] = self.emit(functions.filled_buffer, module, name, self.training)
            else:
                self.parameters[name] = self.emit(getattr, module, self.place.tensor(name))
        return self.parameters[name]

    def _owner(self, path: str) -> fx.Node:
        """The node of the module at a dotted path of attributes from that of the form."""
        if not path:
            return self.module
        if path not in self.owner_nodes:
            parent, _, attribute = path.rpartition(".")
            self.owner_nodes[path] = self.emit(getattr, self._owner(parent), attribute)
        return self.owner_nodes[path]

    def attribute(self, name: str) -> fx.Node:
        return self.emit(getattr, self.module, name)

    def _cast(self, name: str, value: fx.Node) -> fx.Node:
        """An input in the dtype of the parameters, heads behind tokens; ids as they are."""
        lines = self.place.parameters
        first = next((name for name in self.place.sizes if not is_whole(lines[name])), None)
        if name in self.place.heads_first:
            value = self.emit(torch.transpose, value, 1, 2)
            value.meta[VARIABLE] = name
        if first is None or self.place.types[name].batch == "ids":
            return value
        value = self.emit(functions.cast_like, value, self.parameter(first))
        value.meta[VARIABLE] = name
        return value

    def value(self) -> Operation:
        """The node of the value of the form, as the state has its dimensions."""
        return self._as_state(self.code.value())

    def product(self) -> tuple[Operation, float]:
        """The node of a value, and the number that it has to be multiplied by."""
        node, factor = self.code.product()
        return self._as_state(node), factor

    def value_like(self, like: fx.Node) -> fx.Node | tuple[fx.Node, ...]:
        """The value in the dtype of a state; keys and values for each of its examples."""
        value = self.value()
        if isinstance(value, tuple):
            return tuple(self.emit(functions.for_batch, part, like) for part in value)
        return self.emit(functions.cast_like, value, like)

    def _as_state(self, node: Operation) -> Operation:
        type_, out = self.place.value.type, self.place.types.get(OUT)
        has_heads = out is not None and bool(out.batch) and len(out.size) == 2
        if type_.batch == "examples" and has_heads:  # (batch, 1, 1) beside heads
            return self.emit(torch.unsqueeze, node, -1)
        if type_.batch == "examples" and self.place.writes_pair:  # one for each row
            return self.emit(torch.transpose, node, 1, 2)
        if OUT in self.place.heads_first and len(type_.size) == 2:
            return self.emit(functions.heads_first, node)
        return node


def forward_of(place: Place, owners: tuple[tuple[str, str], ...]) -> Forward:
    """`forward(self, *inputs)` of a module with the parameters of a form, the same for a place.

    Its first argument also gives the dtype of the value, and is the only one of a form without
    inputs. The parameters may have a first dimension of rows (`stacked_module`).
    """
    if owners not in place.code:
        place.code[owners] = _forward(place, dict(owners))
    return place.code[owners]


def sum_of(place: Place, owners: tuple[tuple[str, str], ...]) -> Forward:
    """`forward(self, h, *inputs)`, which adds the value of the form to h."""
    key = STATE, owners
    function = place.code.get(key)
    if function is None:
        function = place.code[key] = _forward(place, dict(owners), adds=True)
    return function


def sum_of_rows(place: Place, owners: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> Forward:
    """`forward(self, h, *inputs, *values)`, with values in the place of these parameters."""
    key = STATE, owners, names
    if key not in place.code:
        place.code[key] = _forward(place, dict(owners), adds=True, replaced=names)
    return place.code[key]


def cross_layer_forward(place: Place, owners: tuple[tuple[str, str], ...], is_first: bool) -> Forward:
    """`forward(self, *inputs, *below)`: the value, and what the sites above read of this one.

    `below`: of each call of `below` the value at the site below, of `history` the values of all
    sites below; nothing at the first site.
    """
    key = LAYERS, is_first, owners
    if key not in place.code:
        place.code[key] = _forward(place, dict(owners), below=() if is_first else place.layer_calls)
    return place.code[key]


def _forward(
    place: Place,
    owners: Mapping[str, str],
    adds: bool = False,
    below: Sequence[ast.Call] | None = None,
    replaced: Sequence[str] = (),
) -> Forward:
    graph = fx.Graph()
    emit = emit_into(graph)
    module = graph.placeholder("self")
    state = graph.placeholder(STATE) if adds else None
    inputs = [graph.placeholder(name) for name in place.inputs or ("like",)]
    of_below = {call: graph.placeholder(f"below_{i}") for i, call in enumerate(below or ())}
    arguments = {name: graph.placeholder(f"{name}_of_rows") for name in replaced}
    own = {name: place.tensor(name) for name in place.parameters if name not in owners}
    values = {name: arguments[tensor] for name, tensor in own.items() if tensor in arguments}
    training = emit(getattr, module, "training")
    form = FormCode(place, emit, module, owners, inputs, training, linear, values)
    form.code.below = of_below
    of_ids = bool(place.inputs) and place.types[place.inputs[0]].batch == "ids"
    if state is not None:
        graph.output(_sum(emit, state, *form.product()))
    elif below is not None:
        graph.output((form.value_like(inputs[0]), tuple(map(form.code.operation, place.layer_values))))
    else:
        graph.output(form.value() if of_ids else form.value_like(inputs[0]))
    graph.eliminate_dead_code()
    code = graph.python_code("self", verbose=False)
    names = dict(code.globals)
    exec(compile(code.src, "<form>", "exec"), names)  # of the graph, not of the text
    return cast(Forward, names["forward"])


def _sum(emit: Emit, state: fx.Node, value: Operation, factor: float) -> fx.Node:
    scale = () if factor == 1 else (factor,)
    if isinstance(value, fx.Node) and value.target is linear and len(value.args) == 2:
        return emit(add_linear, state, *value.args, *scale)
    return emit(add_to, state, value, *scale)


def code_text(place: Place) -> str:
    """A text that is equal for places of the same code."""
    if "text" not in place.code:
        graph = fx.Graph()
        module, *inputs = (graph.placeholder(name) for name in ("self", *(place.inputs or ("like",))))
        form = FormCode(place, emit_into(graph), module, {}, inputs, graph.placeholder("training"))
        value, factor = form.product()
        graph.output((value, factor))
        place.code["text"] = str(graph)
    return place.code["text"]
