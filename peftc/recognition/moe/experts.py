"""Mixtures of experts in a layer: which sub-layers have experts, what routes to them, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.fakes.tensors import fake_copy
from peftc.recognition import ffn
from peftc.recognition.attention.patterns import attentions
from peftc.recognition.graph import features, nodes
from peftc.recognition.moe.listed import Listed, listed
from peftc.recognition.moe.router import Router, router
from peftc.recognition.moe.stacked import Experts, experts, multiplies_pieces
from peftc.recognition.roles import SubLayer
from peftc.tracing.approximate_trace import approximate_trace
from peftc.tracing.tracer import ModuleCall, RegionTrace


def find_experts(traced: RegionTrace, subs: list[SubLayer], root: nn.Module, mode: FakeTensorMode) -> set[str]:
    """Names the experts of each sub-layer, their router, and the networks beside them.

    Returns: the modules in which one of these was seen, whether their code could be entered or not.

    Matrices in one parameter that nothing routes to are no experts: blocks of features may each have one.
    """
    seen = set[str]()
    for call in candidates(traced, root):
        owner = next((sub for sub in subs if sub.attention is None and computes(sub, call.name)), None)
        code = followed(call, root, mode) if owner is not None else None
        found = looked_into(call.name, code) if code is not None else None
        if owner is not None and code is not None and (found is not None or multiplies_pieces(code)):
            seen.add(call.name)
            owner.kind = "ffn" if owner.kind == "unread" else owner.kind
        if owner is not None and found is not None:
            owner.experts.append(found)
            owner.experts.sort(key=lambda one: one.module not in numbered(traced))
            given = argument_nodes(call.arguments)
            for values in (list(filter(is_number, given)), given):  # what is chosen by comes before what is computed on
                owner.router = owner.router or router(values, found.count, owner.body, root)
            owner.router = owner.router or hidden_router(given, found.count, traced, root, mode)
    for sub in subs:
        if sub.router is None:
            sub.experts = []
        elif sub.router.alone:
            seen |= {call.name for call in traced.calls if f"{sub.router.weight}.".startswith(f"{call.name}.")}
        if sub.experts:
            sub.kind = "ffn"  # what mixes tokens in it only counts how many an expert is sent
            sub.experts = together(sub.experts, traced, root)
            name_shared(sub, root)
    return seen


def together(found: list[Experts | Listed], traced: RegionTrace, root: nn.Module) -> list[Experts | Listed]:
    """Experts each of whose Linears is in a module of its own, as one: what makes the input of another's `down` is its `up`,
    or its `gate` and `up`.
    """
    calls = {call.name: call for call in traced.calls if isinstance(call.result, fx.Node)}
    alone = [e for e in found if isinstance(e, Experts) and set(e.roles) == {"down"} and e.module in calls]
    results = {calls[one.module].result: one for one in alone}
    for node, last in results.items():
        hidden = nodes.first_input(node)
        made = ffn.before(hidden, root, lambda n, _: n in results) if hidden is not None else {}
        first = {role: results[p.node].roles["down"] for role, p in made.items()}
        if first and all(role.weight.count == last.count for role in first.values()):
            roles = {role: replace(first[role], rows=p.rows) for role, p in made.items()}
            parts = [last, *(results[p.node] for p in made.values())]
            whole = replace(last, module=calls[last.module].caller, roles={**roles, **last.roles})
            return [whole, *(one for one in found if one not in parts)]
    return found


def candidates(traced: RegionTrace, root: nn.Module) -> Iterator[ModuleCall]:
    """Calls of modules that hold several matrices in one parameter, or whose code could not be entered."""
    inlined = [call.name for call in traced.calls if call.inlined]
    for call in traced.calls:
        module = root.get_submodule(call.name)
        stacked = any(p.ndim == 3 and min(p.shape) > 1 for p in module.parameters(recurse=False))
        opaque = call.name not in inlined and next(module.children(), None) is not None
        if (stacked or opaque) and not type(module).__module__.startswith("torch."):
            yield call


def computes(sub: SubLayer, module: str) -> bool:
    """Whether a sub-layer's value is made by a module, called as a leaf or entered."""
    frames = {str(n.target) if n.op == "call_module" else str(n.meta.get("origin", ("",))[0]) for n in sub.body}
    return any(f"{frame}.".startswith(f"{module}.") for frame in frames)


def looked_into(module: str, code: RegionTrace) -> Experts | Listed | None:
    return experts(module, code) or listed(module, code)


def followed(call: ModuleCall, root: nn.Module, mode: FakeTensorMode) -> RegionTrace | None:
    """The gist of a call's code; None where it cannot be followed, or attends: then it is more than experts."""
    arguments = fx.map_arg(call.arguments, lambda n: n.meta.get("example"))
    try:
        with mode:
            code = approximate_trace(root.get_submodule(call.name), fake_copy(arguments, mode))
            return None if attentions(code.graph, root.get_submodule(call.name)) else code
    except Exception:  # of a model's own code: in what cannot be followed there is nothing that could be named
        return None


def hidden_router(
    given: list[fx.Node], count: int, traced: RegionTrace, root: nn.Module, mode: FakeTensorMode
) -> Router | None:
    """The Linear that routes inside of a module whose code could not be entered."""
    before = {str(n.target) for value in given for n in nodes.upstream(value, lambda n: n.op == "call_module")}
    for call in traced.calls:
        seen = None if call.inlined or call.name not in before else followed(call, root, mode)
        module = root.get_submodule(call.name)
        if seen is None or next(module.children(), None) is None:
            continue
        output = next(n for n in seen.graph.nodes if n.op == "output")
        found = router([output], count, set(seen.graph.nodes), module)
        if found is not None and found.logits.op == "call_module":
            bias = found.bias and f"{call.name}.{found.bias}"
            return replace(found, weight=f"{call.name}.{found.weight}", bias=bias, alone=True)
    return None


def numbered(traced: RegionTrace) -> set[str]:
    """The modules that are told numbers, of experts, with what they compute on."""
    return {call.name for call in traced.calls if any(map(is_number, argument_nodes(call.arguments)))}


def is_number(node: fx.Node) -> bool:
    value = nodes.example(node)
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def argument_nodes(value: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)  # pyright: ignore[reportArgumentType]
    return found


def name_shared(sub: SubLayer, root: nn.Module) -> None:
    """Networks of ordinary Linears whose result is added to that of the experts."""
    router_node = sub.router.logits if sub.router is not None else None
    sub.projections, sub.hidden = {}, None
    downs = [p for p in features.source_linears(sub.h, root) if p[0] is not router_node and p[0] in sub.body]
    for down in downs:
        hidden = nodes.first_input(down[0])
        roles = ffn.before(hidden, root) if hidden is not None else {}
        if "up" in roles and all(p.node in sub.body for p in roles.values()):
            sub.shared.append({**{r: roles[r] for r in ("gate", "up") if r in roles}, "down": ffn.Projection(*down)})
    played = {p.node for network in sub.shared for p in network.values()} | {router_node}
    sub.linears = sorted(n for n in sub.body if nodes.is_linear(n, root) and n not in played)
