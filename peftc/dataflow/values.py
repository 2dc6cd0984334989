"""Which nodes the values of a result are computed from.

An operation may read the values of a tensor, or only its dtype, device or shape: `k.to(q)` reads
the dtype of `q`, `torch.zeros_like(x)` the shape of `x`. Walks follow values only.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.dataflow.buffers import written_value
from peftc.dataflow.nodes import example, first_input, is_tensor, nodes_in, output_of, shape
from peftc.dataflow.operations import LAYOUT, OF_FIRST, SCALE, Op, is_in_place, op_of
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.modules.walk import submodule
from peftc.tracing.operations import new_version
from peftc.tracing.region_trace import ModuleCall, RegionTrace
from peftc.tracing.tracer import approximate_trace

# In a module call's meta: the operands of each item of the result, or of a `WHOLE` result.
ITEM_OPERANDS, WHOLE = "item operands", -1


def upstream(node: fx.Node, stop: Callable[[fx.Node], bool] = lambda _: False) -> Iterator[fx.Node]:
    """`node`, then the nodes that it is computed from. The walk ends at nodes that `stop`."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen or op_of(current) is Op.QUERY:
            continue
        seen.add(current)
        yield current
        if not stop(current):
            stack += value_operands(current)
            stack += [user for user in current.users if changes(user, current) and user < node]


