"""Small questions about traced graphs: what feeds what, through what."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx, nn

from peftc.tracing.seams import attention
from peftc.tracing.sites import Slice

ADDS = (operator.add, operator.iadd, torch.add)
PASSING_METHODS = frozenset(
    {"to", "type", "type_as", "contiguous", "view", "reshape", "float", "clone", "squeeze", "unsqueeze", "flatten"}
)
PASSING_FUNCTIONS = (nn.functional.dropout, torch.clamp, torch.reshape, torch.dropout)


def example(node: object) -> object:
    return node.meta.get("example") if isinstance(node, fx.Node) else node


def is_tensor(node: object) -> bool:
    return isinstance(example(node), torch.Tensor)


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_linear(node: object, root: nn.Module) -> bool:
    """A leaf whose weight is a matrix: nn.Linear, Conv1D, quantised Linears; not an embedding."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return False
    module = root.get_submodule(str(node.target))
    return getattr(getattr(module, "weight", None), "ndim", 0) == 2 and not isinstance(module, nn.Embedding)


def is_norm(node: object, root: nn.Module) -> bool:
    """A leaf whose only matrix-free weight scales features: layer norms and RMS norms."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return False
    return is_norm_module(root.get_submodule(str(node.target)))


def is_norm_module(module: nn.Module) -> bool:
    weights = [p.ndim for p in module.parameters()]
    named = "norm" in type(module).__name__.lower()  # norms without a weight (OLMo) can only be told by their name
    return not list(module.children()) and ((weights != [] and max(weights) == 1) or (not weights and named))


def is_attention(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is attention


def is_size(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "size"


def is_add(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in ADDS
    return node.op == "call_method" and node.target in ("add", "add_")


def passes_through(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The tensor that `node` hands on unchanged but for dropout, dtype or layout; None where it computes."""
    if node.op == "call_method" and node.target in PASSING_METHODS:
        return first_input(node)
    if node.op == "call_function" and node.target in PASSING_FUNCTIONS:
        return first_input(node)
    if node.op == "call_module" and isinstance(module_of(node, root), (nn.Dropout, nn.Identity)):
        return first_input(node)
    return None


def first_input(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def stripped(node: fx.Node, root: nn.Module) -> fx.Node:
    """`node` without the dropouts, casts and reshapes in front of it."""
    while (before := passes_through(node, root)) is not None:
        node = before
    return node


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that the value of `node` is computed from; a cache update hands on what it is given."""
    source = node.args[0] if node.target is operator.getitem else None
    if (
        isinstance(source, fx.Node)
        and source.op == "call_method"
        and source.target == "update"
        and node.args[1] in (0, 1)
    ):
        given = source.args[1 + int(node.args[1] == 1)]  # cache.update(k, v, …)[0 | 1]
        return [given] if isinstance(given, fx.Node) else []
    return node.all_input_nodes


def upstream(node: fx.Node, stop: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Every node that `node` depends on, itself first; nothing behind a node for which `stop` holds (those included)."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n in seen or is_size(n):
            continue
        seen.add(n)
        yield n
        if not stop(n):
            todo.extend(sources(n))


def feeding(node: fx.Node, root: nn.Module) -> list[tuple[fx.Node, Slice | None]]:
    """The nearest Linears upstream of a value, each with the rows of its output that go there (None: all)."""
    found: list[tuple[fx.Node, Slice | None]] = []
    seen: set[tuple[fx.Node, Slice | None]] = set()
    todo: list[tuple[fx.Node, Slice | None]] = [(node, None)]
    while todo:
        n, rows = todo.pop()
        if (n, rows) in seen or is_size(n):
            continue
        seen.add((n, rows))
        if is_linear(n, root):
            found.append((n, rows))
            continue
        cut = slice_of_last_dimension(n)
        for source in sources(n):
            todo.append((source, cut if cut is not None and rows is None else rows))
    return found


def slice_of_last_dimension(node: fx.Node) -> Slice | None:
    """The features that `x.split(…, -1)[i]`, `x.chunk(…, -1)[i]` or `x[..., a:b]` selects, else None."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, key = node.args[0], node.args[1]
    parts = example(source)
    if isinstance(parts, (tuple, list)) and isinstance(key, int) and all(isinstance(p, torch.Tensor) for p in parts):
        whole = example(source.args[0]) if source.args else None
        widths = [p.shape[-1] for p in parts]
        if isinstance(whole, torch.Tensor) and whole.shape[-1] == sum(widths):
            key = key % len(widths)
            return Slice(sum(widths[:key]), sum(widths[: key + 1]))
    if isinstance(parts, torch.Tensor) and isinstance(key, tuple) and key and isinstance(key[-1], slice):
        whole_slices = all(k is ... or k == slice(None) for k in key[:-1])
        bounds = key[-1].indices(parts.shape[-1]) if whole_slices and plain(key[-1]) else None
        if bounds is not None and bounds[2] == 1 and bounds[:2] != (0, parts.shape[-1]):
            return Slice(bounds[0], bounds[1])
    return None


def plain(cut: slice) -> bool:
    return all(v is None or isinstance(v, int) for v in (cut.start, cut.stop, cut.step))


def fed(node: fx.Node, root: nn.Module, within: set[fx.Node]) -> fx.Node | None:
    """The nearest Linear downstream of a value, inside `within`."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop(0).users:
            if user in seen or is_size(user) or user not in within:
                continue
            seen.add(user)
            if is_linear(user, root):
                return user
            todo.append(user)
    return None
