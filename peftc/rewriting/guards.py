"""The conditions under which a traced forward is the right one, as Python expressions of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.rewriting.emit import Emitter, attribute_path
from peftc.tracing.calls import baked
from peftc.tracing.seams import attention
from peftc.tracing.tracer import Guard, Traced


def conditions(traced: Traced, emitter: Emitter) -> list[str]:
    """Everything that must hold of a call, cheapest first; all of it is asked before anything has happened."""
    found = [*facts(traced), *arguments(traced, emitter)]
    if traced.depends_on_dtype:
        found += dtypes(traced)
    found += [asked(guard, emitter) for guard in traced.guards if guard.kind != "type" or not acts(guard.node)]
    return list(dict.fromkeys(found))


def facts(traced: Traced) -> Iterator[str]:
    """What Python read from modules and decided on: `training` first."""
    for (owner, name), value in sorted(traced.facts.items(), key=lambda item: item[0][1] != "training"):
        path = attribute_path(f"{owner}.{name}".lstrip("."))
        if value is True or value is False:
            yield path if value else f"not {path}"
        else:
            yield f"{path} == {value!r}"


def arguments(traced: Traced, emitter: Emitter) -> Iterator[str]:
    for node in traced.graph.nodes:
        if node.op != "placeholder":
            continue
        target, value = str(node.target), node.meta["example"]
        if target.startswith("**"):
            yield from keywords(target[2:], value, emitter)
        elif target.startswith("*"):
            yield f"len({target[1:]}) == {len(value)}"
        else:
            yield from argument(target, value, emitter, used=bool(node.users))


def keywords(name: str, values: dict[str, Any], emitter: Emitter) -> Iterator[str]:
    yield f"len({name}) == {len(values)}" if values else f"not {name}"
    for key, value in values.items():
        yield f"{key!r} in {name}"
        yield from argument(f"{name}[{key!r}]", value, emitter, used=True)


def argument(text: str, value: Any, emitter: Emitter, used: bool) -> Iterator[str]:
    if value is None:
        yield f"{text} is None"
    elif isinstance(value, bool):
        yield f"{text} is {value}"
    elif baked(value):
        yield f"{text} == {emitter.arg(value)}"
    elif not used:
        return
    elif isinstance(value, torch.Tensor):
        yield f"isinstance({text}, torch.Tensor)"
        yield f"{text}.ndim == {value.ndim}"
    else:
        yield f"type({text}) is {emitter.names.of(type(value))}"


def dtypes(traced: Traced) -> Iterator[str]:
    """Dtypes inside a region follow from those of its arguments and parameters, and from autocast."""
    tensors = [n for n in traced.graph.nodes if n.op == "placeholder" and isinstance(n.meta["example"], torch.Tensor)]
    for node in tensors:
        if node.users:
            yield f"{node.target}.dtype == {node.meta['example'].dtype}"
    if tensors:
        device = f"{tensors[0].target}.device.type"
        enabled = torch.is_autocast_enabled(tensors[0].meta["example"].device.type)
        yield f"torch.is_autocast_enabled({device})" if enabled else f"not torch.is_autocast_enabled({device})"
    if traced.parameter is not None:
        name, dtype = traced.parameter
        yield f"{attribute_path(name)}.dtype == {dtype}"


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
    if guard.kind == "is" and guard.value is None:
        return f"{text} is None"
    return f"{text} == {guard.value!r}"


def check_pure(node: fx.Node) -> None:
    """Raises P406 where the value cannot be known before the region has run."""
    if acts(node):
        raise PeftcError(
            Diagnostic(
                "P406",
                "the forward takes a Python decision on a value that is only known while it runs",
                notes=(
                    f"the value depends on `{node.target}` of `{node.meta.get('origin', ('?',))[0] or 'the region'}`",
                ),
                help="edit a smaller part of the layer, so that this code is not entered",
            )
        )
    for source in node.all_input_nodes:
        check_pure(source)


def acts(node: fx.Node) -> bool:
    """Whether running a node twice could change something, or costs a module's forward."""
    if node.op == "call_module":
        return True
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return (
            node.target is attention
            or name in ("setitem", "dropout")
            or (name.endswith("_") and not name.endswith("__"))
        )
    if node.op == "call_method":
        name = str(node.target)
        return name in ("update", "append", "pop", "setdefault") or (name.endswith("_") and not name.endswith("__"))
    return False


def late(traced: Traced) -> list[Guard]:
    """Guards whose question may have another answer by the time the code asks it: something has acted before on what
    they look at. They are asked again there.
    """
    found: list[Guard] = []
    for guard in traced.guards:
        roots = objects(guard.node)
        before = [n for n in traced.graph.nodes if acts(n) and n.op != "call_module" and n < guard.node]
        if any(objects(n) & roots for n in before):
            found.append(guard)
    return found


def objects(node: fx.Node) -> set[fx.Node]:
    """The arguments that are no tensors (caches) among what a node is computed from."""
    if node.op == "placeholder":
        return set() if isinstance(node.meta["example"], torch.Tensor) else {node}
    return {root for source in node.all_input_nodes for root in objects(source)}
