"""Sites outside the layers, every module of a model, and those that could not be traced."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from operator import attrgetter

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrize import is_parametrized

from peftc.addressing.module_infos import ModuleBlock, ModuleInfos, ModuleTemplate
from peftc.addressing.renaming import with_changes
from peftc.addressing.sites import (
    INPUT,
    OUTPUT,
    ActivationRef,
    MatrixLayout,
    ModuleInfo,
    Site,
    Slice,
    State,
    Steps,
    UntracedModule,
    WeightRef,
)
from peftc.dataflow.layer_graph import is_pointwise
from peftc.dataflow.operations import is_norm_module
from peftc.diagnostics.model_line import ModelLine
from peftc.forms import shapes
from peftc.modules.memory import storage_id
from peftc.modules.walk import (
    Named,
    all_named_modules,
    has_aliases,
    named_modules,
    named_parameters,
    outline,
    outline_module,
    submodule,
)
from peftc.observation.sample_forward import ModuleCall
from peftc.recognition.layer_candidates import containing_list
from peftc.recognition.layer_types import LayerType, example_width
from peftc.recognition.layers import ModelStructure, Stack, last_call
from peftc.recognition.module_features import depends_on_numbers, module_features, stores_transposed
from peftc.syntax.vocabulary import FROZEN_MODULES

_NO_CALL = ModuleCall()
_facts = attrgetter("input_shape", "input_path", "output_shape", "output_path", "varies")


def path_of(steps: Steps) -> str:
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def weight_states(name: str, module: nn.Module, rows: Slice | None = None) -> dict[str, State]:
    """`w` and `b` of a leaf module, as nn.Linear would store them. A Linear may compute its weight
    from other parameters (weight norm): such a `w` can be named, and nothing can be written to it.
    """
    states: dict[str, State] = {}
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    is_stored = isinstance(weight, nn.Parameter) or isinstance(module, nn.Linear)
    if isinstance(weight, torch.Tensor) and is_stored and weight.ndim == 2:
        transposed = stores_transposed(module)
        d_out, d_in = weight.shape[::-1] if transposed else weight.shape
        d_out = rows.width if rows else d_out
        states["w"] = State("w", shapes.Weight(d_out, d_in), weight=WeightRef(name, "weight", rows, transposed))
    elif isinstance(weight, nn.Parameter) and is_pointwise(module):
        d_out, d_in = rows.width if rows else weight.shape[0], weight.shape[1]
        layout = MatrixLayout(tuple(range(weight.ndim)), 1)
        states["w"] = State("w", shapes.Weight(d_out, d_in), weight=WeightRef(name, "weight", rows, layout=layout))
    elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
        states["w"] = State("w", shapes.Vector(weight.shape[0]), weight=WeightRef(name, "weight"))
    if isinstance(bias, nn.Parameter) and bias.ndim == 1:
        width = rows.width if rows else bias.shape[0]
        states["b"] = State("b", shapes.Vector(width), weight=WeightRef(name, "bias", rows))
    return states


def _outside_layers(structure: ModelStructure) -> list[str]:
    """Modules called outside every layer, in the order of their calls."""
    return [n for n in structure.outside_layers if not _computes_weight(n, structure.model)]


def _computes_weight(name: str, model: nn.Module) -> bool:
    """Whether a module is part of a parametrisation: what it reads is no hidden state."""
    # Seen in: no transformers model, but nViT, whose last norm would be that of a weight
    owner, separator, _ = name.partition(".parametrizations.")
    return bool(separator) and is_parametrized(submodule(model, owner))


def enclosing(name: str) -> Iterator[str]:
    """The dotted names of a module and of all that contain it, but the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def stack_of(name: str, structure: ModelStructure) -> str | None:
    """The stack whose own modules `name` belongs to, by the longest shared path."""
    if len(structure.stacks) == 1:
        return structure.stacks[0].name
    stacks = [s for s in structure.stacks if (parent := _holder(s)) and name.startswith(f"{parent}.")]
    return max(stacks, key=lambda s: len(_holder(s))).name if stacks else None


def _holder(stack: Stack) -> str:
    """The module that holds a stack's list of layers."""
    return stack.path.rpartition(".")[0]


