"""Traces the forward of a region, one module of any model, by running it on proxies.

Unlike `torch.fx.symbolic_trace`, it enters only the chosen children, keeps attention as one leaf,
reads numbers of modules as attributes, and records Python's decisions as guards.
"""

import contextlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from transformers.integrations.moe import ExpertsInterface

from peftc.fakes.data_answers import fake_data_answers, fake_tensor_patches, no_data_answers
from peftc.fakes.python_globals import unchanged_globals
from peftc.modules.packed import is_stand_in
from peftc.modules.walk import submodule
from peftc.tracing.bytecode import Origin, position_of, running_stack
from peftc.tracing.in_place import EFFECT, OUT_OF_PLACE_NAMES, leaves, storage_id, version
from peftc.tracing.members import MemberTracer
from peftc.tracing.module_calls import bind_arguments, functional_linear, is_constant, with_positional_tensors
from peftc.tracing.operations import DIRECT, attention, model_function, python_target
from peftc.tracing.patches import has_context_decorator, instrument_modules, patch_libraries
from peftc.tracing.proxy import (
    Attribute,
    ConcreteProxy,
    MaskIndices,
    concrete_values,
    contains_proxy,
    is_proxy,
    mask_of_indices,
    nested_nodes,
)
from peftc.tracing.python_state import no_random_numbers, unchanged_collections, value_types
from peftc.tracing.ragged_loops import ragged_result
from peftc.tracing.records import (
    are_one_state,
    constructor_fields,
    contents,
    identities,
    is_named_tuple,
    is_record,
    mutable_parts,
    record_leaves,
    state_of,
    structure_of,
)
from peftc.tracing.region_trace import ModuleCall, RegionTrace, TraceError, getitem_root
from peftc.tracing.tensor_caches import without_cached_tensors, without_proxies
from peftc.tracing.tracer_base import check_transforms, patch_attribute

UNKNOWN_MODULE = "a module that is no child of its modules"
CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, int, float, complex, bool)


