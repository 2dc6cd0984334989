"""The values of nodes that a pass has added or changed, as tensors without data."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from peftc.dataflow.nodes import example
from peftc.dataflow.operations import has_side_effects
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.form import Dims
from peftc.forms.shapes import Tokens
from peftc.models.names import error_summary
from peftc.modules.walk import submodule
from peftc.planning.pass_form import PassForm
from peftc.rewriting.passes.pass_module import PassModule
from peftc.rewriting.states import REPLACES, value_of
from peftc.tracing.region_trace import RegionTrace

_modules: WeakKeyDictionary[PassForm, PassModule] = WeakKeyDictionary()  # without values


class NodeValues:
    """Runs nodes on the examples of a trace.

    Args:
        trace: of the region.
        gradients: whether the examples become leaves of an autograd graph.
        place, form: where the graph has the members of the pass.
    """

    def __init__(self, trace: RegionTrace, place: str, form: PassForm, gradients: bool = False) -> None:
        self.trace, self.place, self.form, self.gradients = trace, place, form, gradients
        self.leaves: dict[fx.Node, torch.Tensor] = {}
        self.values: dict[fx.Node, Any] = {}
        examples = (example(node) for node in trace.graph.nodes)
        self.mode = next(m for value in examples if (m := getattr(value, "fake_mode", None)) is not None)

    @cached_property
    def members(self) -> nn.Module:
        """The module of the pass, with tensors like those of the trace."""
        parameters = self.trace.root.parameters() if self.trace.root is not None else ()
        like = next((p for p in parameters if p.is_floating_point()), None)
        dtype, device = (torch.float32, torch.device("cpu")) if like is None else (like.dtype, like.device)
        module = copy.deepcopy(module_of(self.form, dtype))
        with self.mode:
            return module._apply(  # pyright: ignore[reportPrivateUsage]
                lambda t: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype, device=device)
            )

    def evaluate(self, graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> None:
        """Gives nodes their values and examples. `nodes`: by default those that have no example.

        Raises: P441 for one that cannot run.
        """
        chosen = {node for node in graph.nodes if "example" not in node.meta} if nodes is None else set(nodes)
        for node in graph.nodes:
            if node in chosen and node.op not in ("output", "placeholder"):
                self.values[node] = self.run(node)
                node.meta["example"] = tree_map(detached, self.values[node])

    def run(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        target: Any = node.target
        own = self.members if str(target).startswith(f"{self.place}.") else None
        try:
            with self.mode, torch.set_grad_enabled(self.gradients):
                match node.op:
                    case "get_attr":
                        return self.attribute(own, str(target))
                    case "call_module":
                        return self.attribute(own, str(target))(*args, **kwargs)
                    case "call_method":
                        first, *rest = args
                        return getattr(first, target)(*rest, **kwargs)
                    case _:
                        return target(*args, **kwargs)
        except PeftcError:
            raise
        except Exception as error:  # whatever an operation says of its operands
            message = f"the node `{node.name}` cannot run: `{node.format_node()}`"
            raise PeftcError(Diagnostic("P441", message, notes=(error_summary(error),))) from error

    def value(self, node: fx.Node) -> Any:
        """The value of an operand: a leaf, if it is no node of the pass."""
        if node in self.values:
            return self.values[node]
        known = example(node)
        if not isinstance(known, torch.Tensor):
            return known
        if node not in self.leaves:
            with self.mode:
                leaf = known.detach()
                self.leaves[node] = leaf.requires_grad_() if self.gradients and leaf.is_floating_point() else leaf
        return self.leaves[node]

    def attribute(self, own: nn.Module | None, name: str) -> Any:
        if own is not None:
            return operator.attrgetter(name[len(self.place) + 1 :])(own)
        module, _, attribute = name.rpartition(".")
        assert self.trace.root is not None
        return getattr(submodule(self.trace.root, module), attribute)


def without_example(node: fx.Node) -> list[fx.Node]:
    """The nodes without an example that a node is computed from. What an edit has put in the place
    of a value is like that value.
    """
    unknown: list[fx.Node] = []
    stack = [node]
    while stack:
        one = stack.pop()
        if "example" not in one.meta and REPLACES in one.meta:
            one.meta["example"] = value_of(one)
        elif "example" not in one.meta:
            unknown.append(one)
            stack += one.all_input_nodes
    return unknown


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def is_unobserved(node: fx.Node) -> bool:
    """Whether nothing reads a node of a pass, which may then do anything."""
    return not node.users and (has_side_effects(node) or node.op == "call_function")


def module_of(form: PassForm, dtype: torch.dtype) -> PassModule:
    """The module of a pass at a site, on the meta device."""
    if form not in _modules:
        _modules[form] = PassModule(form, {}, Dims(None, Tokens(1), 1), ("site",), dtype, "meta")
    return _modules[form]
