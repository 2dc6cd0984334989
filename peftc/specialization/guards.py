"""The conditions under which a traced forward serves a call, as expressions of its arguments."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from transformers import Cache

from peftc.dataflow.nodes import ancestors
from peftc.dataflow.operations import has_side_effects
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.runtime.guards import SMALLER
from peftc.specialization.expressions import Expressions, attribute_path
from peftc.specialization.guarded_tracer import GuardedTracer, tells_history
from peftc.specialization.passthrough_arguments import Call
from peftc.tracing.in_place import EFFECT
from peftc.tracing.module_calls import is_constant
from peftc.tracing.operations import attention, model_function
from peftc.tracing.region_trace import Absent, Guard, RegionTrace, getitem_root

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


def conditions(
    call: Call, passthrough: frozenset[str], keywords: frozenset[str] | None, expressions: Expressions
) -> list[str]:
    """All conditions on a call, cheapest first. `keywords`: the names that `**` may contain."""
    traced, tracer = call
    paths = {f"{owner}.{name}".lstrip("."): value for (owner, name), value in traced.attribute_guards.items()}
    facts = {name: _has_value(name, value, expressions) for name, value in paths.items()}
    texts = [facts[f"{o}.{n}".lstrip(".")] for o, n in traced.attribute_guards if n == "training"]
    texts += _arguments(call, passthrough, keywords, expressions)
    texts += [*facts.values(), *(f"{attribute_path(n)} is not None" for n in tracer.numbers if n not in paths)]
    for (name, args), value in tracer.global_state.items():  # queries of torch's state
        query = f"torch.{name}({', '.join(map(repr, args))})"
        texts.append(_equals(query, value, expressions))
    if traced.depends_on_dtype:
        texts += _dtypes(traced, tracer, passthrough, expressions)
    texts += [_condition(guard, expressions) for guard in traced.guards if not _is_unknown_before(guard)]
    return list(dict.fromkeys(texts))


def _has_value(path: str, value: Any, expressions: Expressions) -> str:
    if value is Absent:
        owner, _, name = path.rpartition(".")
        return f"not hasattr({attribute_path(owner or '_self')}, {name!r})"
    return _equals(attribute_path(path), value, expressions)


def _equals(text: str, value: Any, expressions: Expressions) -> str:
    if isinstance(value, bool):
        return text if value else f"not {text}"
    return f"{text} is None" if value is None else f"{text} == {expressions.value(value)}"


def _arguments(
    call: Call, passthrough: frozenset[str], keywords: frozenset[str] | None, expressions: Expressions
) -> Iterator[str]:
    traced, tracer = call
    for node in traced.graph.nodes:
        if node.op != "placeholder" or str(node.target) in passthrough:
            continue
        target, value = str(node.target), node.meta["example"]
        if target.startswith("**") and keywords is not None:
            name = target[2:]
            yield f"(not {name} or {name}.keys() <= {expressions.names.passthrough(keywords)})"
        elif target.startswith("**"):
            yield f"len({target[2:]}) == {len(value)}" if value else f"not {target[2:]}"
            parts = {n.args[1]: n for n in node.users if n.target is operator.getitem}
            for key, item in value.items():
                yield f"{key!r} in {target[2:]}"
                if f"**{key}" not in passthrough:
                    part = parts.get(key)
                    used = part is not None and bool(part.users)
                    text = f"{target[2:]}[{key!r}]"
                    yield from _argument(text, item, expressions, used=used, typed=part in tracer.typed)
        elif target.startswith("*"):
            yield f"len({target[1:]}) == {len(value)}"
        else:
            yield from _argument(target, value, expressions, used=bool(node.users), typed=node in tracer.typed)


def _argument(text: str, value: Any, expressions: Expressions, used: bool, typed: bool) -> Iterator[str]:
    """Conditions on one argument. `typed`: its class is tested; else a common base is enough."""
    if value is None:
        yield f"{text} is None"
    elif isinstance(value, bool):
        yield f"{text} is {value}"
    elif isinstance(value, (int, float)):  # 1 == True, and a tensor may equal 1
        yield f"type({text}) is {type(value).__name__}"
        yield f"{text} == {expressions.value(value)}"
    elif is_constant(value):
        yield f"{text} == {expressions.value(value)}"
    elif isinstance(value, torch.Tensor):  # even if no node uses it: its `ndim` may have been read
        yield f"isinstance({text}, torch.Tensor)"
        yield f"{text}.ndim == {value.ndim}"
    elif not used and not typed:
        yield f"{text} is not None"
    elif typed or isinstance(value, (tuple, list, dict)):
        yield f"type({text}) is {expressions.names.of(type(value))}"
    else:
        yield f"isinstance({text}, {expressions.names.of(type(value).__mro__[-2])})"


def _dtypes(
    traced: RegionTrace, tracer: GuardedTracer, passthrough: frozenset[str], expressions: Expressions
) -> Iterator[str]:
    """Conditions on autocast and on dtypes of arguments and parameters. They imply all others."""
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder" and str(n.target) not in passthrough]
    tensors = [n for n in inputs if isinstance(n.meta["example"], torch.Tensor)]
    for node in tensors:
        if node.users:
            yield f"{node.target}.dtype == {node.meta['example'].dtype}"
    if tensors:
        tensor, device = str(tensors[0].target), tensors[0].meta["example"].device.type
        enabled = f"torch.is_autocast_enabled({tensor}.device.type)"
        if device == "meta" or not torch.is_autocast_enabled(device):  # "meta" has no autocast
            yield f"({tensor}.is_meta or not {enabled})"
        else:
            dtype = f"torch.get_autocast_dtype({tensor}.device.type) == {torch.get_autocast_dtype(device)}"
            yield from (f"not {tensor}.is_meta", enabled, dtype)
    read = dict(tracer.dtypes) if traced.parameter_dtype is None else dict([traced.parameter_dtype], **tracer.dtypes)
    for name, dtype in read.items():
        yield f"{expressions.names.read(attribute_path(name))}.dtype == {dtype}"


class RunTimeDecision(PeftcError):
    """P406: the forward decides on the value of `node`, which is known only while it runs."""

    def __init__(self, diagnostic: Diagnostic, node: fx.Node) -> None:
        super().__init__(diagnostic)
        self.node = node


def _condition(guard: Guard, expressions: Expressions) -> str:
    """The condition for one guard. Raises: P406 if its value is known only at run time."""
    acting = next((n for n in ancestors(guard.node) if has_side_effects(n) or tells_history(n)), None)
    if acting is not None and (device := _device_of_arguments(guard, expressions)):
        return device
    if acting is not None:
        origin = acting.meta.get("origin", ("?",))[0] or "the region"
        message = "the forward takes a Python decision on a value that is only known while it runs"
        name = acting.args[1] if acting.target is getattr else acting.target
        notes = (f"the value depends on `{name}` of `{origin}`",)
        notes += (f"at {guard.line}",) if guard.line is not None else ()
        raise RunTimeDecision(Diagnostic("P406", message, notes=notes, help=SMALLER), guard.node)
    text, value = expressions.of_arguments(guard.node), guard.value
    match guard.kind:
        case "type":
            return f"isinstance({text}, {expressions.names.of(value)})"
        case "bool":
            return _equals(text, value, expressions)
        case "len":
            return f"len({text}) == {value}"
        case "keys":
            return f"[*{text}] == {value!r}"
        case "int" if isinstance(guard.node.meta.get("example"), float):
            return f"int({text}) == {value}"
        case "ndim":
            tensor = f"isinstance({text}, torch.Tensor) and {text}.ndim == {value}"
            return f"{text} is not None" if value is None else tensor
        case _:
            return f"{text} is None" if guard.kind == "is" and value is None else f"{text} == {value!r}"


def _device_of_arguments(guard: Guard, expressions: Expressions) -> str:
    """The condition that the first tensor among the arguments is on a device of this type; empty
    for other guards. A region computes on the device of what it gets.
    """
    # Seen in: the activations of diffusers, which ask for "mps"
    node, inputs = guard.node, [n for n in guard.node.graph.nodes if n.op == "placeholder"]
    device = node.args[0] if node.target is getattr and node.args[1:] == ("type",) else None
    is_device = isinstance(device, fx.Node) and device.target is getattr and device.args[1:] == ("device",)
    first = next((n for n in inputs if isinstance(n.meta.get("example"), torch.Tensor)), None)
    if not is_device or first is None or first.meta["example"].device.type != guard.value:
        return ""
    return f"{expressions.of_arguments(first)}.device.type == {guard.value!r}"


def _is_unknown_before(guard: Guard) -> bool:
    """Whether no expression of the arguments can test a guard: its value is computed inside."""
    is_inside = guard.kind == "type" and has_side_effects(guard.node)
    return is_inside or (guard.kind in ("is", "type", "structure") and _is_child_result(guard.node))


def _is_child_result(node: fx.Node) -> bool:
    """Whether only the run tells a value: of a module's call, or of a method that changes its
    object.
    """
    root = getitem_root(node)
    if root.op == "call_module" or root.target in (attention, model_function):
        return True
    return root is node and EFFECT in node.meta


def mutable_guards(traced: RegionTrace) -> list[Guard]:
    """Guards to recheck at run time: on a cache that the region changes, or on a child's result."""
    writers = [n for n in traced.graph.nodes if has_side_effects(n) and n.op != "call_module"]
    objects = {node: _objects(node) for node in (*writers, *(guard.node for guard in traced.guards))}
    return [
        guard
        for guard in traced.guards
        if any(n < guard.node and objects[n] & objects[guard.node] for n in writers)
        or (guard.kind in ("is", "type", "structure") and _is_child_result(guard.node))
    ]


