"""The conditions under which a traced forward is the right one, as Python expressions of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from peftc.dataflow.nodes import ancestors
from peftc.dataflow.operations import has_side_effects
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.specialization.code_printer import Emitter, attribute_path
from peftc.specialization.guarded_tracer import GuardedTracer
from peftc.tracing.module_calls import is_constant
from peftc.tracing.operations import attention
from peftc.tracing.region_trace import Guard, RegionTrace, getitem_root


def conditions(
    traced: RegionTrace, tracer: GuardedTracer, handed: frozenset[str], keys: frozenset[str] | None, emitter: Emitter
) -> list[str]:
    """Everything that must hold of a call, cheapest first; all of it is asked before anything has happened.

    Nothing need hold of arguments that are `handed` on only; `keys`: the keywords that are, as a whole.
    """
    found = [*training(traced), *arguments(traced, tracer, handed, keys, emitter), *facts(traced, tracer)]
    found += surroundings(tracer)
    if traced.depends_on_dtype:
        found += dtypes(traced, tracer, handed)
    found += [asked(guard, emitter) for guard in traced.guards if not only_inside(guard)]
    return list(dict.fromkeys(found))


def training(traced: RegionTrace) -> Iterator[str]:
    """Whether modules are trained: what tells most variants apart."""
    for (owner, name), value in traced.attribute_guards.items():
        if name == "training":
            path = attribute_path(f"{owner}.{name}".lstrip("."))
            yield path if value else f"not {path}"


def only_inside(guard: Guard) -> bool:
    """Whether the question is about what a child gave: its type, which is what it was; or whether it is None."""
    return (guard.kind == "type" and has_side_effects(guard.node)) or (
        guard.kind == "is" and given_by_child(guard.node)
    )


def given_by_child(node: fx.Node) -> bool:
    """Whether a value is what a child, or an attention, has given, or a part of it."""
    return getitem_root(node).op == "call_module" or getitem_root(node).target is attention


def facts(traced: RegionTrace, tracer: GuardedTracer) -> Iterator[str]:
    """What Python read from modules and configs and decided on."""
    for (owner, name), value in traced.attribute_guards.items():
        path = attribute_path(f"{owner}.{name}".lstrip("."))
        if value is True or value is False:
            yield path if value else f"not {path}"
        else:
            yield f"{path} is None" if value is None else f"{path} == {value!r}"
    decided = {f"{owner}.{name}".lstrip(".") for owner, name in traced.attribute_guards}
    for name in tracer.numbers:
        if name not in decided:
            yield f"{attribute_path(name)} is not None"


def surroundings(tracer: GuardedTracer) -> Iterator[str]:
    """What the code asked torch about the block that it runs in."""
    for (name, args), value in tracer.global_state.items():
        text = f"torch.{name}({', '.join(map(repr, args))})"
        yield f"{text} == {value}" if not isinstance(value, bool) else text if value else f"not {text}"


def arguments(
    traced: RegionTrace, tracer: GuardedTracer, handed: frozenset[str], keys: frozenset[str] | None, emitter: Emitter
) -> Iterator[str]:
    for node in traced.graph.nodes:
        if node.op != "placeholder" or str(node.target) in handed:
            continue
        target, value = str(node.target), node.meta["example"]
        if target.startswith("**") and keys is not None:
            yield f"(not {target[2:]} or {target[2:]}.keys() <= {emitter.names.constant('HANDED_ON', keys)})"
        elif target.startswith("**"):
            yield from keywords(target[2:], node, tracer, handed, emitter)
        elif target.startswith("*"):
            yield f"len({target[1:]}) == {len(value)}"
        else:
            yield from argument(target, value, emitter, used=bool(node.users), typed=node in tracer.typed)


def keywords(
    name: str, holder: fx.Node, tracer: GuardedTracer, handed: frozenset[str], emitter: Emitter
) -> Iterator[str]:
    values: dict[str, Any] = holder.meta["example"]
    yield f"len({name}) == {len(values)}" if values else f"not {name}"
    parts = {n.args[1]: n for n in holder.users if n.target is operator.getitem}
    for key, value in values.items():
        yield f"{key!r} in {name}"
        if f"**{key}" not in handed:
            part = parts.get(key)
            used = part is not None and bool(part.users)
            yield from argument(f"{name}[{key!r}]", value, emitter, used=used, typed=part in tracer.typed)


def argument(text: str, value: Any, emitter: Emitter, used: bool, typed: bool) -> Iterator[str]:
    """What must hold of one argument. The class of an object counts where it was asked for, else its base."""
    if value is None:
        yield f"{text} is None"
    elif isinstance(value, bool):
        yield f"{text} is {value}"
    elif isinstance(value, (int, float)):  # 1 is True, and a tensor may be 1
        yield f"type({text}) is {type(value).__name__}"
        yield f"{text} == {emitter.arg(value)}"
    elif is_constant(value):
        yield f"{text} == {emitter.arg(value)}"
    elif isinstance(value, torch.Tensor):  # used or not: its dimensions may have been asked for
        yield f"isinstance({text}, torch.Tensor)"
        yield f"{text}.ndim == {value.ndim}"
    elif not used and not typed:
        yield f"{text} is not None"
    elif typed or isinstance(value, (tuple, list, dict)):
        yield f"type({text}) is {emitter.names.of(type(value))}"
    else:
        yield f"isinstance({text}, {emitter.names.of(type(value).__mro__[-2])})"


def dtypes(traced: RegionTrace, tracer: GuardedTracer, handed: frozenset[str]) -> Iterator[str]:
    """Dtypes inside a region follow from those of its arguments and parameters, and from autocast."""
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder" and str(n.target) not in handed]
    tensors = [n for n in inputs if isinstance(n.meta["example"], torch.Tensor)]
    for node in tensors:
        if node.users:
            yield f"{node.target}.dtype == {node.meta['example'].dtype}"
    if tensors:
        yield from autocast(str(tensors[0].target), tensors[0].meta["example"].device.type)
    read = dict(tracer.dtypes) if traced.parameter_dtype is None else dict([traced.parameter_dtype], **tracer.dtypes)
    for name, dtype in read.items():
        yield f"{attribute_path(name)}.dtype == {dtype}"


def autocast(tensor: str, device: str) -> Iterator[str]:
    """That autocast is on or off for the device of a tensor. The device "meta" knows none."""
    asked = f"torch.is_autocast_enabled({tensor}.device.type)"
    if device == "meta" or not torch.is_autocast_enabled(device):
        yield f"({tensor}.is_meta or not {asked})"
    else:
        yield f"not {tensor}.is_meta"
        yield asked
        yield f"torch.get_autocast_dtype({tensor}.device.type) == {torch.get_autocast_dtype(device)}"


def asked(guard: Guard, emitter: Emitter) -> str:
    """What Python asked of a computed value, as an expression of the arguments."""
    check_pure(guard.node)
    text = emitter.guard(guard.node)
    if guard.kind == "type":
        return f"isinstance({text}, {emitter.names.of(guard.value)})"
    return answer(guard, text)


def answer(guard: Guard, text: str) -> str:
    if guard.kind == "bool":
        return text if guard.value else f"not {text}"
    if guard.kind == "len":
        return f"len({text}) == {guard.value}"
    if guard.kind == "keys":
        return f"[*{text}] == {guard.value!r}"
    if guard.kind == "given" and guard.value is not None:
        return f"isinstance({text}, torch.Tensor) and {text}.ndim == {guard.value}"
    if guard.kind == "given":
        return f"{text} is not None"
    if guard.kind == "is" and guard.value is None:
        return f"{text} is None"
    return f"{text} == {guard.value!r}"


def check_pure(node: fx.Node) -> None:
    """Raises P406 where the value cannot be known before the region has run."""
    acting = next((n for n in ancestors(node) if has_side_effects(n)), None)
    if acting is not None:
        raise PeftcError(
            Diagnostic(
                "P406",
                "the forward takes a Python decision on a value that is only known while it runs",
                notes=(
                    f"the value depends on `{acting.target}` of `{acting.meta.get('origin', ('?',))[0] or 'the region'}`",
                ),
                help="edit a smaller part of the layer, so that this code is not entered",
            )
        )


def late(traced: RegionTrace) -> list[Guard]:
    """Guards whose question may have another answer by the time the code asks it: something has acted before on what
    they look at, or a child has given it. They are asked again there.
    """
    found: list[Guard] = []
    for guard in traced.guards:
        roots = objects(guard.node)
        before = [n for n in traced.graph.nodes if has_side_effects(n) and n.op != "call_module" and n < guard.node]
        if any(objects(n) & roots for n in before) or (guard.kind == "is" and given_by_child(guard.node)):
            found.append(guard)
    return found


def objects(node: fx.Node) -> set[fx.Node]:
    """The arguments that are no tensors (caches) among what a node is computed from."""
    if node.op == "placeholder":
        return set() if isinstance(node.meta["example"], torch.Tensor) else {node}
    return {root for source in node.all_input_nodes for root in objects(source)}
