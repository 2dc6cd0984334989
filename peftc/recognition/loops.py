"""Layers that are no modules: the body of a loop in the forward of a module.

    for attn, ffn in self.layers:             for attn, ffn in zip(self.attns, self.ffns):
        x = x + attn(x)                           x = x + attn(x)
        x = x + ffn(x)                            x = x + ffn(x)

The loop is seen in the calls: a module calls elements of lists that nothing calls. What runs with
one index of a list is one layer. All layers of a loop are in one graph, that of the module whose
code has the loop.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from torch import fx, nn

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, module_path
from peftc.dataflow.operations import Op
from peftc.modules.walk import outline_module
from peftc.observation.sample_forward import SampleForward
from peftc.recognition.layer_candidates import LISTS
from peftc.recognition.residual_stream import before_shift, gives_states
from peftc.recognition.roles import sub_layers
from peftc.recognition.sublayer import SubLayer
from peftc.recognition.token_mixing import is_weighted
from peftc.tracing.region_trace import RegionTrace


@dataclass(frozen=True)
class Loop:
    """A loop over lists of modules. Names are dotted.

    Attributes:
        caller: the module whose code has the loop.
        lists: the lists, in the order of their first calls.
        bodies: for each iteration the elements that it calls.
    """

    caller: str
    lists: tuple[str, ...]
    bodies: tuple[tuple[str, ...], ...]

    def holds(self, name: str) -> bool:
        """Whether a module is one of the elements, or in one."""
        return any(contains_name(part, name) for body in self.bodies for part in body)

    def bodies_in_caller(self) -> tuple[tuple[str, ...], ...]:
        """The bodies by the names that the caller has for their elements."""
        start = len(self.caller) + 1 if self.caller else 0
        return tuple(tuple(name[start:] for name in body) for body in self.bodies)

    def place(self, body: tuple[str, ...]) -> str:
        """The smallest module that contains an iteration's elements."""
        return body[0] if len(body) == 1 else self.caller


@dataclass(frozen=True)
class _Element:
    """An element of a list, at its place among the calls of one caller."""

    list: str
    name: str
    at: int


def find_loops(model: nn.Module, seen: SampleForward, calls: Iterable[str]) -> list[Loop]:
    """The loops over lists of modules, those inside others first. `calls`: modules that are called,
    in order.
    """
    elements: dict[str, dict[str, _Element]] = {}
    module = cache(partial(outline_module, model))
    for at, name in enumerate(calls):
        caller = seen.callers.get(name)
        if caller is None or type(module(caller)).forward is nn.Sequential.forward:
            continue
        if (element := _element(module, caller, name, at)) is not None:
            elements.setdefault(caller, {}).setdefault(element.name, element)
    loops = [loop for caller, group in elements.items() for loop in _loops_of(caller, list(group.values()), model)]
    return sorted(loops, key=lambda loop: -_depth(loop.caller))


def _depth(name: str) -> int:
    return name.count(".") + bool(name)


def _element(module: Callable[[str], nn.Module], caller: str, name: str, at: int) -> _Element | None:
    """The element of the outermost list between a caller and what it calls."""
    parts = name.split(".")
    for depth in range(_depth(caller), len(parts)):
        path = ".".join(parts[:depth])
        if isinstance(module(path), LISTS) and f"{path}.".startswith(f"{caller}.".lstrip(".")):
            return _Element(path, ".".join(parts[: depth + 1]), at)
    return None


def _loops_of(caller: str, elements: Sequence[_Element], model: nn.Module) -> Iterator[Loop]:
    """The loops of one caller. Lists whose calls alternate are in one loop."""
    spans: dict[str, list[_Element]] = {}
    for element in elements:
        spans.setdefault(element.list, []).append(element)
    groups: list[list[str]] = []
    end = -1
    for name, members in sorted(spans.items(), key=lambda item: item[1][0].at):
        if groups and members[0].at < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, members[-1].at)
    for lists in groups:
        bodies = _bodies([spans[name] for name in lists], model)
        yield Loop(caller, tuple(lists), tuple(map(tuple, bodies)))


