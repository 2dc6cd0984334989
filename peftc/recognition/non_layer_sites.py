"""Sites outside the layers, every module of a model, and those that could not be read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from peftc.addressing.sites import (
    INPUT,
    OUTPUT,
    ActivationRef,
    ModuleInfo,
    Site,
    Slice,
    State,
    UntracedModule,
    WeightRef,
)
from peftc.forms import shapes
from peftc.observation.layer_candidates import containing_list
from peftc.observation.sample_forward import ModuleCall
from peftc.recognition.graph.operations import is_norm_module
from peftc.recognition.layers import ModelStructure, Stack, example_width
from peftc.semantics.vocabulary import FROZEN_MODULES

Steps = tuple[tuple[str, int | None], ...]


def path_of(steps: Steps) -> str:
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def weight_states(name: str, module: nn.Module, rows: Slice | None = None) -> dict[str, State]:
    """`w` and `b` of a leaf module, as nn.Linear would store them."""
    found: dict[str, State] = {}
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2:
        transposed = isinstance(module, Conv1D)  # stored (in, out)
        d_out, d_in = weight.shape[::-1] if transposed else weight.shape
        d_out = rows.width if rows else d_out
        found["w"] = State("w", shapes.Weight(d_out, d_in), weight=WeightRef(name, "weight", rows, transposed))
    elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
        found["w"] = State("w", shapes.Vector(weight.shape[0]), weight=WeightRef(name, "weight"))
    if isinstance(bias, nn.Parameter) and bias.ndim == 1:
        width = rows.width if rows else bias.shape[0]
        found["b"] = State("b", shapes.Vector(width), weight=WeightRef(name, "bias", rows))
    return found


def outside(anatomy: ModelStructure) -> list[str]:
    """Modules called outside every layer, in the order of their calls."""
    layers = {n for s in anatomy.stacks for n in s.layers}
    return [n for n in anatomy.seen.calls if layers.isdisjoint(enclosing(n))]


def enclosing(name: str) -> Iterator[str]:
    """The dotted names of a module and of all that contain it, but the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def stack_of(name: str, anatomy: ModelStructure) -> str | None:
    """The stack whose own modules `name` belongs to, by the longest shared path."""
    if len(anatomy.stacks) == 1:
        return anatomy.stacks[0].name
    around = [s for s in anatomy.stacks if (parent := holder(s)) and name.startswith(f"{parent}.")]
    return max(around, key=lambda s: len(holder(s))).name if around else None


def holder(stack: Stack) -> str:
    """The module that holds a stack's list of layers."""
    return stack.path.rpartition(".")[0]


def module_site(name: str, steps: Steps, anatomy: ModelStructure, group: str = "") -> Site:
    """A site that is one whole module; its graph is the module's own."""
    module = anatomy.model.get_submodule(name)
    states = weight_states(name, module)
    call = anatomy.seen.calls.get(name, ModuleCall())
    for state, node, shape, path in (
        ("x", INPUT, call.input_shape, call.input_path),
        ("h", OUTPUT, call.output_shape, call.output_path),
    ):
        if shape and (state == "h" or not isinstance(module, nn.Embedding)):
            states[state] = State(state, shapes.Tokens(shape[-1]), ActivationRef(node, key_path=path))
    own = {steps[-1][0]: name} if steps[-1][0] in FROZEN_MODULES and callable_on_one(module) else {}
    return Site(path_of(steps), steps, name, name, type(module).__name__, states, own, group)


def callable_on_one(module: nn.Module) -> bool:
    """Whether the forward of a module takes one value and nothing else."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def qualified(stack: str | None, steps: Steps) -> Steps:
    """`embed` of `text.decoder` is `text.decoder.embed`."""
    return (*((name, None) for name in stack.split(".")), *steps) if stack else steps


def embeddings(anatomy: ModelStructure) -> Iterator[Site]:
    """Token embeddings: the embeddings outside layers as tall as the model's own input embedding."""
    getter = getattr(anatomy.model, "get_input_embeddings", None)
    try:
        own = getter() if getter else None
    except NotImplementedError:
        own = None
    if not isinstance(own, nn.Embedding):
        return
    names = [name for name in outside(anatomy) if alike(anatomy.model.get_submodule(name), own)]
    for name, stack in embedded_stacks(names, own, anatomy).items():
        yield module_site(name, qualified(stack, (("embed", None),)), anatomy, stack or "")


def alike(module: nn.Module, own: nn.Embedding) -> bool:
    """Whether a module is an embedding of the size of another one."""
    return isinstance(module, nn.Embedding) and module.weight.shape == own.weight.shape


def embedded_stacks(names: Sequence[str], own: nn.Embedding, anatomy: ModelStructure) -> dict[str, str | None]:
    """The stacks of token embeddings.

    Of several without one, each is of the stack that is nearest. Of several in one stack, one of which is the model's own, the others
    embed something else that happens to have as many values.
    """
    # Seen in pairs of an encoder and a decoder that were trained apart, and where shapes of characters or proteins are embedded, too.
    stacks = {name: stack_of(name, anatomy) for name in names}
    if list(stacks.values()).count(None) > 1:
        stacks = {name: stack or nearest_stack(name, anatomy) for name, stack in stacks.items()}
    first = next((stack for name, stack in stacks.items() if anatomy.model.get_submodule(name) is own), "")
    return {n: s for n, s in stacks.items() if not first or s != first or anatomy.model.get_submodule(n) is own}