def _module_site(name: str, steps: Steps, structure: ModelStructure, group: str = "") -> Site:
    """A site that is one whole module; its graph is the module's own."""
    module = submodule(structure.model, name)
    states = weight_states(name, module)
    call = structure.seen.calls.get(name, _NO_CALL)
    if isinstance(module, nn.Embedding):
        x, _ = module_features(module, call, name in structure.seen.weight_products)
        if x.size is not None:
            states["x"] = State("x", shapes.Ids(x.size), ActivationRef(x.ids, key_path=call.input_path))
    elif call.input_shape:
        place = ActivationRef(INPUT, key_path=call.input_path)
        states["x"] = State("x", shapes.Tokens(call.input_shape[-1]), place)
    if call.output_shape:
        place = ActivationRef(OUTPUT, key_path=call.output_path)
        states["h"] = State("h", shapes.Tokens(call.output_shape[-1]), place)
    unary = len(inspect.signature(type(module).forward).parameters) == 2
    own = {steps[-1][0]: name} if steps[-1][0] in FROZEN_MODULES and unary else {}
    return Site(path_of(steps), steps, name, name, type(module).__name__, states, own, group)


def qualified(stack: str | None, steps: Steps) -> Steps:
    """`embed` of `text.decoder` is `text.decoder.embed`."""
    return (*((name, None) for name in stack.split(".")), *steps) if stack else steps


def embeddings(structure: ModelStructure) -> Iterator[Site]:
    """Token embeddings: those outside layers of the size of the model's own input embedding."""
    own = None
    with contextlib.suppress(NotImplementedError):
        own = getattr(structure.model, "get_input_embeddings", lambda: None)()
    if not isinstance(own, nn.Embedding):
        return
    modules = {name: submodule(structure.model, name) for name in _outside_layers(structure)}
    names = [n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.weight.shape == own.weight.shape]
    for name, stack in embedded_stacks(names, own, structure).items():
        yield _module_site(name, qualified(stack, (("embed", None),)), structure, stack or "")


def embedded_stacks(names: Sequence[str], own: nn.Embedding, structure: ModelStructure) -> dict[str, str | None]:
    """The stacks of token embeddings. Of several without one, each is of the nearest stack. Of
    several in one stack, those that are not the model's own embed something else.
    """
    # Seen in: nearly all
    stacks = {name: stack_of(name, structure) for name in names}
    if list(stacks.values()).count(None) > 1:
        stacks = {name: stack or nearest_stack(name, structure) for name, stack in stacks.items()}
    first = next((stack for name, stack in stacks.items() if submodule(structure.model, name) is own), "")
    return {n: s for n, s in stacks.items() if not first or s != first or submodule(structure.model, n) is own}


def nearest_stack(name: str, structure: ModelStructure) -> str | None:
    """The stack whose path has the most steps in common with a module's; None for several."""
    # Seen in: encoder-decoder, whose embeddings would have one path without it
    parents = [*enclosing(name)]
    common = {s.name: sum(parent in parents for parent in enclosing(s.path)) for s in structure.stacks}
    nearest = [stack for stack, count in common.items() if count == max(common.values())]
    return nearest[0] if len(nearest) == 1 else None


def final_norms(structure: ModelStructure) -> Iterator[Site]:
    """The norms of a stack that run after its last layer, before the head, and are in no block of
    several matrices: such a norm is a part of it.
    """
    norms = {stack.name: list[str]() for stack in structure.stacks}
    around = {
        parent
        for name in (*_head_names(structure), *(n for stack in structure.stacks for n in stack.modules))
        for parent in enclosing(name)
    }
    for name in _outside_layers(structure):
        stack = _stack_before(name, structure) if is_norm_module(submodule(structure.model, name)) else None
        if stack is not None and not any(_is_block(one, structure) for one in enclosing(name) if one not in around):
            norms[stack.name].append(name)
    for stack, names in norms.items():
        for i, name in enumerate(names):
            index = i if len(names) > 1 else None
            yield _module_site(name, qualified(stack, (("norm", index),)), structure, stack)


def _is_block(name: str, structure: ModelStructure) -> bool:
    # Seen in: no transformers model, but autoencoders, whose last blocks are no layers
    return sum(p.ndim >= 2 for p in submodule(structure.model, name).parameters()) > 1