def _objects(node: fx.Node) -> set[fx.Node]:
    """The non-tensor arguments, such as caches, that a node is computed from."""
    arguments = (n for n in ancestors(node) if n.op == "placeholder")
    return {n for n in arguments if not isinstance(n.meta["example"], torch.Tensor)}


def traits(traced: RegionTrace, passthrough: frozenset[str]) -> dict[str, str]:
    """Phrases that describe the conditions, by subject: mode, cache, arguments, dtypes."""
    modes = {value for (_, name), value in traced.attribute_guards.items() if name == "training"}
    mode = "training" if all(modes) else "partly training" if any(modes) else "evaluation"
    phrases = {"mode": mode} if modes else {}
    for node in traced.graph.nodes:
        name, value = str(node.target), node.meta.get("example")
        if node.op != "placeholder" or name in passthrough or name.startswith("*"):
            continue
        if isinstance(value, Cache) or (value is None and name in CACHES):
            phrases["cache"] = "without a cache" if value is None else "with a cache"
        elif isinstance(value, torch.Tensor):
            phrases[name] = f"with {name}"
            phrases[f"{name}.ndim"] = f"{name} of {value.ndim} dimensions"
            if traced.depends_on_dtype:
                phrases[f"{name}.dtype"] = str(value.dtype).removeprefix("torch.")
        elif value is None:
            phrases[name] = f"without {name}"
        else:
            phrases[name] = f"{name}={value!r}" if is_constant(value) else f"with {name}"
    return phrases