def nearest_stack(name: str, anatomy: ModelStructure) -> str | None:
    """The stack whose layers' path has the most steps in common with a module's; None for several."""
    around = [*enclosing(name)]
    common = {s.name: sum(parent in around for parent in enclosing(s.path)) for s in anatomy.stacks}
    most = [stack for stack, count in common.items() if count == max(common.values())]
    return most[0] if len(most) == 1 else None


def final_norms(anatomy: ModelStructure) -> Iterator[Site]:
    """The norms of a stack that run after its last layer, before the head."""
    found: dict[str, list[str]] = {}
    for name in outside(anatomy):
        if is_norm_module(anatomy.model.get_submodule(name)):
            stack = ended_by(name, anatomy)
            found.setdefault(stack.name if stack is not None else "", []).append(name)
    for stack in anatomy.stacks:
        names = found.get(stack.name, [])
        for i, name in enumerate(names):
            index = i if len(names) > 1 else None
            yield module_site(name, qualified(stack.name, (("norm", index),)), anatomy, stack.name)


def ended_by(norm: str, anatomy: ModelStructure) -> Stack | None:
    """The stack that has run before a norm and whose module holds it; of several the innermost, and of these the last."""
    order = {n: i for i, n in enumerate(anatomy.seen.calls)}
    width = (anatomy.seen.calls[norm].input_shape or (0,))[-1]
    ended = [
        (len(holder(s)), order[s.layers[-1]], s)
        for s in anatomy.stacks
        if order[s.layers[-1]] < order[norm]
        and norm.startswith(f"{holder(s)}.".lstrip("."))
        and width == example_width(s.kinds[-1])
    ]
    return max(ended, key=lambda found: found[:2])[2] if ended else None


def heads(anatomy: ModelStructure) -> Iterator[Site]:
    """The model's output Linear: its output embeddings, else the last Linear that runs."""
    model, order = anatomy.model, list(anatomy.seen.calls)
    getter = getattr(model, "get_output_embeddings", None)
    own = getter() if getter else None
    names = [n for n in outside(anatomy) if n and model.get_submodule(n) is own] if own is not None else []
    if not names and anatomy.stacks:
        last = max(order.index(s.layers[-1]) for s in anatomy.stacks)
        names = [
            n for n in outside(anatomy) if order.index(n) > last and isinstance(model.get_submodule(n), nn.Linear)
        ][-1:]
    for name in names:
        yield module_site(name, (("head", None),), anatomy)


def module_infos(anatomy: ModelStructure) -> tuple[ModuleInfo, ...]:
    """Every module of the model with the parameters that are its own; one that is used under several names once for each."""
    seen, shared = anatomy.seen, {name for group in anatomy.shared for name in group}
    first = {name for name, _ in anatomy.model.named_modules()}

    def width(call: ModuleCall, shape: tuple[int, ...]) -> int | None:
        return shape[-1] if call.count == 1 and len(shape) in (2, 3) else None

    called = {id(anatomy.model.get_submodule(name)) for name in seen.calls}  # under whichever of its names
    found: list[ModuleInfo] = []
    for name, module in anatomy.model.named_modules(remove_duplicate=not shared):
        if name not in first and name not in shared:
            continue
        own = {k: tuple(p.shape) for k, p in module.named_parameters(recurse=False)}
        call = seen.calls.get(name, ModuleCall())
        entry = None if isinstance(module, nn.Embedding) else width(call, call.input_shape)
        found.append(
            ModuleInfo(
                name,
                type(module).__name__,
                own,
                entry,
                width(call, call.output_shape),
                id(module) in called,
                call.input_path,
                call.output_path,
            )
        )
    return tuple(found)


def untraced_modules(anatomy: ModelStructure) -> tuple[UntracedModule, ...]:
    """What of each layer, and which layers, could not be followed."""
    found: list[UntracedModule] = []
    for stack in anatomy.stacks:
        for i, (name, kind) in enumerate(zip(stack.layers, stack.kinds, strict=True)):
            for part in kind.untraced:
                module = f"{name}.{part.module}".rstrip(".")
                made = type(anatomy.model.get_submodule(module)).__name__
                steps = qualified(stack.name, (("layer", i),))
                found.append(UntracedModule(module, made, part.reason, steps, part.hides))
    for name, reason in anatomy.untraced.items():
        made = type(anatomy.model.get_submodule(name)).__name__
        around = next((s for s in anatomy.stacks if same_list(name, s, anatomy.model)), None)
        steps = qualified(around.name, ()) if around is not None else ()
        found.append(UntracedModule(name, made, reason, steps, frozenset({"layer"})))
    return tuple(found)


def same_list(layer: str, stack: Stack, model: nn.Module) -> bool:
    """Whether a layer is in the list, or one of the lists, of a stack."""
    return containing_list(model, layer) in {containing_list(model, name) for name in stack.layers}