def _stack_before(norm: str, structure: ModelStructure) -> Stack | None:
    """The stack that ran before a norm in its module; of several the innermost, last one."""
    order = {n: i for i, n in enumerate(structure.seen.calls)}
    width = (structure.seen.calls[norm].input_shape or (0,))[-1]
    last = {s.name: last_call(s.modules, structure.seen) for s in structure.stacks}
    stacks = [s for s in structure.stacks if last[s.name] < order[norm]]
    stacks = [
        s for s in stacks if norm.startswith(f"{_holder(s)}.".lstrip(".")) and width == example_width(s.kinds[-1])
    ]
    return max(stacks, key=lambda s: (len(_holder(s)), last[s.name]), default=None)


def heads(structure: ModelStructure) -> Iterator[Site]:
    """The model's output Linear: its output embeddings, else the last Linear that runs behind the
    layers, unless a convolution runs behind it.
    """
    for name in _head_names(structure):
        yield _module_site(name, (("head", None),), structure)


def _head_names(structure: ModelStructure) -> list[str]:
    # Seen in: U-Nets, whose last Linear is that of a block's time embedding
    model, order = structure.model, list(structure.seen.calls)
    own = getattr(model, "get_output_embeddings", lambda: None)()
    outside = [n for n in _outside_layers(structure) if n]
    names = [n for n in outside if submodule(model, n) is own]
    if not names and structure.stacks:
        last = max(last_call(s.modules, structure.seen) for s in structure.stacks)
        ends = [n for n in outside if order.index(n) > last and isinstance(submodule(model, n), (nn.Linear, _ConvNd))]
        names = [n for n in ends[-1:] if isinstance(submodule(model, n), nn.Linear)]
    return names


def module_infos(structure: ModelStructure, original: nn.Module | None = None) -> ModuleInfos:
    """Every module with its own parameters; one that is used under several names once for each.

    Args: `original`: the model whose skeleton the structure is of, if it is in memory.
    """
    closures = {} if original is None else _lines_in_closures(structure, original)
    layers = [(n, kind) for s in structure.stacks for n, kind in zip(s.roots, s.kinds, strict=True)]
    if not has_aliases(structure.model) and all(kind.is_module for _, kind in layers):
        modules = outline(structure.model)
        return ModuleInfos(_Infos(structure, frozenset(structure.seen.calls), closures).blocks(modules, dict(layers)))
    modules = all_named_modules(structure.model)
    called = {id(module) for name, module in modules if name in structure.seen.calls}  # under whichever of its names
    infos = _Infos(structure, {name for name, module in modules if id(module) in called}, closures)
    names = {name for name, _ in named_modules(structure.model)}.union(*structure.shared)
    every = (infos.info(name, module) for name, module in modules if name in names)
    return ModuleInfos.of(every, {name for stack in structure.stacks for name in stack.modules})


def _lines_in_closures(structure: ModelStructure, original: nn.Module) -> dict[str, ModelLine]:
    """Where functions that hold modules of the original compute with their parameters."""
    if not (lines := structure.seen.closure_lines):
        return {}
    names = ((name, lines.get(storage_id(p))) for name, p in original.named_parameters(remove_duplicate=False))
    return _in_all_layers({name: line for name, line in names if line is not None}, structure)


def _in_all_layers(lines: dict[str, ModelLine], structure: ModelStructure) -> dict[str, ModelLine]:
    """Where code computes with parameters of other modules. Of equal layers, one has run."""
    for stack in structure.stacks if lines else ():
        for kind in {id(kind): kind for kind in stack.kinds}.values():
            roots = [root for root, other in zip(stack.roots, stack.kinds, strict=True) if other is kind]
            own = {n[len(r) :]: line for n, line in lines.items() for r in roots[:1] if n.startswith(f"{r}.")}
            lines = {**{f"{root}{name}": line for root in roots for name, line in own.items()}, **lines}
    return lines


