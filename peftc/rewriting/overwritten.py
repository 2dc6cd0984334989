"""States whose memory the model's own code writes into later: what reads one of them needs it as it was."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from peftc.dataflow.nodes import EDIT, example, is_edit
from peftc.tracing.in_place import WRITES, storage_id, writes_to
from peftc.tracing.operations import new_version

COPY = "copy"  # in the place of a number, in the origin of a copy
STANDS_FOR = "stands_for"  # in the meta of what an edit has made of a state: the state, whose views are those of the new value now


def writers(node: fx.Node) -> Iterator[fx.Node]:
    """What changes the memory of a value after its node has run, as the graph is now."""
    value = value_of(node)
    if not storage_id(value) or not any(WRITES in n.meta for n in node.graph.nodes):
        return
    seen, todo = {node}, [node]
    while todo:
        now = todo.pop()
        users = [user for user in now.users if not is_edit(user)]
        yield from (user for user in users if writes_to(user, value) and node < user)
        near = [*users, *([] if is_edit(now) else now.all_input_nodes)]
        views = [n for n in near if n not in seen and storage_id(value_of(n)) == storage_id(value)]
        seen.update(views)
        todo += views


def keep_reads(graph: fx.Graph) -> None:
    """Edits read copies of the values whose memory changes later: where they run behind the change, and for their gradients."""
    if not any(WRITES in node.meta for node in graph.nodes):
        return
    for node in list(graph.nodes):
        readers = [user for user in node.users if is_edit(user)]
        if readers and (not is_edit(node) or STANDS_FOR in node.meta) and any(True for _ in writers(node)):
            copy = copy_of(node)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, readers=readers: user in readers)


def copy_of(node: fx.Node) -> fx.Node:
    """A node for a copy of a value, directly behind it."""
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with node.graph.inserting_after(last):
        copy = node.graph.call_method("clone", (node,))
    copy.meta["origin"] = (EDIT, COPY, 0)
    return copy


def value_of(node: fx.Node) -> object:
    return example(node.meta.get(STANDS_FOR, node))


def later(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stand for the same memory behind operations that have changed it; `node` first."""
    value = example(node)
    seen, todo = {node}, [node]
    while todo:
        yield (now := todo.pop())
        after = [u for u in now.users if u not in seen and (writes_to(u, value) or u.target is new_version)]
        seen.update(after)
        todo += after


def earlier(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stood for the same memory before operations that changed it."""
    seen, todo = {node}, [node]
    while todo:
        now = todo.pop()
        if WRITES not in now.meta and now.target is not new_version:
            continue
        before = [
            n for n in now.all_input_nodes if n not in seen and storage_id(example(n)) == storage_id(example(node))
        ]
        yield from before
        seen.update(before)
        todo += before
