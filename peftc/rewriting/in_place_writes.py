"""In-place writes by the model: edits read the values from before them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from peftc.dataflow.nodes import EDIT, example, is_edit
from peftc.tracing.in_place import WRITES, storage_id, writes_to
from peftc.tracing.operations import new_version

COPY = "copy"  # in place of a number, in the origin of a copy
REPLACES = "replaces"  # in the meta of an edit's node: the state whose value, with all its views, it replaces


def later_writes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that write to a value's memory after it was computed, through any alias."""
    value = value_of(node)
    storage = storage_id(value)
    if not storage or not any(WRITES in n.meta for n in node.graph.nodes):
        return
    seen, todo = {node}, [node]
    while todo:
        alias = todo.pop()
        users = [user for user in alias.users if not is_edit(user)]
        yield from (user for user in users if writes_to(user, value) and node < user)
        neighbours = [*users, *([] if is_edit(alias) else alias.all_input_nodes)]
        aliases = [n for n in neighbours if n not in seen and storage_id(value_of(n)) == storage]
        seen.update(aliases)
        todo += aliases


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


def later_versions(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and those that stand for the same tensor after in-place writes."""
    value = example(node)
    seen, todo = {node}, [node]
    while todo:
        yield (version := todo.pop())
        after = [u for u in version.users if u not in seen and (writes_to(u, value) or u.target is new_version)]
        seen.update(after)
        todo += after


def earlier_versions(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stand for the same tensor before in-place writes."""
    storage = storage_id(example(node))
    seen, todo = {node}, [node]
    while todo:
        version = todo.pop()
        if WRITES not in version.meta and version.target is not new_version:
            continue
        before = [n for n in version.all_input_nodes if n not in seen and storage_id(example(n)) == storage]
        yield from before
        seen.update(before)
        todo += before
