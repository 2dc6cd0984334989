"""The result of a trace: the graph of a region with all that its code decided on, or an error."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from peftc.diagnostics.model_line import ModelLine
from peftc.tracing.bytecode import Origin


class TraceError(Exception):
    """The code cannot become a graph."""


class NoneAccess(TraceError):
    """Code used part of a result as a tensor, and it is None; `origin` identifies the part."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(f"part of a result is None, and the code uses it: {origin.operation}")
        self.origin = origin


class UnknownLength(TraceError):
    """Code needs a number that only data tells; `caller` is the module that read the sizes."""

    def __init__(self, caller: str) -> None:
        super().__init__("the number of segments is known only at run time")
        self.caller = caller


@dataclass(frozen=True)
class Guard:
    """The graph holds only where `kind` ("bool", "len", "is", …) of `node` is `value`."""

    node: fx.Node
    kind: str
    value: Any
    line: ModelLine | None = field(default=None, compare=False)  # of the model's code that asked


@dataclass
class ModuleCall:
    """A call of a child by the code of `caller`, at `position`. Values are nested nodes."""

    name: str
    caller: str
    arguments: dict[str, Any]
    result: Any
    inlined: bool
    position: str = ""


class Absent:
    """In the place of the value of an attribute that a module does not have."""


@dataclass
class RegionTrace:
    """The graph of a region. Dotted names are relative to `root`."""

    graph: fx.Graph
    calls: list[ModuleCall]
    guards: list[Guard]
    attribute_guards: dict[tuple[str, str], Any]  # values that code rests on, by (module, attribute)
    depends_on_dtype: bool = False
    parameter_dtype: tuple[str, torch.dtype] | None = None  # of one that stands for all
    result: Any = None  # of a region whose code is a leaf: the parts by path
    outcomes: tuple[bool, ...] = ()  # of each `branch`
    root: nn.Module | None = None
    # What was computed of the graph, by function and arguments, once it does not change any more.
    memory: dict[tuple[Any, ...], Any] | None = None


def getitem_root(node: fx.Node) -> fx.Node:
    """The node that a part, or a part of a part, is taken from."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_input(node: fx.Node) -> bool:
    """Whether a node is an argument of the region, or an item of a container in one."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if not isinstance(node.meta["example"], (tuple, list, dict)):
            return False
    return node.op == "placeholder"