def reaches(source: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is computed from `source`."""
    return any(n is source for n in upstream(node, lambda n: n is source))


def without_gates(node: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """What `node` is computed from, back to `end`, without factors that many entries share."""
    # Seen in: MaxViT (squeeze and excitation)
    nodes, seen = [node], {end}
    for current in nodes:  # which grows
        yield current
        operands = [n for n in value_operands(current) if n not in seen]
        if op_of(current) in SCALE:
            operands = [n for n in operands if prod(shape(n)) == prod(shape(current))]
        nodes += operands
        seen.update(operands)


def value_operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that the values of `node` are computed from, each once.

    A tensor of constants depends on the nodes that write to it. The keys and values that a cache's
    update returns depend on those that were passed to it.
    """
    if (part := _part(node)) is not None:
        return part
    op = op_of(node)
    if op in OF_FIRST:
        first = first_input(node)
        return node.all_input_nodes if first is None else [first]
    if op is Op.CREATE:
        values = [n for n in node.all_input_nodes if is_tensor(n) and n is not first_input(node)]
        return list(dict.fromkeys([*values, *writes_into(node)]))
    return list(dict.fromkeys(node.all_input_nodes))


def value_users(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values are computed from `node`: users, and items of their results."""
    parts = (part for user in node.users for part in user.users if part.target is operator.getitem)
    users = dict.fromkeys([*node.users, *parts])
    return [user for user in users if op_of(user) is not Op.QUERY and node in value_operands(user)]


def changes(node: fx.Node, value: fx.Node) -> bool:
    """Whether `node` writes to `value` in place. Later nodes that read `value` depend on `node`."""
    return is_in_place(node) and bool(node.args) and node.args[0] is value


def cache_update(node: fx.Node) -> fx.Node | None:
    """For the keys or values that a cache's update returned: those that were passed to it."""
    source = node.args[0] if op_of(node) is Op.ITEM else None
    if not isinstance(source, fx.Node) or op_of(source) is not Op.CACHE or node.args[1] not in (0, 1):
        return None
    update = source.args[1 + int(node.args[1] == 1)] if len(source.args) > 2 else None
    return update if isinstance(update, fx.Node) else None


def _part(node: fx.Node) -> list[fx.Node] | None:
    """The operands of one item of a result, or of a module's result; None where unknown."""
    if node.op == "call_module":
        return node.meta.get(ITEM_OPERANDS, {}).get(WHOLE)
    if (value := written_value(node)) is not None:
        return [value]
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    while isinstance(source, fx.Node) and isinstance(index, int) and (whole := _sliced(source)) is not None:
        source, index = whole, range(len(whole.meta["example"]))[source.args[1]][index]  # pyright: ignore
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    if (update := cache_update(node)) is not None:
        return [update]
    operands = nodes_in(source.args) if op_of(source) is Op.BROADCAST else []
    return operands[index : index + 1] or source.meta.get(ITEM_OPERANDS, {}).get(index)


def _sliced(node: fx.Node) -> fx.Node | None:
    """The list or tuple of results that `node` is a slice of, if it is one."""
    source = node.args[0] if node.target is operator.getitem and isinstance(node.args[1], slice) else None
    return source if isinstance(source, fx.Node) and isinstance(example(source), (tuple, list)) else None


def writes_into(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that write into a tensor, or into a view of it."""
    for user in node.users:
        if user.args and user.args[0] is node:
            if is_in_place(user):
                yield user
            elif user.target is new_version or op_of(user) in LAYOUT:
                yield from writes_into(user)


def mark_operands(traced: RegionTrace, root: nn.Module, mode: FakeTensorMode) -> None:
    """Sets `ITEM_OPERANDS` for calls of leaf modules that have no weight matrices.

    `rotary(values, positions)` reads only the dtype of `values`, and `positions(values)` the shape.
    `rotary(q, k)` returns two results, each computed from one argument.
    """
    # Seen in: rotary embeddings that are modules; without it, several roles would be one
    for call in traced.calls:
        node, module = call.result, submodule(root, call.name)
        arguments = {name: value for name, value in call.arguments.items() if isinstance(value, fx.Node)}
        nested = any(isinstance(value, (tuple, list, dict)) and value for value in call.arguments.values())
        plain = not type(module).__module__.startswith("torch.") and all(p.ndim < 2 for p in module.parameters())
        if not isinstance(node, fx.Node) or not plain or call.inlined or nested:
            continue
        changes_shape = any(shape(value) != shape(node) for value in arguments.values())
        if len(arguments) > 1 or changes_shape:
            operands = _item_operands(module, call, mode)
            node.meta[ITEM_OPERANDS] = {part: [arguments[n] for n in names] for part, names in operands.items()}


def _item_operands(module: nn.Module, call: ModuleCall, mode: FakeTensorMode) -> dict[int, list[str]]:
    """For each item of a leaf's result, the parameters of its forward that it is computed from."""
    arguments = fx.map_arg(call.arguments, lambda n: n.meta.get("example"))
    try:
        with mode:
            graph = approximate_trace(module, fake_copy(arguments, mode)).graph
    except Exception:  # of a model's own code
        return _differentiable_operands(module, arguments, mode)
    result = output_of(graph).args[0]
    return {
        i: [str(n.target) for n in sorted(upstream(part)) if n.op == "placeholder"]
        for i, part in _items(result).items()
        if isinstance(part, fx.Node)
    }


def _items(result: object) -> dict[int, object]:
    return dict(enumerate(cast(Sequence[object], result))) if isinstance(result, (tuple, list)) else {WHOLE: result}


def _differentiable_operands(module: nn.Module, arguments: Any, mode: FakeTensorMode) -> dict[int, list[str]]:
    """The same by autograd, for each item that has a gradient to any parameter."""
    # Seen in: no transformers model; ESM's rotary embeddings, which keep tensors between calls
    inputs = fake_copy(dict(arguments), mode)
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    try:
        with mode, fake_data_answers(), torch.enable_grad():
            inputs |= {name: inputs[name].detach().requires_grad_() for name in names}
            items = _items(module(**inputs))
    except Exception:  # of a model's own code
        return {}
    leaves = {id(inputs[name]): name for name in names}
    operands = {i: [leaves[id(n)] for n in _inputs_of(part) if id(n) in leaves] for i, part in items.items()}
    return {i: names for i, names in operands.items() if names}


def _inputs_of(value: object) -> Iterator[object]:
    """The tensors that autograd would send a gradient to."""
    functions: list[Any] = [value.grad_fn] if isinstance(value, torch.Tensor) else []
    for function in functions:  # which grows
        if hasattr(function, "variable"):
            yield function.variable
        functions += [f for f, _ in getattr(function, "next_functions", ()) if f is not None and f not in functions]