def _bodies(lists: Sequence[list[_Element]], model: nn.Module) -> list[list[str]]:
    """The elements by iteration: those at one place of lists of one length, others by time."""
    main = next((one for one in lists if any(map(_has_matrix, _modules(one, model)))), lists[0])
    bodies: list[list[str]] = [[] for _ in main]
    for members in lists:
        for place, element in enumerate(members):
            if len(members) != len(main):
                place = max(sum(one.at <= element.at for one in main) - 1, 0)
            bodies[place].append(element.name)
    return bodies


def _modules(elements: Sequence[_Element], model: nn.Module) -> Iterator[nn.Module]:
    return (outline_module(model, element.name) for element in elements)


def _has_matrix(module: nn.Module) -> bool:
    return any(p.ndim >= 2 for p in module.parameters())


def attribute_loops(model: nn.Module, seen: SampleForward) -> list[Loop]:
    """The parts of layers that are attributes of one module, as if its code had a loop over them:
    `x = x + self.attn_1(x)`. Where a part like an earlier one follows, the next layer begins.
    """
    # Seen in: no transformers model, but models of few layers
    callers: dict[str, list[str]] = {}
    for name in seen.calls:
        caller = name.rpartition(".")[0]
        is_own = seen.callers.get(name) == caller and next(outline_module(model, name).parameters(), None) is not None
        if is_own and type(outline_module(model, caller)).forward is not nn.Sequential.forward:
            callers.setdefault(caller, []).append(name)
    groups = {caller: _bodies_of_attributes(names, model) for caller, names in callers.items()}
    loops = [Loop(caller, (caller,), tuple(map(tuple, bodies))) for caller, bodies in groups.items() if bodies]
    return sorted(loops, key=lambda loop: -_depth(loop.caller))


def _bodies_of_attributes(names: Sequence[str], model: nn.Module) -> list[list[str]]:
    """Modules by layer. Those of one matrix or less, but for norms, are in none; norms are before
    their parts if the first one is.
    """
    bodies: list[list[str]] = []
    kinds: set[object] = set()
    norms: list[str] = []
    is_before = not _has_matrix(outline_module(model, names[0]))
    for name in names:
        shapes = [p.shape for p in outline_module(model, name).parameters()]
        if all(len(sizes) < 2 for sizes in shapes):
            (norms if is_before or not bodies else bodies[-1]).append(name)
        elif sum(len(sizes) > 1 for sizes in shapes) > 1:
            kind = (type(outline_module(model, name)), *shapes)
            if not bodies or kind in kinds:
                bodies.append([])
                kinds.clear()
            kinds.add(kind)
            bodies[-1] += [*norms, name]
            norms.clear()
    return bodies


def may_hold_layers(loop: Loop, model: nn.Module, layers: Mapping[str, Sequence[SubLayer]]) -> bool:
    """Whether the iterations of a loop may be layers: what they call are no layers, or each of it
    is one sub-layer that adds to the stream itself. `layers`: modules that are layers.
    """
    inside: dict[str, list[str]] = {}  # the layers in each module, itself perhaps one
    for name in layers:
        for end in (*(i for i, c in enumerate(name) if c == "."), len(name)):
            inside.setdefault(name[:end], []).append(name)
    own = [{name for one in body for name in inside.get(one, ())} for body in loop.bodies]
    if not any(own):
        return any(sum(p.ndim >= 2 for p in _parameters(body, model)) >= 2 for body in loop.bodies)
    # Seen in: CvT of vit-pytorch, whose lists hold `Residual(attention)` and `Residual(ffn)`
    several = all(len(names) > 1 for names in own)
    return several and all(len(layers[name]) == 1 for names in own for name in names)


def is_stage(loop: Loop, model: nn.Module, subs: Sequence[SubLayer]) -> bool:
    """Whether each body is a Sequential whose elements add all sub-layers, each of them several:
    the elements are layers. `subs`: those of the graph of the loop's caller.
    """
    # Seen in: no transformers model, but the area attention of YOLOv12
    inside = {name for body in loop.bodies_in_caller() for name in _elements_of(body, loop, model)}
    owners = [next((name for name in inside if f"{module_path(sub.add)}.".startswith(f"{name}.")), "") for sub in subs]
    return bool(inside) and min(Counter(owners).values(), default=0) > 1 and "" not in owners and len({*owners}) > 1


