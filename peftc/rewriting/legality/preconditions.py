"""Checks before a region is edited: its class's code runs, gradients are on, weights are there."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch
from torch import fx, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.model_line import definition_line
from peftc.modules.instance_forward import FORWARD, instance_forward
from peftc.modules.offload import HOOK, loads_submodules, offloaded_parameters, only_moves_arguments
from peftc.modules.packed import is_unpackable, packed_shape, unknown_packing
from peftc.modules.walk import submodule
from peftc.rewriting.edits import Region
from peftc.rewriting.legality.bypasses import parents
from peftc.rewriting.legality.call_hooks import bypass_error, bypassed_hook
from peftc.tracing.operations import enter_context, exit_context
from peftc.tracing.patches import is_gradient_context

_CALLERS = frozenset({FORWARD, HOOK})  # attributes that run something around a module's code


def check_forwards(region: Region, modules: Mapping[str, nn.Module], checked: set[str]) -> None:
    """Checks a region's module, the modules that are inlined in it, and its parents.

    Args: `modules`: of the model, by name. `checked`: the parents that need no further check, of
    all regions.

    Raises: P424 (an instance's `forward` hides the class's), P426 (hooks), P427 (script, export),
    P437 (weights that cannot be unpacked).
    """
    module = modules[region.module]
    for ref in (state.weight for edit in region.edits for state in edit.states.values()):
        if ref is not None and ref.attribute == "weight":
            check_unpackable(f"{region.module}.{ref.module}".strip("."), submodule(module, ref.module))
    check_forward(region.module, module)
    for inner in sorted(region.inline - {""}):
        name, entered = f"{region.module}.{inner}".lstrip("."), submodule(module, inner)
        check_forward(name, entered)
        forward = instance_forward(entered)
        if forward is not None and forward.hooked and not only_moves_arguments(entered):
            reason = "which would not run: the edit changes code inside the module"
            message = f"`{name}` has a hook around its `forward`, {reason}"
            help_ = "edit a state at the boundary of this module, or remove the hook before compiling"
            raise PeftcError(Diagnostic("P426", message, help=help_))
        if (hook := bypassed_hook(entered)) is not None:
            raise PeftcError(bypass_error(name, hook))
    check_parents(region.module, modules, checked)


def check_parents(module: str, modules: Mapping[str, nn.Module], checked: set[str]) -> None:
    """Checks a module and those around it, as `check_forwards`."""
    for name in chain((module,), parents(module)):
        if name in checked:
            break  # and so are its parents
        checked.add(name)
        outer = modules[name]
        if not vars(outer).keys() & _CALLERS:
            continue
        forward = instance_forward(outer)
        if forward is not None and forward.function is None and not forward.wraps:
            raise PeftcError(hidden_forward(name, outer))
        if loads_submodules(outer):
            reason = "from a table of names, which has none for the parameters of edits"
            message = f"accelerate loads all parameters in `{name or 'the model'}` {reason}"
            raise PeftcError(Diagnostic("P426", message, help="dispatch the model without `preload_module_classes`"))


def check_forward(name: str, module: nn.Module) -> None:
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        message = f"`{name}` is a {type(module).__name__}, whose code is not that of its class"
        raise PeftcError(Diagnostic("P427", message, help="edit the model before it is scripted or exported"))
    forward = instance_forward(module)
    if forward is not None and forward.function is None:
        raise PeftcError(hidden_forward(name, module))


def hidden_forward(name: str, module: nn.Module) -> Diagnostic:
    message = f"`{name or type(module).__name__}` has a `forward` in its instance whose code cannot be edited"
    line = definition_line(vars(module).get(FORWARD))
    notes = ("an edit of the class's code might never run", *(() if line is None else (f"what runs is at {line}",)))
    notes += (f"modules outside of `{name}` can be edited",) if name else ()
    help_ = "assign it as a method, `module.forward = types.MethodType(function, module)`, or in the class"
    return Diagnostic("P424", message, notes=notes, help=help_)


def check_unpackable(name: str, module: nn.Module) -> None:
    """Raises: P437 for a packed weight that nothing but the code of its class reads."""
    if packed_shape(module) is not None and not is_unpackable(vars(module)["_parameters"]["weight"]):
        raise PeftcError(unknown_packing(f"{name}.weight".lstrip("."), module))


def check_loaded(name: str, module: nn.Module) -> None:
    """Raises: P527 for meta parameters that are not offloaded, in a model that has weights."""
    offloaded = offloaded_parameters(module)
    missing = [f"{name}.{n}".lstrip(".") for n, p in module.named_parameters() if p.is_meta and n not in offloaded]
    if missing:
        raise PeftcError(missing_values(missing, "the model is loaded in part: its other parameters have values"))


def missing_values(names: Collection[str], reason: str) -> Diagnostic:
    """P527: tensors of the base that have shapes only."""
    first = f"`{next(iter(names))}`"
    subject = f"{first} and {len(names) - 1} more have" if len(names) > 1 else f"{first} has"
    help_ = "load the weights of the model first; planning needs none"
    return Diagnostic("P527", f"{subject} no values, only a shape", notes=(reason,), help=help_)


def check_gradients(written: Mapping[str, Sequence[fx.Node]], graph: fx.Graph) -> None:
    """Raises: P416 if all nodes of a state run without gradients. `written`: nodes by state."""
    without = nodes_without_gradients(graph)
    for name, nodes in written.items():
        if nodes and without.issuperset(nodes):
            message = f"the model computes `{name}` without gradients, so no parameter of the edit would be trained"
            note = f"`{nodes[0].target}` is in a `with torch.no_grad()` block of the model's own code"
            raise PeftcError(Diagnostic("P416", message, notes=(note,), help="edit a state outside of that block"))


def nodes_without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose innermost gradient context, such as `no_grad`, turns gradients off."""
    blocks: list[bool] = []
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is enter_context and is_gradient_context(node):
            context, *arguments = node.args
            mode = arguments[0] if arguments else node.kwargs.get("mode", True)
            blocks.append(context is torch.no_grad or (context is torch.set_grad_enabled and mode is False))
        elif node.target is exit_context and isinstance(begin := node.args[0], fx.Node) and is_gradient_context(begin):
            blocks.pop()
        elif blocks and blocks[-1]:
            nodes.add(node)
    return nodes