class _Infos:
    """Infos of modules. `called`: the names of those that are called. `closures`: where functions
    that hold a module compute with its parameters.
    """

    def __init__(self, structure: ModelStructure, called: Set[str], closures: Mapping[str, ModelLine]) -> None:
        self.calls, self.products, self.called = structure.seen.calls, structure.seen.weight_products, called
        self.lines, self.closures = _in_all_layers(structure.seen.parameter_lines, structure), closures
        self.transposed: dict[object, bool] = {}
        self.templates: dict[object, list[tuple[object, ModuleTemplate]]] = {}  # of layers
        self.by_number: dict[int, list[int]] = {}  # of each kind of layer, the modules that `depends_on_numbers`

    def info(self, name: str, module: nn.Module) -> ModuleInfo:
        own = vars(module)["_parameters"]
        several = named_parameters([("", module)]) if len(own) > 1 else own.items()
        parameters = {k: tuple(p.shape) for k, p in several if p is not None}
        call = self.calls.get(name, _NO_CALL)
        x, h = module_features(module, call, name in self.products)
        is_called, line = name in self.called, self.lines.get(f"{name}.weight")
        unknown = "" if line is None else f"no forward calls it: its weight is read at {line}"
        if (line := self.closures.get(f"{name}.weight")) is not None:
            unknown = f"a function or a container holds the module and calls it, at {line}: call it as `self.…` there"
        return ModuleInfo(
            name,
            type(module).__name__,
            parameters,
            x.size,
            h.size,
            is_called,
            call.input_path,
            call.output_path,
            x.is_map,
            h.is_map,
            x.kernel,
            x.ids,
            (x.unknown or h.unknown) if is_called else unknown,
            stores_transposed(module, self.transposed),
        )

    def blocks(self, modules: Named, kinds: dict[str, LayerType]) -> list[ModuleBlock]:
        """The modules of a model in which each has one name, and each layer is a module."""
        blocks: list[ModuleBlock] = []
        start = end = 0
        while end < len(modules):
            layer = modules[end][0]
            if not layer or layer not in kinds:
                end += 1
                continue
            if start < end:
                blocks.append(self.outside(modules[start:end]))
            start, end, inside = end, end + 1, f"{layer}."
            while end < len(modules) and modules[end][0].startswith(inside):
                end += 1
            blocks.append(ModuleBlock(self.template(modules[start:end], kinds[layer]), layer))
            start = end
        return [*blocks, self.outside(modules[start:])] if start < end else blocks

    def outside(self, modules: Named) -> ModuleBlock:
        return ModuleBlock(ModuleTemplate(tuple(self.info(*one) for one in modules)))

    def template(self, modules: Named, kind: LayerType) -> ModuleTemplate:
        """The modules of a layer: those of an earlier one of its kind, if what shows no structure
        is equal, too.
        """
        layer = modules[0][0]
        if id(kind) not in self.by_number:
            self.by_number[id(kind)] = [i for i, (_, m) in enumerate(modules) if depends_on_numbers(m)]
        others = tuple([self.relative_info(layer, *modules[i]) for i in self.by_number[id(kind)]])
        calls = map(self.calls.get, [name for name, _ in modules])
        key = id(kind), tuple([None if call is None else _facts(call) for call in calls])
        for infos, template in self.templates.setdefault(key, []):
            if infos == others:
                return template
        template = ModuleTemplate(tuple([self.relative_info(layer, *one) for one in modules]))
        self.templates[key].append((others, template))
        return template

    def relative_info(self, layer: str, name: str, module: nn.Module) -> ModuleInfo:
        return with_changes(self.info(name, module), name=name[len(layer) + 1 :])


def untraced_modules(structure: ModelStructure) -> tuple[UntracedModule, ...]:
    """The layers, and the modules in layers, that could not be traced."""

    def untraced(module: str, reason: str, steps: Steps, roles: frozenset[str]) -> UntracedModule:
        return UntracedModule(module, type(outline_module(structure.model, module)).__name__, reason, steps, roles)

    modules: list[UntracedModule] = []
    for stack in structure.stacks:
        for i, (name, kind) in enumerate(zip(stack.roots, stack.kinds, strict=True)):
            steps = qualified(stack.name, (("layer", i),))
            parts = [(f"{name}.{part.module}".strip("."), part) for part in kind.untraced]
            modules += [untraced(module, part.reason, steps, part.hides) for module, part in parts]
    for name, reason in structure.untraced.items():
        stack = next((s for s in structure.stacks if is_in_lists_of(name, s, structure.model)), None)
        steps = qualified(stack.name, ()) if stack is not None else ()
        modules.append(untraced(name, reason, steps, frozenset({"layer"})))
    return tuple(modules)


def is_in_lists_of(layer: str, stack: Stack, model: nn.Module) -> bool:
    """Whether a layer is in the list, or one of the lists, of a stack."""
    # Seen in: no transformers model; the stack of an untraced layer, for refusals
    return containing_list(model, layer) in {containing_list(model, name) for name in stack.layers}
