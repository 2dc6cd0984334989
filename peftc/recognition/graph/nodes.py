"""Small questions about traced graphs: what feeds what, through what."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx, nn

from peftc.recognition.graph.value_operands import changes, is_fact, value_operands, value_users
from peftc.tracing.in_place import WRITES
from peftc.tracing.patches import attention
from peftc.tracing.ragged_loops import segment

EDIT = "<edit>"  # in the place of a module's name, in the origin of nodes that edits make
ADDS = (operator.add, operator.iadd, torch.add)
SCALINGS = (operator.mul, operator.imul, torch.mul, operator.truediv, operator.itruediv, torch.div)
PRODUCTS = (operator.matmul, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, torch.mm)
PASSING_METHODS = frozenset(
    {"to", "type", "type_as", "contiguous", "view", "reshape", "float", "clone", "squeeze", "unsqueeze", "flatten"}
)
PASSING_FUNCTIONS = (nn.functional.dropout, torch.clamp, torch.reshape, torch.dropout)


def example(node: object) -> object:
    return node.meta.get("example") if isinstance(node, fx.Node) else node


def is_tensor(node: object) -> bool:
    return isinstance(example(node), torch.Tensor)


def shape(node: object) -> tuple[int, ...]:
    """The example's shape; () for what is no tensor."""
    value = example(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_linear(node: object, root: nn.Module) -> bool:
    """A leaf whose weight is a matrix that maps features: nn.Linear, Conv1D, quantised Linears; no embedding, no router."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or not is_tensor(node):
        return False
    module = root.get_submodule(str(node.target))
    weight = getattr(module, "weight", None)
    if getattr(weight, "ndim", 0) != 2 or isinstance(module, nn.Embedding):
        return False
    result = example(node)
    assert isinstance(result, torch.Tensor)
    return isinstance(module, nn.Linear) or result.shape[-1] in weight.shape  # pyright: ignore[reportOptionalMemberAccess]


def is_norm(node: object, root: nn.Module) -> bool:
    """A leaf whose only matrix-free weight scales features: layer norms and RMS norms."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or isinstance(example(node), tuple):
        return False
    return is_norm_module(root.get_submodule(str(node.target)))


def is_norm_module(module: nn.Module) -> bool:
    weights = [p.ndim for p in module.parameters()]
    return not list(module.children()) and (
        (weights != [] and max(weights) == 1) or (not weights and is_norm_named(module))
    )


def is_norm_named(module: nn.Module) -> bool:
    """Norms without a weight can only be told by their name."""
    return "norm" in type(module).__name__.lower()


def is_attention(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is attention


def is_edit(node: fx.Node) -> bool:
    """Whether an edit made the node."""
    return node.meta.get("origin", ("",))[0] == EDIT


def is_add(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in ADDS
    return node.op == "call_method" and node.target in ("add", "add_")


def is_scaling(node: fx.Node) -> bool:
    """A product or quotient, element by element."""
    if node.op == "call_function":
        return node.target in SCALINGS
    return node.op == "call_method" and node.target in ("mul", "div", "mul_", "div_")


def is_product(node: fx.Node) -> bool:
    """A product of matrices, neither of which need be a parameter."""
    if node.op == "call_function":
        return node.target in PRODUCTS
    return node.op == "call_method" and node.target in ("matmul", "bmm", "baddbmm", "mm")


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


def upstream(node: fx.Node, stop: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Every node that `node` depends on, itself first; nothing behind a node for which `stop` holds (those included)."""
    seen: set[fx.Node] = set()
    first, todo = node, [node]
    while todo:
        n = todo.pop()
        if n in seen or is_fact(n):
            continue
        seen.add(n)
        yield n
        if not stop(n):
            todo.extend(value_operands(n))
            todo.extend(user for user in n.users if changes(user, n) and user < first)


def consumer_linear(node: fx.Node, root: nn.Module, within: set[fx.Node]) -> fx.Node | None:
    """The nearest Linear downstream of a value, inside `within`; the last, where one makes what another one reads (a gate)."""
    seen: set[fx.Node] = set()
    todo, found = [node], list[fx.Node]()
    while todo:
        for user in value_users(todo.pop(0)):
            if user in seen or user not in within:
                continue
            seen.add(user)
            (found if is_linear(user, root) else todo).append(user)
    behind = {n: set(upstream(n, lambda _: False)) for n in found}
    return next((n for n in found if not any(n in behind[other] for other in found if other is not n)), None)


def has_side_effects(node: fx.Node) -> bool:
    """Whether running a node twice could change something, or costs a module's forward."""
    if node.op == "call_module" or WRITES in node.meta:
        return True
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return (
            node.target in (attention, segment)
            or name in ("setitem", "dropout")
            or (name.endswith("_") and not name.endswith("__"))
        )
    if node.op == "call_method":
        name = str(node.target)
        return name in ("update", "append", "pop", "setdefault") or (name.endswith("_") and not name.endswith("__"))
    return False


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything that it is computed from."""
    found, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found
