"""Traces the forward of one module (a region) of any model into an fx graph, by running it on example-carrying proxies.

`torch.fx.symbolic_trace` fails on every transformers model. This tracer differs from it: only chosen children are inlined;
attention becomes one leaf node; numbers read from modules stay attribute reads; every Python decision on a traced value is
kept as a `Guard`.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from peftc.concurrency.interrupts import shielded
from peftc.fakes.data_answers import fake_data_answers, fake_tensor_patches, no_data_answers
from peftc.tracing.code_positions import Origin, place
from peftc.tracing.context_managers import Block, NoneAccess, TraceError, decorated, enter_context
from peftc.tracing.functional_linears import linear_of
from peftc.tracing.in_place import WORDS, InPlace, versions
from peftc.tracing.module_calls import bind_arguments, is_constant, nested_nodes, positional
from peftc.tracing.patches import attention, branch, computed_by, getitem_root, live, selects, spying
from peftc.tracing.proxy import Attribute, ConcreteProxy, Flag, attribute_proxy, concrete_values, is_proxy
from peftc.tracing.ragged_loops import Lengths, Loops, unknown
from peftc.tracing.tensor_provenance import RecordedCall, Remembering, Tape

PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, int, float, bool)


@dataclass(frozen=True)
class Guard:
    """Python asked `kind` ("bool", "int", "len", "is", …) of the value of `node` and went on because the answer was `value`."""

    node: fx.Node
    kind: str
    value: Any


@dataclass
class ModuleCall:
    """One call of a child during the trace: arguments and result as nested nodes."""

    name: str
    caller: str  # the module whose code made the call
    arguments: dict[str, Any]
    result: Any
    inlined: bool
    position: str = ""  # in that code


@dataclass
class RegionTrace:
    """A region's graph and what was decided while it was made. `names`: the region's own dotted names."""

    graph: fx.Graph
    calls: list[ModuleCall]
    guards: list[Guard]
    attribute_guards: dict[tuple[str, str], Any]
    depends_on_dtype: bool = False
    parameter_dtype: tuple[str, torch.dtype] | None = None  # one that tells the dtype of the region's parameters
    result: Any = None  # of a region whose code was not entered: the parts of its result, by path
    outcomes: tuple[bool, ...] = ()  # taken at each `branch`, in order
    root: nn.Module | None = None  # what was traced


class RegionTracer(fx.Tracer):
    """Traces `root.forward`. `inline(name)` says which children's code is entered; all others stay `call_module` nodes.

    `script` are the outcomes to take at the first branches on values of tensors; at later ones it is True.
    """

    def __init__(self, inline: Callable[[str], bool], script: tuple[bool, ...] = ()) -> None:
        super().__init__()
        self.inline, self.path_prefix = inline, script
        self.outcomes: list[bool] = []
        self.recording = False
        self.depends_on_dtype = False
        self.guards: list[Guard] = []
        self.attribute_guards: dict[tuple[str, str], Any] = {}
        self.calls: list[ModuleCall] = []
        self.call_stack: list[str] = []
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.optional_results = set[
            Origin
        ]()  # origins of parts of results that Python gets as None where they are None
        self.open_contexts: list[Block] = []  # open now
        self.global_state: dict[tuple[str, tuple[Any, ...]], Any] = {}  # what torch was asked, and answered
        self.loops, self.in_place = Loops(self), InPlace(self)
        self.places: dict[fx.Node, fx.Node] = {}  # behind a node: what was next when something was put in between

    # What Python asks --------------------------------------------------------------------------------------------

    def guard(self, node: fx.Node, kind: str, value: Any) -> Any:
        if self.recording:
            self.guards.append(Guard(node, kind, value))
        return value

    def guard_type(self, node: fx.Node, kind: type) -> None:
        """Python asked for the type of what a method or attribute of an object gave (a cache's length: int or tensor)."""
        asks = node.op == "call_method" or node.target is getattr
        source = node.args[0] if asks and node.args else None
        if isinstance(source, fx.Node) and not isinstance(source.meta.get("example"), torch.Tensor):
            self.guard(node, "type", torch.Tensor if issubclass(kind, torch.Tensor) else kind)

    def format_value(self, value: Any, spec: str) -> str:
        """A traced value in a text, which may be the name of a module."""
        if isinstance(value, torch.Tensor):
            raise TraceError("a value of a tensor becomes part of a text")
        return format(value, spec)

    def fork(self, condition: fx.Node, likely: bool = True) -> bool:
        """A decision on what is only known while the region runs: values of tensors, which the example does not have."""
        if self.open_contexts or self.loops.open:  # the other way would have to leave the block, too
            raise TraceError(
                "a decision on values of tensors inside of a `with` block or a loop cannot be kept in a graph"
            )
        at = len(self.outcomes)
        outcome = self.path_prefix[at] if at < len(self.path_prefix) else likely
        self.outcomes.append(outcome)
        self.create_node("call_function", branch, (condition, outcome), {})
        return outcome

    def guard_attribute(self, number: Attribute) -> None:
        """Python computed with a number read from a module: this graph is right only where the number is the same."""
        if self.recording:
            owner, _, name = number.path.rpartition(".")
            self.attribute_guards[owner, name] = concrete_values(number) if isinstance(number, Flag) else number.real  # pyright: ignore

    def read_attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        owner = self.names.get(id(module))
        if owner is None or name.startswith("_"):
            return value
        if type(value) is bool and name != "training":
            self.attribute_guards[owner, name] = value
            return value
        if type(value) in (bool, int, float):
            return attribute_proxy(value, f"{owner}.{name}".lstrip("."), self)
        return value

    # Nodes -------------------------------------------------------------------------------------------------------

    def record(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self.create_proxy(op, target, args, dict(kwargs or {}))

    def create_proxy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if target is operator.getitem and is_proxy(args[0]):
            self.looked_into(args[0].node, concrete_values(args[0]))
        args, kwargs = positional(kind, target, args, kwargs)
        own = linear_of(args, kwargs, self.root, self.tensors, self.tape) if target is nn.functional.linear else None
        if own is not None and not self.inline(own):
            kind, target, args, kwargs = "call_module", own, args[:1], {}
        operands = concrete_values(tuple(args)), concrete_values(dict(kwargs))
        before = list(versions(operands))
        with self.pause():
            value = self.compute(kind, target, *operands)
        arguments = tuple(map(self.create_arg, args)), self.create_arg(dict(kwargs))
        node = self.in_place.computed(
            self.create_node(kind, target, *arguments, name or WORDS.get(target), type_expr), value, before
        )
        if self.materialises(node, value):
            return self.guard(node, "is", value)
        return ConcreteProxy(node, self, value)

    def missed(self, node: fx.Node, value: Any) -> None:
        """Code asked for an attribute that a value does not have."""
        if value is None and self.recording:
            raise NoneAccess(node.meta["origin"])

    def looked_into(self, node: fx.Node, value: Any) -> None:
        """Code takes a part of a value; one that an attention of another implementation does not give."""
        if node.target is operator.getitem and node.args[1] != 0 and getitem_root(node).target is attention:
            self.attribute_guards.update(computed_by(self, getitem_root(node)))
        self.missed(node, value)

    def materialises(self, node: fx.Node, value: Any) -> bool:
        """Whether Python gets the plain value (and the graph a guard): None, dtypes and words.

        Parts of what an attention or a child returns stay symbolic: they are handed on, and are None at some times only.
        """
        source = getitem_root(node)
        if node.meta["origin"] in self.optional_results:
            self.attribute_guards.update(computed_by(self, source))
            return value is None
        if source.op == "call_module" or source.target in (attention, operator.setitem):
            return False
        return value is None or isinstance(value, (torch.dtype, str))

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # pyright: ignore[reportIncompatibleMethodOverride]
        node = super().create_node(kind, target, *args, **kwargs)
        frame = self.call_stack[-1] if self.call_stack else ""
        word = WORDS.get(target) or (target if isinstance(target, str) else getattr(target, "__name__", str(target)))
        word = word.removeprefix(f"{frame}.") if kind == "call_module" and frame else word
        if target is operator.getitem:  # one sort for each thing indexed, so that cache updates do not shift the count
            source, index = args[0]
            word = f"{word} {index} of {source.meta['origin'][1] if isinstance(source, fx.Node) else source}"
        sort, at = (frame, f"{kind} {word}"), place()
        node.meta |= {"origin": (*sort, (at, self.counts[*sort, at])), "number": self.counts[sort]}
        self.counts.update((sort, (*sort, at)))
        self.loops.add(node)
        return node

    def compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """The example of a node, by the real thing."""
        with torch.no_grad():
            if (made := unknown(target, args, kwargs)) is not None:
                if isinstance(made, Lengths):
                    made.frame = self.call_stack[-1] if self.call_stack else ""
                return made
            if kind == "call_module":
                with fake_data_answers():  # a leaf's own decisions are not part of the graph
                    return self.root.get_submodule(target)(*args, **kwargs)
            if kind == "call_function":
                with fake_data_answers() if selects(target, args) else contextlib.nullcontext():
                    return target(*args, **kwargs)
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return operator.attrgetter(target)(self.root)

    def record_node(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """A node whose result Python does not look at."""
        given = tuple(map(self.create_arg, args))
        node = self.create_node("call_function", target, given, self.create_arg(dict(kwargs or {})))
        node.meta["example"] = None
        return node

    def create_arg(self, a: Any) -> Any:
        if is_proxy(a):
            return self.loops.used(a.node)
        if isinstance(a, fx.Node):
            return a
        if type(a) in (list, tuple) and (made := self.loops.gathered(nested_nodes(a), type(a))) is not None:
            return made
        if isinstance(a, tuple) and not hasattr(a, "_fields"):
            return tuple(map(self.create_arg, a))
        if isinstance(a, list):
            return [self.create_arg(x) for x in a]
        if isinstance(a, dict):
            return {k: self.create_arg(v) for k, v in a.items()}
        if isinstance(a, slice):
            return slice(*map(self.create_arg, (a.start, a.stop, a.step)))
        if isinstance(a, Attribute):
            node = self.create_node("get_attr", a.path, (), {})
            node.meta["example"] = a.real  # pyright: ignore[reportAttributeAccessIssue]
            return node
        if isinstance(a, nn.Module):
            return self.module_node(a)
        if isinstance(a, torch.Tensor) and id(a) in self.tensors:
            return self.tensor_node(a)
        if isinstance(a, torch.Tensor) and (id(a) in self.tape.made or id(a) in self.tape.parts):
            return self.constant_node(a)
        if a is None or a is ... or isinstance(a, PLAIN):
            return a
        if callable(a):
            return a
        raise TraceError(f"a value of type {type(a).__name__} made outside the region is used in it")

    def module_node(self, module: nn.Module) -> fx.Node:
        if id(module) not in self.names:
            raise TraceError(f"a {type(module).__name__} from outside the region is used in it")
        return self.create_node("get_attr", self.names[id(module)] or "_self", (), {})

    def tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        node = self.create_node("get_attr", self.tensors[id(tensor)], (), {})
        node.meta["example"] = tensor
        return node

    def constant_node(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that the region's code made without traced values, as nodes that make it again."""
        if id(tensor) in self.constants:
            return self.constants[id(tensor)]
        if id(tensor) in self.tape.parts:
            made, index = self.tape.parts[id(tensor)]
            node = self.create_node("call_function", operator.getitem, (self.made_node(made), index), {})
            changed: list[RecordedCall] = []
        else:
            first, *changed = self.tape.made[id(tensor)]
            node = self.made_node(first)
        node.meta["example"] = tensor
        self.constants[id(tensor)] = node
        for made in changed:
            self.made_node(made)
        return node

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a node stands for this tensor already."""
        return id(tensor) in self.tensors or id(tensor) in self.constants

    def made_node(self, made: RecordedCall) -> fx.Node:
        if id(made) not in self.made:
            with self.at(made):
                args, kwargs = self.create_arg(made.args), self.create_arg(made.kwargs)
                self.made[id(made)] = self.create_node(made.kind, made.target, args, kwargs)
        return self.made[id(made)]

    def at(self, made: RecordedCall) -> contextlib.AbstractContextManager[Any]:
        """Where nodes for a call go: among blocks, to where Python made it; else to the end, where they are first used."""
        if made.after is None or not any(n.target is enter_context for n in self.graph.nodes):
            return contextlib.nullcontext()
        return self.graph.inserting_before(self.places.setdefault(made.after, made.after.next))

    # Running -----------------------------------------------------------------------------------------------------

    @shielded
    def pause(self) -> Generator[None]:
        """While examples are computed nothing is recorded."""
        live, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = live

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A child is called: recorded as one node, or entered."""
        name = self.names.get(id(module))
        if name is None:
            raise TraceError(f"a {type(module).__name__} from outside the region is called in it")
        if isinstance(module, nn.Identity) and args == (None,):
            return None
        arguments = bind_arguments(type(module).forward, module, args, kwargs)
        inlined = self.inline(name)
        result = self.enter(module, args, kwargs) if inlined else self.record("call_module", name, args, kwargs)
        frame = self.call_stack[-1] if self.call_stack else ""
        self.calls.append(ModuleCall(name, frame, nested_nodes(arguments), nested_nodes(result), inlined, place()))
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a child's code."""
        self.call_stack.append(self.names[id(module)])
        if decorated(forward := type(module).forward):  # it can stay a leaf
            raise TraceError(f"`{forward.__qualname__}` is decorated with a block of gradients or autocast")
        result = inspect.unwrap(forward)(module, *args, **kwargs)
        self.call_stack.pop()  # not after an error: the frames left open tell where it happened
        return result

    def trace_region(self, root: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
        """Traces `root` on the bound arguments of one call (which may be changed by the trace: pass copies)."""
        self.root = root
        self.graph = fx.Graph(tracer_cls=type(self))
        self.names: dict[int, str] = {id(m): n for n, m in root.named_modules()}
        self.tensors: dict[int, str] = {id(t): n for n, t in [*root.named_parameters(), *root.named_buffers()]}
        forward = inspect.unwrap(type(root).forward)
        signature = inspect.signature(forward)
        args, kwargs = self.placeholders(signature, arguments)
        self.tape, self.constants, self.made = Tape(), dict[int, fx.Node](), dict[int, fx.Node]()
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())  # as they were, whatever the code does
        with (
            gradients,
            no_data_answers(),
            fake_tensor_patches(),
            spying(root, self),
            live(self),
            Remembering(self.tape, self),
        ):
            out = forward(root, *args, **kwargs)
            self.graph.output(self.create_arg(out))
        return self.snapshot()

    def snapshot(self) -> RegionTrace:
        """What has been traced; after an error, up to where it was raised."""
        assert self.root is not None
        parameter = next(((n, p.dtype) for n, p in self.root.named_parameters() if p.is_floating_point()), None)
        found = RegionTrace(
            self.graph, self.calls, self.guards, self.attribute_guards, self.depends_on_dtype, parameter
        )
        found.outcomes, found.root = tuple(self.outcomes), self.root
        return found

    def placeholders(
        self, signature: inspect.Signature, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
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
                default = () if p.default is p.empty else (p.default,)
                proxy = self.placeholder(p.name, value, default)
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