class RegionTracer(MemberTracer):
    """Traces `root.forward`. `inline`: whether the code of a child, by name, is entered."""

    def __init__(self, inline: Callable[[str], bool], path_prefix: tuple[bool, ...] = ()) -> None:
        super().__init__(path_prefix)
        self.inline = inline
        self.optional_results = set[Origin]()  # parts of results that Python gets as None where they are None
        self.records = RecordNodes(self)

    def guard_implementation(self, call: fx.Node) -> None:
        """Guards which attention implementation runs, as only some return attention weights."""
        if call.target is attention and isinstance(module := call.args[0], fx.Node):
            name = str(module.target).removeprefix("_self")
            with self.pause():
                config: Any = submodule(self.root, name).config
                implementation = str(config._attn_implementation)
            self.attribute_guards[f"{name}.config".lstrip("."), "_attn_implementation"] = implementation

    def specializes(self, node: fx.Node, value: Any) -> bool:
        """Whether Python gets None, a dtype or a string itself, guarded, instead of a proxy."""
        # Parts of results of children and attention may be None. They stay proxies.
        source = getitem_root(node)
        if node.meta["origin"] in self.optional_results:
            self.guard_implementation(source)
            return value is None
        if source.target is model_function:  # what it returns in another call need not be of this type
            self.guard(node, "type", torch.Tensor if isinstance(value, torch.Tensor) else type(value))
            if node is source:
                self.guard(node, "structure", structure_of(value))
            return value is None
        if source.op == "call_module" or source.target in (attention, operator.setitem):
            return False
        return value is None or isinstance(value, (torch.dtype, str))

    def create_proxy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
    ) -> Any:
        check_transforms()
        if target is operator.getitem and is_proxy(args[0]):  # what Python takes an item of is not None
            source = args[0].node
            if source.target is operator.getitem and source.args[1] != 0:
                self.guard_implementation(getitem_root(source))
            self.reject_none(source, concrete_values(args[0]))
        if kind == "call_function":
            kind, target = python_target(target, args)
        args, kwargs = with_positional_tensors(kind, target, args, kwargs)
        if target == "item" and len(args) == 1 and is_truth(concrete_values(args[0])):
            return args[0]  # code asks `if mask.any().item()`
        if (mask := mask_of_indices(target, args, kwargs)) is not None:
            return MaskIndices(mask, lambda: self.create_call(kind, target, args, kwargs, name))
        return self.create_call(kind, target, args, kwargs, name)

    def create_call(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
    ) -> Any:
        linear = functional_linear(self, args, kwargs) if target is nn.functional.linear else None
        if linear is not None and not self.inline(linear):
            kind, target, args, kwargs = "call_module", linear, args[:1], {}
        operands = concrete_values(tuple(args)), concrete_values(dict(kwargs))
        versions_before = [(t, version(t)) for t in leaves(operands) if isinstance(t, torch.Tensor)]
        is_leaf = kind == "call_module" or target is model_function
        parts = list(mutable_parts((args, kwargs), operands)) if is_leaf else []
        if target is model_function and len(parts) > 1:  # one is the keyword arguments
            name = getattr(args[0], "__name__", "")
            raise TraceError(f"`{name}` takes a list, a dictionary or an object that it may change in another call")
        before = list(map(identities, parts))
        receiver = operands[0][0] if kind == "call_method" and not isinstance(operands[0][0], torch.Tensor) else None
        state = state_of(receiver)
        with self.pause():
            value = self.compute(kind, target, *operands)
        if before != list(map(identities, parts)):
            raise TraceError(f"`{target}` changes a list, a dictionary or an object that the code has constructed")
        arguments = tuple(map(self.create_arg, args)), self.create_arg(dict(kwargs))
        node = self.create_node(kind, target, *arguments, name or OUT_OF_PLACE_NAMES.get(target))
        if not are_one_state(state, state_of(receiver)):
            node.meta[EFFECT] = True
        self.mutations.record(node, value, versions_before)
        if target is torch._assert:  # pyright: ignore[reportPrivateUsage]
            return None  # whatever it is called with
        return self.guard(node, "is", value) if self.specializes(node, value) else ConcreteProxy(node, self, value)

    def compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """The concrete value of a node."""
        with torch.no_grad():
            if (ragged := ragged_result(target, args, kwargs, self.caller)) is not None:
                return ragged
            if kind == "call_module" or target is model_function:
                function = submodule(self.root, target) if kind == "call_module" else target
                with fake_data_answers():  # decisions inside a leaf are not part of the graph
                    return function(*args, **kwargs)
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            if kind == "get_attr":
                return operator.attrgetter(target)(self.root)
            # How many entries a mask selects only data tells: one, in the example.
            is_masked = target is operator.getitem and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
            with fake_data_answers() if is_masked else contextlib.nullcontext():
                return target(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if type(a) is MaskIndices:
            a = a.proxy
        if is_proxy(a):
            return self.loops.in_scope(a.node)
        if a is None or a is ... or isinstance(a, fx.Node):
            return a
        if type(a) in (list, tuple) and (node := self.loops.collected(nested_nodes(a), type(a))) is not None:
            return node
        if is_record(a) and (node := self.records.node(a)) is not None:
            return node
        if isinstance(a, list) or (isinstance(a, tuple) and not is_named_tuple(a)):
            return (list if isinstance(a, list) else tuple)(map(self.create_arg, a))
        if isinstance(a, dict):
            return {k: self.create_arg(v) for k, v in a.items()}
        if isinstance(a, slice):
            return slice(*map(self.create_arg, (a.start, a.stop, a.step)))
        if isinstance(a, Attribute):
            a.is_operand = True
            return self.attribute_node(a.path, a.value)
        if isinstance(a, nn.Module):
            if id(a) not in self.module_names:
                raise TraceError(f"a {type(a).__name__} from outside the region is used in it")
            return self.create_node("get_attr", self.module_names[id(a)] or "_self", (), {})
        if isinstance(a, torch.Tensor) and id(a) in self.tensor_names:
            return self.attribute_node(self.tensor_names[id(a)], a)
        if isinstance(a, torch.Tensor) and a in self.provenance:
            return self.provenance.node(a)
        if isinstance(a, np.generic):
            return a.item()
        if isinstance(a, CONSTANTS) or callable(a):
            return a
        if isinstance(a, nn.Parameter):
            raise TraceError(f"a parameter of {UNKNOWN_MODULE} is used in it")
        raise TraceError(f"a value of type {type(a).__name__} from outside the region is used in it")

    def attribute_node(self, path: str, value: Any) -> fx.Node:
        node = self.create_node("get_attr", path, (), {})
        node.meta["example"] = value
        return node

    def write_member(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        self.record_node(setattr, (tensor, name, value))

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """Records the call of a child as a node, or enters its code."""
        name = self.module_names.get(id(m))
        if name is None and self.is_slice(m):
            return inspect.unwrap(type(m).forward)(m, *args, **kwargs)
        if name is None:
            raise TraceError(f"a {type(m).__name__}, {UNKNOWN_MODULE}, is called in it")
        if isinstance(m, nn.Identity) and args == (None,):
            return None
        arguments = bind_arguments(type(m).forward, m, args, kwargs)
        inlined = self.enters(name, m, args, kwargs)
        result = self.enter(m, args, kwargs) if inlined else self.record("call_module", name, args, kwargs)
        if direct and not inlined and is_proxy(result):
            result.node.meta[DIRECT] = True
        if not inlined and is_proxy(result):  # parameters and buffers among the arguments are nodes, too
            nodes = bind_arguments(type(m).forward, m, result.node.args, result.node.kwargs)
            arguments = {k: nodes[k] if isinstance(nodes.get(k), fx.Node) else v for k, v in arguments.items()}
        position = position_of(running_stack())
        call = ModuleCall(name, self.caller, nested_nodes(arguments), nested_nodes(result), inlined, position)
        self.calls.append(call)
        return result

    def is_slice(self, module: nn.Module) -> bool:
        """Whether code has made a module of some modules of the region: `self.layers[1:]`."""
        # Seen in: no transformers model, but the U-Nets of guided diffusion
        children = list(vars(module)["_modules"].values())
        return isinstance(module, nn.Sequential) and all(id(child) in self.module_names for child in children)

    def enters(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the code of a module is entered at a call."""
        return self.inline(name)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.call_stack.append(self.module_names[id(module)])
        if has_context_decorator(forward := type(module).forward):  # it can stay a leaf
            raise TraceError(f"`{forward.__qualname__}` is decorated with a gradient or autocast context")
        result = inspect.unwrap(forward)(module, *args, **kwargs)
        self.call_stack.pop()  # not after an error: the modules that are left tell where it happened
        return result

    def trace_region(self, root: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
        """Traces `root` on the arguments of one call. The code may change them: pass copies."""
        self.root = root
        self.graph = fx.Graph(tracer_cls=type(self))
        self.module_names |= {id(module): name for name, module in root.named_modules()}
        named = (*plain_tensors(root), *root.named_parameters(), *root.named_buffers())
        self.tensor_names |= {id(t): name for name, t in named}
        self.provenance.held |= {storage_id(t) for _, t in named}
        forward = inspect.unwrap(type(root).forward)
        args, kwargs = self.placeholders(inspect.signature(forward), arguments)
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())  # restores the mode, whatever the code does
        with (
            gradients,
            no_random_numbers(),
            no_data_answers(),
            fake_tensor_patches(),
            unchanged_globals(root, contains_proxy, self.note_left),
            without_proxies(root, self.note_left),
            without_cached_tensors(root),
            unchanged_collections(self, root),
            value_types(root),
            self.objects,
            instrument_modules(root),
            patch_libraries(self),
        ):
            self.graph.output(self.create_arg(forward(root, *args, **kwargs)))
        return self.snapshot()

    def snapshot(self) -> RegionTrace:
        """The trace so far: after an error, up to where it was raised."""
        self.guard_numbers()
        typed = ((n, p) for n, p in self.root.named_parameters() if p.is_floating_point() and not is_stand_in(p))
        parameter_dtype = next(((n, p.dtype) for n, p in typed), None)
        decisions = (self.guards, self.attribute_guards, self.depends_on_dtype, parameter_dtype)
        return RegionTrace(self.graph, self.calls, *decisions, outcomes=tuple(self.outcomes), root=self.root)

    def placeholders(
        self, signature: inspect.Signature, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Creates the placeholders. Returns the arguments to call with: proxies and constants."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in list(signature.parameters.values())[1:]:
            if p.kind is p.VAR_KEYWORD:
                value = arguments.get(p.name, {})
                proxy = self.placeholder("**" + p.name, value)
                kwargs.update({k: v if is_constant(v) else proxy[k] for k, v in value.items()})
            elif p.kind is p.VAR_POSITIONAL:
                value = tuple(arguments.get(p.name, ()))
                proxy = self.placeholder("*" + p.name, value)
                args.extend(v if is_constant(v) else proxy[i] for i, v in enumerate(value))
            else:
                value = arguments.get(p.name)
                proxy = self.placeholder(p.name, value, () if p.default is p.empty else (p.default,))
                argument = value if is_constant(value) else proxy
                if p.kind is p.KEYWORD_ONLY:
                    kwargs[p.name] = argument
                else:
                    args.append(argument)
        return args, kwargs

    def placeholder(self, name: str, value: Any, default: tuple[Any, ...] = ()) -> ConcreteProxy:
        node = self.create_node("placeholder", name, default, {})
        node.meta["example"] = value
        return ConcreteProxy(node, self, value)


class RecordNodes:
    """The node of each dataclass or named tuple that traced code constructs and passes on, and what
    it held then. The graph constructs it at its first use.

    `return x, Intermediates(hiddens=hiddens, last=x)`
    """

    def __init__(self, tracer: RegionTracer) -> None:
        self.tracer = tracer
        self.nodes: dict[int, tuple[Any, object, fx.Node]] = {}  # the record keeps its id unique

    def node(self, record: Any) -> fx.Node | None:
        """The node that stands for a record; None for a record from outside of the trace."""
        if id(record) in self.nodes:
            _, before, node = self.nodes[id(record)]
            if before != identities(record):
                raise TraceError(f"the code changes a {type(record).__name__} that it has passed on")
            return node
        if self._is_attribute(record) or not any(map(is_proxy, record_leaves(record))):
            return None
        values = contents(record)
        fields = {name: values.pop(name) for name in constructor_fields(record) if name in values}
        node = self.tracer.record_node(type(record), (), fields)
        node.meta["example"] = concrete_values(record)
        for name, value in values.items():
            self.tracer.record_node(setattr, (node, name, value))
        self.nodes[id(record)] = (record, identities(record), node)
        return node

    def _is_attribute(self, record: Any) -> bool:
        """Whether a module holds the record: then it lives longer than a call."""
        return any(value is record for module in self.tracer.root.modules() for value in vars(module).values())


def plain_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that modules hold as attributes of their own, not as buffers."""
    # Seen in: no transformers model, but caches of keys and values of LLaMA's own code
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}".lstrip("."), value


class ApproximateTracer(RegionTracer):
    """Traces that are read and never run: branches on data are not taken, or all of them are, loops
    over data run once.

    So no expert is skipped, and one stands for all. Every child that has children is entered, and
    those in `inlined`.
    """

    def __init__(self, branches: bool = False, inlined: Collection[str] = ()) -> None:
        super().__init__(lambda name: name in inlined or any(True for _ in submodule(self.root, name).children()))
        self.branches = branches

    def outcome_of(self, condition: fx.Node, likely: bool = True) -> bool:
        self.check_outcomes()
        self.outcomes.append(self.branches)
        return self.branches

    def format_value(self, value: Any, spec: str) -> str:
        with fake_data_answers():
            return format(value, spec)

    def compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        with fake_data_answers():
            return super().compute(kind, target, args, kwargs)


def is_truth(value: object) -> bool:
    """Whether a value is a tensor of one truth value, of which Python may ask the outcome."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim == 0


def approximate_trace(
    module: nn.Module, arguments: Mapping[str, Any], branches: bool = False, inlined: Collection[str] = ()
) -> RegionTrace:
    """The trace of a module's code; experts run in their own, plain implementation. `branches`:
    whether branches on data are taken. `inlined`: children without children that are entered.
    """
    with patch_attribute(ExpertsInterface, "get_interface", lambda _: lambda self, name, default: default):
        return ApproximateTracer(branches, inlined).trace_region(module, arguments)