def _elements_of(body: tuple[str, ...], loop: Loop, model: nn.Module) -> Iterator[str]:
    """The elements of a Sequential that alone is a body."""
    for name in body if len(body) == 1 else ():
        module = outline_module(model, f"{loop.caller}.{name}".lstrip("."))
        yield from (f"{name}.{child}" for child in dict(module.named_children()) if isinstance(module, nn.Sequential))


def repeated_part(loop: Loop, model: nn.Module, seen: SampleForward) -> str | None:
    """A module with matrices in the bodies that one run of the loop calls several times."""
    # Seen in: Universal Transformers; one list whose elements are the same module
    runs = seen.calls[loop.caller].count if loop.caller in seen.calls else 1
    repeated = (name for name, call in seen.calls.items() if call.count > runs and loop.holds(name))
    own = (name for name in repeated if seen.callers.get(name) == loop.caller)
    return next((name for name in own if _has_matrix(outline_module(model, name))), None)


def _parameters(body: Sequence[str], model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for name in body for p in outline_module(model, name).parameters())


def sub_layers_in_loop(
    bodies: Sequence[Sequence[str]], traced: RegionTrace, layer: LayerGraph, opaque: Collection[str]
) -> list[SubLayer]:
    """The sub-layers of all iterations, in order. The residual stream of one goes on in the next,
    or begins again: between two, code may merge tokens, or join what an earlier one has computed.

    Args: `bodies`: the elements of each iteration, by their names in the graph.
    """
    # Seen in: ViT with patch merger, U-ViT, factorized ViViT, CrossViT
    subs: list[SubLayer] = []
    stream, inside = set[fx.Node](), set[fx.Node]()
    starts, others = (list(_starts(bodies, traced, layer, first)) for first in (True, False))
    for values, may_replace in [*product(starts, (False,)), *product(others, (False,)), *product(starts, (True,))]:
        if stream.isdisjoint(values) and inside.isdisjoint(values[:1]):
            own = [_sub_layers_from(start, bodies, subs, layer, opaque) for start in values]
            # A stream that its first sub-layer replaces may begin behind that.
            more = max((s for s in own if may_replace or not any(sub.h is sub.add for sub in s)), key=len, default=[])
            subs += more
            stream |= {node for sub in more for node in (sub.res, sub.add)}
            inside |= {node for sub in more for node in sub.body - {sub.res}}
    return sorted(subs, key=lambda sub: sub.add)


def _sub_layers_from(
    start: fx.Node,
    bodies: Sequence[Sequence[str]],
    known: Sequence[SubLayer],
    layer: LayerGraph,
    opaque: Collection[str],
) -> list[SubLayer]:
    """The sub-layers of a stream in the iterations, without any that shares Linears with others.
    Those before the loop may compute what all iterations read.
    """
    # Seen in: no transformers model, but U-Nets, whose second loop reads what the first computes
    groups = sub_layers_by_body(bodies, sub_layers(layer, opaque, start, {sub.add for sub in known}), layer)
    used = {name for sub in known for name in weights_of(sub, layer) if any(_in_body(name, body) for body in bodies)}
    return [sub for group in groups for sub in group if used.isdisjoint(weights_of(sub, layer))]


def _starts(
    bodies: Sequence[Sequence[str]], traced: RegionTrace, layer: LayerGraph, first: bool
) -> Iterator[list[fx.Node]]:
    """What may be the residual stream before a call of an element: what it reads, without norms.
    `first`: its first argument, else the others.
    """
    # Seen in: no transformers model, but Flamingo, whose latents are the second argument
    elements = [element for body in bodies for element in body]
    for call in traced.calls:
        if call.caller != "" or not any(contains_name(element, call.name) for element in elements):
            continue
        values = [n for n in call.arguments.values() if isinstance(n, fx.Node) and is_tensor(n) and gives_states(n)]
        yield from (_without_norms(value, layer) for value in (values[:1] if first else values[1:]))


def _without_norms(node: fx.Node | None, layer: LayerGraph) -> list[fx.Node]:
    """A value, and it without each of the norms and changes of layout behind it."""
    values: list[fx.Node] = []
    while node is not None:
        values.append(node)
        is_norm = layer.op(node) is Op.NORM
        source = node.args[0] if is_norm and node.args else layer.passes_through(node)
        source = source if isinstance(source, fx.Node) else before_shift(node)
        node = source if isinstance(source, fx.Node) and is_tensor(source) else None
    return values


