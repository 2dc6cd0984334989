"""Changes of tensors in place: which node stands for a tensor that an operation has written into.

    y.mul_(e)    y += e    torch.relu_(y)    nn.ReLU(inplace=True)(y)    torch.add(y, e, out=y)    y[:, 0] = 0    y.view(-1).copy_(e)

Which tensors an operation changes is asked of torch: a tensor has a version, which grows with each change, of a view of it, too. Where the
operation returns the changed tensor, its node stands for that from then on. For any other tensor that shares the changed memory, a
node `changed` is put in at its next use; it computes nothing, and nothing is printed for it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from peftc.tracing.proxy import ConcreteProxy
    from peftc.tracing.tracer import RegionTracer

# Python's own, where the operand on the left is a tensor, and what is printed between the operands.
AUGMENTED = {
    operator.iadd: "+=",
    operator.isub: "-=",
    operator.imul: "*=",
    operator.itruediv: "/=",
    operator.ifloordiv: "//=",
    operator.imod: "%=",
    operator.ipow: "**=",
    operator.iand: "&=",
    operator.ior: "|=",
    operator.ixor: "^=",
}
# The names of the operations that make a tensor of their own: `add` of `iadd`.
WORDS = {function: function.__name__[1:] for function in AUGMENTED}
WRITES = "changes"  # in a node's meta: the memories that it changes in place, where it does

# Inside a block of it no function mode is told what is read of a tensor: a trace would record that.
unobserved: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]


def new_version(value: Any, *_writers: Any) -> Any:
    """A tensor behind the operations that have changed it, or a tensor that shares its memory."""
    return value


class InPlace:
    """The proxies of one trace whose values are tensors."""

    def __init__(self, tracer: RegionTracer) -> None:
        self.tracer = tracer
        self.proxies: list[weakref.ref[ConcreteProxy]] = []
        self.in_loop: list[ConcreteProxy] = []  # made before the loop that is open, and changed in it

    def add(self, proxy: ConcreteProxy) -> None:
        self.proxies.append(weakref.ref(proxy))

    def computed(self, node: fx.Node, result: Any, versions: list[tuple[torch.Tensor, int]]) -> fx.Node:
        """`node` has given `result`: whatever it changed has another node from now on. `versions`: of its arguments, before."""
        node.meta["example"] = result
        written = [
            t for t, before in versions if version(t) != before or (in_inference(t) and self.writes(node, t, result))
        ]
        if not written:
            return node
        node.meta[WRITES] = memories = frozenset(map(storage_id, written)) - {0}
        turn = self.tracer.loops.open[-1] if self.tracer.loops.open else None
        for proxy in self.sharing(memories):
            if turn is not None and proxy.here not in turn:
                self.in_loop.append(proxy)
            else:
                proxy.change(node, result)
        return node

    def writes(self, node: fx.Node, tensor: torch.Tensor, result: object) -> bool:
        """Whether an operation changes a tensor of `inference_mode`, which has no version: told by the operation's name."""
        if node.target is operator.setitem or result is not tensor:
            return node.target is operator.setitem
        root, name = self.tracer.root, str(getattr(node.target, "__name__", node.target))
        module = root.get_submodule(name) if node.op == "call_module" else None
        flags = node.kwargs.get("inplace"), getattr(module, "inplace", False), "out" in node.kwargs
        return any(flags) or node.target in AUGMENTED or name.endswith("_")

    def sharing(self, memories: frozenset[int]) -> list[ConcreteProxy]:
        """The proxies whose values share memory with these."""
        alive = [(ref, proxy) for ref in self.proxies if (proxy := ref()) is not None]
        self.proxies = [ref for ref, _ in alive]
        return [proxy for _, proxy in alive if storage_id(proxy._value) in memories]  # pyright: ignore[reportPrivateUsage]

    def end_loop(self, end: fx.Node) -> None:
        """What turns of a loop have changed is changed behind it."""
        for proxy in {id(proxy): proxy for proxy in self.in_loop}.values():
            proxy.change(end, None)
        self.in_loop = []

    def present(self, node: fx.Node, writers: list[fx.Node], value: torch.Tensor) -> fx.Node:
        """The node for a tensor that was changed by these since `node` stood for it."""
        present = self.tracer.create_node("call_function", new_version, (node, *writers), {})
        present.meta["example"] = value
        return present


def storage_id(value: object) -> int:
    """What tells apart the tensors that share no memory; 0 of what has none."""
    with unobserved():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return 0
        return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def version(tensor: torch.Tensor) -> int:
    with unobserved():
        return 0 if tensor.is_inference() else tensor._version


def in_inference(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in `inference_mode`, where tensors have no version."""
    with unobserved():
        return tensor.is_inference()


def versions(value: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors in nested arguments, with their versions."""
    if isinstance(value, torch.Tensor):
        yield value, version(value)
    elif isinstance(value, (tuple, list)):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from versions(part)
    elif isinstance(value, dict):
        yield from versions(list(value.values()))  # pyright: ignore[reportUnknownArgumentType]


# In a graph ----------------------------------------------------------------------------------------------------------


def writes_to(node: fx.Node, value: object) -> bool:
    """Whether a node changes the memory of a tensor in place."""
    return WRITES in node.meta and storage_id(value) in node.meta[WRITES]
