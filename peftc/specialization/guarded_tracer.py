"""Traces a call of a region and records all that its code decides on, so that guards can test it:

also which arguments' types it tests, and which config fields and parameters' dtypes it reads. Sizes
inside of the region become expressions of its arguments, so that guards can test them ahead.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig

from peftc.dataflow.feature_axis import dim_before
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import ancestors, example, is_tensor
from peftc.dataflow.operations import Op, has_side_effects, is_size, op_of
from peftc.dataflow.values import cache_update
from peftc.modules.packed import is_stand_in
from peftc.specialization.leaf_functions import LeafFunction, innermost_function, leaf_functions, running_frames
from peftc.specialization.symbolic_sizes import SymbolicSizes
from peftc.tracing.bytecode import Origin
from peftc.tracing.in_place import leaves, storage_id
from peftc.tracing.module_calls import is_constant
from peftc.tracing.proxy import Attribute, ConcreteProxy, concrete_values, contains_proxy, is_proxy
from peftc.tracing.region_trace import RegionTrace, TraceError, is_input
from peftc.tracing.tracer import RegionTracer
from peftc.tracing.tracer_base import current_tracer

_HELD: dict[type, str] = {nn.Parameter: "parameter", nn.Module: "module"}  # by modules, and no graph makes them
HISTORY = ("grad_fn", "is_leaf", "grad", "_base", "_version")


def tells_history(node: fx.Node) -> bool:
    """Whether a node reads how a tensor was computed: a trace has other tensors."""
    return node.target is getattr and node.args[1] in HISTORY and isinstance(example(node.args[0]), torch.Tensor)


class GuardedTracer(RegionTracer):
    """Traces one call. `symbolic`: constants (`**key` for keywords) that become proxies, too."""

    def __init__(self, inline: Callable[[str], bool], script: tuple[bool, ...], symbolic: frozenset[str]) -> None:
        super().__init__(inline, script)
        self.symbolic = symbolic
        self.size_guards = set[Origin]()  # decisions on sizes inside that become guards on the arguments
        self.leaf_functions = set[LeafFunction]()
        self.deciding_functions: dict[fx.Node, LeafFunction | None] = {}  # by a value known only at run time
        self.typed: set[fx.Node] = set()
        self.dtypes: dict[str, torch.dtype] = {}  # of parameters whose dtype the code may have read
        self.numbers: dict[str, None] = {}  # attributes that were read, and may be None in other modules
        self.assignments: dict[tuple[int, str], list[int]] = {}  # by owner and name: of what, by `id`
        self.assigned = set[str]()  # paths of attributes of modules
        self.replaced: dict[str, fx.Node] = {}  # tensors of modules before the code has assigned others

    # Arguments ------------------------------------------------------------------------------------

    def placeholders(
        self, signature: inspect.Signature, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = super().placeholders(signature, arguments)
        nodes = {str(n.target): n for n in self.graph.nodes}
        for i, p in enumerate(list(signature.parameters.values())[1:]):
            if p.name in self.symbolic:
                proxy = ConcreteProxy(nodes[p.name], self, nodes[p.name].meta["example"])
                if p.kind is p.KEYWORD_ONLY:
                    kwargs[p.name] = proxy
                else:
                    args[i] = proxy
            elif p.kind is p.VAR_KEYWORD:
                keys = [k for k, v in arguments.get(p.name, {}).items() if f"**{k}" in self.symbolic and is_constant(v)]
                kwargs.update({k: self.keyword(nodes["**" + p.name], k) for k in keys})
        return args, kwargs

    def keyword(self, keywords: fx.Node, key: str) -> ConcreteProxy:
        node = self.create_node("call_function", operator.getitem, (keywords, key), {})
        node.meta["example"] = value = keywords.meta["example"][key]
        return ConcreteProxy(node, self, value)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Guards parts of arguments, which may be None in another call (`mask is None`)."""
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        if target is operator.getitem and is_proxy(proxy) and is_input(proxy.node):
            self.guard(proxy.node, "ndim", getattr(proxy.node.meta["example"], "ndim", None))
        if is_proxy(proxy) and tells_history(proxy.node):
            self.guard(proxy.node, "is", proxy.node.meta["example"])
        return proxy

    # Decisions ------------------------------------------------------------------------------------

    def guard(self, node: fx.Node, kind: str, value: Any) -> Any:
        """A truth known only at run time (of a size from a cache) becomes a branch of the graph."""
        numeric = kind in ("int", "float", "bool")
        if not self.recording or not any(map(has_side_effects, ancestors(node))):
            return super().guard(node, kind, value)
        if node not in self.deciding_functions:
            self.deciding_functions[node] = innermost_function(running_frames())
        if not numeric:
            return super().guard(node, kind, value)
        if kind != "bool":
            number = self.sizes.rebuild(node)
            if number is None and (symbolic := self.symbolic_number(node)) is not None:
                number, conditions = symbolic
                for condition in conditions:
                    super().guard(condition, "bool", True)
                if isinstance(number, fx.Node) and isinstance(number.meta["example"], float):
                    super().guard(number, "float", number.meta["example"])  # not what `int` makes of it
                    return value
            if number is not None and not isinstance(number, fx.Node):  # from the shapes of weights
                return value
            return super().guard(node if number is None else number, kind, value)
        condition = self.sizes.rebuild(node) if node.meta["origin"] in self.size_guards else None
        return self.outcome_of(node, likely=value) if condition is None else super().guard(condition, kind, value)

    @property
    def sizes(self) -> InputSizes:
        assert self.root is not None

        def create(target: Any, args: tuple[Any, ...]) -> fx.Node:
            kind = "call_function" if not isinstance(target, str) else "call_method" if args else "get_attr"
            return self.create_node(kind, target, args, {})

        return InputSizes(self.root, create)

    def symbolic_number(self, node: fx.Node) -> tuple[Any, list[fx.Node]] | None:
        """As `SymbolicSizes.rebuild`, with nodes in this graph."""
        assert self.root is not None

        def create(target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
            created = self.create_node("call_method" if isinstance(target, str) else "call_function", target, args, {})
            created.meta["example"] = example
            return created

        return SymbolicSizes(self.root, create, self.pause).rebuild(node)

    def guard_type(self, node: fx.Node, cls: type) -> None:
        self.typed.add(node)
        super().guard_type(node, cls)

    # Modules and configs --------------------------------------------------------------------------

    def read_module_option(self, owner: str, name: str, value: str | None) -> Any:
        return self.read_option(owner, name, value)

    def read_member(self, owner: str, name: str, value: Any) -> Any:
        member = super().read_member(owner, name, value)
        if name != "training" and isinstance(member, Attribute):
            self.numbers[member.path] = None
        return member

    def read_configuration(self, owner: str, name: str, value: PretrainedConfig) -> None:
        self.objects.enter(f"{owner}.{name}".lstrip("."), value)

    def read_option(self, owner: str, name: str, value: Any) -> Any:
        if isinstance(value, str):
            string = GuardedString(value)
            string.owner, string.name, string.tracer = owner, name, self
            return string
        self.attribute_guards[owner, name] = value
        return value

    def write_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        super().write_attribute(module, name, value)
        if id(module) in self.module_names:
            old = next((own[name] for own in (vars(module), *_tables(module)) if name in own), None)
            self.assign(module, module, name, value, old)

    def write_object(self, written: object, name: str, value: Any) -> None:
        super().write_object(written, name, value)
        if (path := self.objects.paths.get(id(written))) is not None:
            self.assign(written, self.attribute_node(path, written), name, value, vars(written).get(name))

    def assign(self, owner: object, argument: Any, name: str, value: Any, old: Any) -> None:
        """Records an assignment, but of tensors that depend on constants alone, as tables of
        positions: each call computes them anew. `argument`: what stands for the owner.
        """
        has_proxy = contains_proxy(value)
        kind = None if has_proxy else next((n for cls, n in _HELD.items() if isinstance(value, cls)), None)
        if kind is not None:
            raise TraceError(f"its code sets the {kind} `{name}`")
        is_tensor = not has_proxy and isinstance(value, torch.Tensor)
        is_state = is_tensor and self.provenance.depends_on_parameters(value)
        if not (has_proxy or is_constant(value) or is_state):
            return
        if isinstance(old, torch.Tensor) and (path := self.tensor_names.get(id(old))) is not None:
            self.replaced.setdefault(path, self.attribute_node(path, old))
        self.record_node(setattr, (argument, name, value))
        self.assignments[id(owner), name] = list(map(id, leaves(value)))
        self.assigned.add(f"{self.module_names.get(id(owner), '')}.{name}".lstrip("."))

    def note_left(self, owner: Any, name: str, value: Any) -> None:
        if self.assignments.get((id(owner), name)) != list(map(id, leaves(value))):
            raise TraceError(f"its code puts tensors into what `{name}` holds, and a graph sets attributes alone")

    def attribute_node(self, path: str, value: Any) -> fx.Node:
        return self.replaced.get(path) or super().attribute_node(path, value)

    def read_tensor(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        if is_stand_in(value):
            return  # the matrix, which is computed with in the dtype of the input
        with self.pause():
            self.dtypes[f"{self.module_names.get(id(module), '')}.{name}".lstrip(".")] = value.dtype

    def read_dtype(self, tensor: torch.Tensor) -> None:
        self.depends_on_dtype = True
        if not is_stand_in(tensor):
            self.dtypes[self.tensor_names[id(tensor)]] = tensor.dtype

    def read_device(self, original: property, tensor: torch.Tensor) -> Any:
        """The device of a parameter or buffer, which each call reads again: models are moved."""
        if id(tensor) not in self.tensor_names:
            return original.__get__(tensor)
        return self.record("call_function", getattr, (tensor, "device"))

    def patches(self) -> Iterable[tuple[Any, str, Callable[[Any], Any]]]:
        def wrap(original: property) -> property:
            def device(tensor: torch.Tensor) -> Any:
                return (self.read_device if current_tracer() is self else property.__get__)(original, tensor)

            return property(device)

        return [*super().patches(), (FakeTensor, "device", wrap)]

    def trace_region(self, root: nn.Module, arguments: Mapping[str, Any]) -> RegionTrace:
        states = _states(root)
        with leaf_functions(self.leaf_functions):
            trace = super().trace_region(root, arguments)
        reads = {node.target for node in trace.graph.nodes if node.op == "get_attr"}
        for path, value in _states(root).items():
            before, after = states.get(path), concrete_values(value)
            is_read = (
                path in states and path not in self.assigned and (is_proxy(value) if before is None else path in reads)
            )
            if is_read and after is not before and not _have_one_memory(before, after):
                raise TraceError(f"the code replaces `{path}`, which a later call reads")
        return trace


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module)["_buffers"], vars(module)["_parameters"]


def _states(root: nn.Module) -> dict[str, Any]:
    """The tensors that modules hold as buffers, which may be None, or as attributes."""
    states: dict[str, Any] = {}
    for name, module in root.named_modules():
        values = [(key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
        values += vars(module)["_buffers"].items()  # also those that are None
        states |= {f"{name}.{key}".lstrip("."): value for key, value in values}
    return states


def _have_one_memory(one: object, other: object) -> bool:
    """Whether two are tensors of one storage: what is written into one is in the other."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return storage_id(one) == storage_id(other)


class GuardedString(str):
    """A string read from a module or a config. An operation on it adds a guard for its value."""

    owner: str
    name: str
    tracer: GuardedTracer

    def guarded(self) -> str:
        if self.tracer.recording:
            self.tracer.attribute_guards[self.owner, self.name] = str.__str__(self)
        return str.__str__(self)


def _guarding(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: GuardedString, *args: Any, **kwargs: Any) -> Any:
        return plain(self.guarded(), *args, **kwargs)

    return method


for _name in set(vars(str)).difference(("__new__", "__getattribute__", "__repr__", "maketrans")):
    if callable(getattr(str, _name)):
        setattr(GuardedString, _name, _guarding(_name))


def name_of(node: fx.Node) -> str:
    """The name of an argument's node: the parameter, or `**key`."""
    return str(node.target) if node.op == "placeholder" else f"**{node.args[1]}"


def is_argument(node: fx.Node) -> bool:
    """Whether a node is an argument: a placeholder, or a keyword of a `**` parameter."""
    source = node.args[0] if node.target is operator.getitem else None
    is_keyword = isinstance(source, fx.Node) and source.op == "placeholder" and str(source.target).startswith("**")
    return is_keyword if node.op != "placeholder" else not str(node.target).startswith("*")


def constant_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The constants among the arguments of a call, by the names of `GuardedTracer`."""
    constants: dict[str, Any] = {}
    for p in list(signature.parameters.values())[1:]:
        value = arguments.get(p.name)
        if p.kind is p.VAR_KEYWORD:
            constants |= {f"**{k}": v for k, v in (value or {}).items() if is_constant(v)}
        elif p.kind is not p.VAR_POSITIONAL and is_constant(value):
            constants[p.name] = value
    return constants


class InputSizes:
    """Rebuilds numbers of a graph from its arguments alone. `create` makes nodes."""

    def __init__(self, root: nn.Module, create: Callable[[Any, tuple[Any, ...]], fx.Node]) -> None:
        self.root, self.create = root, create

    def rebuild(self, value: Any) -> Any:
        """A node or number equal to `value` that depends on no side effect; None if none is."""
        if not isinstance(value, fx.Node) or not any(map(has_side_effects, ancestors(value))):
            return value
        if is_size(value) and len(value.args) == 2 and isinstance(value.args[1], int):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.size(source, value.args[1])
        numbers = all(isinstance(example(a), (int, float)) for a in (value, *value.args))
        if numbers and getattr(value.target, "__module__", "") == "_operator":
            args = [self.rebuild(a) for a in value.args]
            return None if any(a is None for a in args) else self.node(value.target, tuple(args), value)
        return None

    def size(self, tensor: fx.Node, at: int) -> Any:
        """The same of the size of a tensor in one dimension."""
        at %= tensor.meta["example"].ndim
        if not any(map(has_side_effects, ancestors(tensor))):
            return self.node("size", (tensor, at), tensor.meta["example"].shape[at])
        source = tensor.args[0] if tensor.args else None
        if not isinstance(source, fx.Node):
            return None
        if (update := cache_update(tensor)) is not None:  # a cache adds tokens
            return None if at == tensor.meta["example"].ndim - 2 else self.size(update, at)
        if op_of(tensor) is Op.PERMUTE:
            before = dim_before(tensor, source, at)
            return None if before is None else self.size(source, before)
        if tensor.op == "call_method" and tensor.target in ("view", "reshape"):
            sizes = tensor.args[1:]
            plain = len(sizes) == tensor.meta["example"].ndim and sizes[at] != -1
            return self.rebuild(sizes[at]) if plain else None
        if tensor.target is operator.getitem and source.target == "split":
            return self.part(tensor, source, at)
        if self.same_size(tensor, at):
            return self.size(source, at)
        return self.features(tensor) if at == tensor.meta["example"].ndim - 1 else None

    def part(self, tensor: fx.Node, split: fx.Node, at: int) -> Any:
        """The size of one of the equal parts that a tensor is split into."""
        source, each, *dims = split.args
        assert isinstance(source, fx.Node)
        dim: Any = split.kwargs.get("dim", dims[0] if dims else 0)
        shape = tensor.meta["example"].shape
        if dim % len(shape) != at:
            return self.size(source, at)
        number = each.meta["example"] if isinstance(each, fx.Node) else each
        return self.rebuild(each) if number == shape[at] else None

    def features(self, tensor: fx.Node) -> Any:
        """The output features of a Linear: a size of its weight."""
        if not LayerGraph(tensor.graph, self.root).is_linear_module(tensor):
            return None
        width = tensor.meta["example"].shape[-1]
        name = f"{tensor.target}.weight"
        weight = self.root.get_parameter(name)
        if is_stand_in(weight):
            return self.node(f"{tensor.target}.out_features", (), width)
        plain = isinstance(self.root.get_submodule(str(tensor.target)), nn.Linear)
        sides = [i for i in ((0,) if plain else (0, 1)) if weight.shape[i] == width]
        return self.node("size", (self.node(name, (), weight), sides[-1]), width) if sides else None

    def same_size(self, tensor: fx.Node, at: int) -> bool:
        """Whether the result has the size of its first argument."""
        if tensor.op != "call_module":
            by_element = op_of(tensor) in (Op.ADD, Op.SUB, Op.MUL, Op.DIV) and is_tensor(tensor.args[0])
            return op_of(tensor) is Op.CAST or (by_element and not is_tensor(tensor.args[1]))
        module = self.root.get_submodule(str(tensor.target))
        same_shape = isinstance(module, nn.Dropout | nn.Identity | nn.LayerNorm)
        return same_shape or (isinstance(module, nn.Linear) and at != tensor.meta["example"].ndim - 1)

    def node(self, target: Any, args: tuple[Any, ...], like: Any) -> fx.Node:
        node = self.create(target, args)
        node.meta["example"] = like.meta["example"] if isinstance(like, fx.Node) else like
        return node
