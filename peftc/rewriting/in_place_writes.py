"""In-place writes by the model: edits read the values from before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from peftc.dataflow.nodes import EDIT, example, is_edit
from peftc.tracing.in_place import WRITES, storage_id, writes_to
from peftc.tracing.operations import new_version

COPY = "copy"  # in place of a number, in the origin of a copy
REPLACES = "replaces"  # in the meta of an edit's node: the state whose value, with all its views, it replaces


def closure(start: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """A node and all nodes that are reached from it, each once."""
    nodes, seen = [start], {start}
    for node in nodes:  # which grows
        new = [n for n in dict.fromkeys(neighbours(node)) if n not in seen]
        seen.update(new)
        nodes += new
    return nodes


def later_writes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that write to a value's memory after it was computed, through any alias."""
    value = value_of(node)
    storage = storage_id(value)
    if not storage or not any(WRITES in n.meta for n in node.graph.nodes):
        return

    def aliases(alias: fx.Node) -> list[fx.Node]:
        neighbours = [*alias.users, *([] if is_edit(alias) else alias.all_input_nodes)]
        return [n for n in neighbours if storage_id(value_of(n)) == storage and not (n in alias.users and is_edit(n))]

    users = (user for alias in closure(node, aliases) for user in alias.users if not is_edit(user))
    yield from (user for user in users if writes_to(user, value) and node < user)


def copy_operands_of_edits(graph: fx.Graph) -> None:
    """Lets edits read copies of values that the model overwrites later."""
    if not any(WRITES in node.meta for node in graph.nodes):
        return
    for node in list(graph.nodes):
        edits = [user for user in node.users if is_edit(user)]
        if edits and (not is_edit(node) or REPLACES in node.meta) and next(later_writes(node), None) is not None:
            copy = copy_value(node)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, edits=edits: user in edits)


def copy_value(node: fx.Node) -> fx.Node:
    """Adds a copy of a value directly behind its node."""
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with node.graph.inserting_after(last):
        copy = node.graph.call_method("clone", (node,))
    copy.meta["origin"] = (EDIT, COPY, 0)
    return copy


def value_of(node: fx.Node) -> object:
    return example(node.meta.get(REPLACES, node))


def later_versions(node: fx.Node) -> list[fx.Node]:
    """A node, and those that stand for the same tensor after in-place writes."""
    value = example(node)
    return closure(node, lambda n: [u for u in n.users if writes_to(u, value) or u.target is new_version])


def earlier_versions(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the same tensor before in-place writes."""
    storage = storage_id(example(node))

    def before(version: fx.Node) -> list[fx.Node]:
        is_version = WRITES in version.meta or version.target is new_version
        return [n for n in version.all_input_nodes if is_version and storage_id(example(n)) == storage]

    return closure(node, before)[1:]
