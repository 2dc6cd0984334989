"""Which operands the values of a result are computed from.

An operation takes a tensor for its values, or only for its dtype, its device or its shape:

    k.to(q)    x.type_as(y)    x.expand_as(y)    torch.zeros_like(x)    x.new_zeros(3)    torch.arange(n, device=x.device)

Every walk through a graph, backwards or forwards, follows values alone. What does so is decided here and nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from peftc.tracing.in_place import AUGMENTED, new_version

# Operands by position and by keyword. An operation that is not listed takes the values of all of them.
Operands = tuple[int | str, ...]
_FIRST: Operands = (0, "input", "self")
CARRIERS, WHOLE = "carriers", -1  # in a node's meta: the nodes that each part of a module's result is computed from
_CARRIERS: Mapping[str, Operands] = {
    # casts and layouts: the other operands tell a dtype, a device or a shape
    **dict.fromkeys(
        ("to", "type", "type_as", "view_as", "reshape_as", "expand_as", "resize_as_", "sum_to_size"), _FIRST
    ),
    **dict.fromkeys(
        ("view", "reshape", "expand", "broadcast_to", "flatten", "unflatten", "unsqueeze", "squeeze"), _FIRST
    ),
    # tensors of their own
    **dict.fromkeys(("empty", "zeros", "ones", "rand", "randn", "randint", "randperm", "eye"), ()),
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like"), ()),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "empty_strided", "new_empty_strided"), ()),
    **dict.fromkeys(("full", "full_like"), (1, "fill_value")),
    "new_full": (2, "fill_value"),
    "new_tensor": (1, "data"),
}
_BLANKS = frozenset(name for name in _CARRIERS if name.startswith(("empty", "zeros", "ones", "full", "new_")))
_ONE_BY_ONE = frozenset({"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"})
_FACTS = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "itemsize"),
        *("get_device", "is_floating_point", "is_complex", "is_contiguous"),
    ]
)
_VIEWS = frozenset({"view", "transpose", "permute", "narrow", "select", "unsqueeze", "squeeze"})


def operation(node: fx.Node) -> str:
    """The name of what a node calls: of a method, or of a function of torch or Python."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def is_size(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "size"


def is_fact(node: fx.Node) -> bool:
    """Whether a node asks a tensor for something that does not depend on its values: a size, its device, its dtype."""
    if node.target is getattr:
        return isinstance(node.meta.get("example"), (torch.device, torch.dtype, torch.layout, torch.Size, int))
    return operation(node) in _FACTS


def value_operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that the values of `node` are computed from, each once.

    Of a tensor of its own: what is written into it. Of a part of a result: what that part is computed from. Of a part of a
    cache: what the cache was given.
    """
    if (part := _part(node)) is not None:
        return part
    names = _CARRIERS.get(operation(node))
    operands = node.all_input_nodes if names is None else list(_nodes(list(_carried(node, names))))
    written = writes(node) if is_blank(node) else ()
    return list(dict.fromkeys([*operands, *written]))


def value_users(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values are computed from `node`: users of it, and parts of what they return."""
    parts = (part for user in node.users for part in user.users if part.target is operator.getitem)
    near = dict.fromkeys([*node.users, *parts])
    return [user for user in near if not is_fact(user) and node in value_operands(user)]


def _carried(node: fx.Node, names: Operands) -> Iterator[object]:
    for name in names:
        if isinstance(name, int):
            yield from node.args[name : name + 1]
        elif name in node.kwargs:
            yield node.kwargs[name]


def _part(node: fx.Node) -> list[fx.Node] | None:
    """What one of several results is computed from, or the only result of a module; None where that is not known."""
    if node.op == "call_module":
        return node.meta.get(CARRIERS, {}).get(WHOLE)
    source, index = node.args if node.target is operator.getitem else (None, None)
    while isinstance(source, fx.Node) and isinstance(index, int) and (whole := _sliced(source)) is not None:
        source, index = whole, range(len(whole.meta["example"]))[source.args[1]][index]  # pyright: ignore
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    if is_cache_part(node):
        part = cache_part(node)
        return [] if part is None else [part]
    operands = list(_nodes(source.args)) if operation(source) in _ONE_BY_ONE else []
    return operands[index : index + 1] or source.meta.get(CARRIERS, {}).get(index)


def _sliced(node: fx.Node) -> fx.Node | None:
    """The results of which a node is some, in an order of its own."""
    source = node.args[0] if node.target is operator.getitem and isinstance(node.args[1], slice) else None
    whole = isinstance(source, fx.Node) and isinstance(source.meta.get("example"), (tuple, list))
    return source if isinstance(source, fx.Node) and whole else None


def _nodes(value: object) -> Iterator[fx.Node]:
    """The nodes in nested arguments, in order, with repetitions."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _nodes(part)  # pyright: ignore[reportUnknownArgumentType]


# Writes in place ---------------------------------------------------------------------------------------------------


def is_blank(node: fx.Node) -> bool:
    """Whether a node makes a tensor of its own, whose values are those that are written into it later."""
    return operation(node) in _BLANKS


def is_write(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place: `copy_`, `index_add_`, `t[key] = value`."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target is operator.setitem or node.target in AUGMENTED


def changes(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node writes into a value that was there before: what reads it later reads what was written."""
    return is_write(node) and bool(node.args) and node.args[0] is value


def writes(node: fx.Node) -> Iterator[fx.Node]:
    """What is written into a tensor, or into a view of it."""
    for user in node.users:
        if user.args and user.args[0] is node:
            if is_write(user):
                yield user
            elif user.target in (operator.getitem, new_version) or (user.op == "call_method" and user.target in _VIEWS):
                yield from writes(user)


# Caches ------------------------------------------------------------------------------------------------------------


def is_cache_part(node: fx.Node) -> bool:
    """Whether this is `cache.update(k, v, …)[0]` or `[1]`."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.op != "call_method" or source.target != "update":
        return False
    return node.args[1] in (0, 1) and len(source.args) > 2


def cache_part(node: fx.Node) -> fx.Node | None:
    """The keys, or the values, that a cache's update was given."""
    source = node.args[0]
    given = source.args[1 + int(node.args[1] == 1)] if isinstance(source, fx.Node) else None
    return given if isinstance(given, fx.Node) else None