def contains_name(module: str, name: str) -> bool:
    return not module or f"{name}.".startswith(f"{module}.")


def leaves_stream(loop: Loop, seen: SampleForward) -> bool:
    """Whether what one iteration computes of tokens has other features: it is added to none."""
    # Seen in: no transformers model, but heads in a ModuleDict, as in Z-Image of diffusers
    last = seen.calls.get(loop.bodies[-1][-1])  # none for a list whose elements are called
    if last is None or len(loop.bodies) > 1:
        return False
    return len(last.input_shape) == len(last.output_shape) == 3 and last.input_shape[-1] != last.output_shape[-1]


def are_interleaved(loop: Loop, loops: Sequence[Loop], subs: Sequence[SubLayer], layer: LayerGraph) -> bool:
    """Whether sub-layers of an iteration run both before and behind those of another. `loops`: all
    of the caller.
    """
    bodies = [body for one in loops for body in one.bodies_in_caller()]
    for body, group in zip(bodies, sub_layers_by_body(bodies, subs, layer), strict=True):
        places = [subs.index(sub) for sub in group]
        if body in loop.bodies_in_caller() and places and max(places) - min(places) >= len(places):
            return True
    return False


def sub_layers_by_body(
    bodies: Sequence[Sequence[str]], subs: Sequence[SubLayer], layer: LayerGraph
) -> list[list[SubLayer]]:
    """The sub-layers of each iteration, by the modules that compute them. Modules that several
    iterations share have the sub-layers of the first.
    """
    groups: list[list[SubLayer]] = [[] for _ in bodies]
    first: dict[frozenset[str], int] = {}
    for sub in subs:
        weights = weights_of(sub, layer)
        inside = ([i for i, body in enumerate(bodies) if _in_body(name, body)] for name in weights)
        counts = Counter(own[0] for own in inside if own)  # of bodies in each other the inner one, which comes first
        if counts:
            i = max(counts, key=lambda i: (counts[i], i))  # of equal ones the last, which runs it
            if first.setdefault(weights, i) == i:
                groups[i].append(sub)
    return groups


def own_part(sub: SubLayer, body: Sequence[str], bodies: Sequence[Sequence[str]], layer: LayerGraph) -> SubLayer:
    """A sub-layer without the Linears of other iterations, and without a norm behind the loop or of
    another iteration.
    """
    # Seen in: no transformers model, but graph networks, whose global tokens earlier layers change
    others = [part for other in bodies if other is not body for part in other if part not in body]

    def is_own(linear: fx.Node) -> bool:
        product = layer.product(linear)
        name = str(linear.target) if product is None else product.weight.parameter
        return not any(contains_name(part, name) for part in others)

    roles, *heads = ({r: p for r, p in own.items() if is_own(p.node)} for own in (sub.projections, *sub.heads))
    norms = [norm for norm in sub.norms if any(contains_name(part, layer.norm_name(norm)) for part in body)]
    behind = sub.output_norm if sub.output_norm in norms else None
    linears = list(filter(is_own, sub.linears))
    hidden = sub.hidden if "down" in roles else None
    own = replace(sub, projections=roles, heads=heads, linears=linears, norms=norms, hidden=hidden)
    return replace(own, output_norm=behind)


def first_norms(
    body: Sequence[str], own: Sequence[SubLayer], others: Iterable[SubLayer], layer: LayerGraph
) -> list[fx.Node]:
    """The norms of an iteration that read the last sum of the one before, and stand in its code."""
    # Seen in: no transformers model, but SAINT, whose norms are around the residual sums
    known = {norm for sub in own for norm in sub.norms}
    norms = (norm for sub in others for norm in sub.norms if _in_body(layer.norm_name(norm), body))
    return [norm for norm in norms if norm not in known and own]


def weights_of(sub: SubLayer, layer: LayerGraph) -> frozenset[str]:
    """The modules and parameters with which a sub-layer computes, without norms."""
    weighted = {n for n in sub.body if is_weighted(n, layer) and not layer.is_norm(n)}
    without = [n for n in sub.body if n.op == "call_module"]  # of a mixer without weights
    return frozenset(str(n.target) for n in weighted or without)


def _in_body(name: str, body: Sequence[str]) -> bool:
    return any(contains_name(element, name) for element in body)
