"""Modules as sites: what `**` and globs select, whether or not a role was inferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import INPUT, OUTPUT, ActivationRef, ModuleInfo, Site, SiteTable, State, Steps, WeightRef
from peftc.forms.shapes import Tokens, Vector, Weight

NAMES = {"weight": "w", "bias": "b"}
TRANSPOSED = frozenset({"Conv1D"})  # transformers' Conv1D stores (in, out)


def module_site(module: ModuleInfo, table: SiteTable) -> Site:
    """The only site that the whole module computes, else one with the module's own tensors."""
    sites = [site for site in table.sites if site.module == module.name and not _is_part(site)]
    owners = [site for site in sites if any(state.weight for state in site.states.values())]
    if not owners and not module.parameters and sites:  # a container: its widest role
        fewest = min(len(site.steps) for site in sites)
        owners = [site for site in sites if len(site.steps) == fewest]
    if len(owners) == 1:
        return owners[0]
    shapes = ",".join(f"{name}{list(shape)}" for name, shape in module.parameters.items())
    path = f'"{module.name}"'
    states = {state.name: state for state in _states(module)}
    return Site(path, ((path, None),), module.name, module.name, f"{module.type}({shapes})", states)


def _is_part(site: Site) -> bool:
    """Whether the site is rows of a module (q of a fused qkv), or reads another module's weight."""
    refs = [state.weight for state in site.states.values() if state.weight]
    return any(ref.module != site.module or ref.is_partial for ref in refs)


def _states(module: ModuleInfo) -> Iterator[State]:
    for attribute, size in module.parameters.items():
        name = NAMES.get(attribute, attribute)
        transposed = module.type in TRANSPOSED and len(size) == 2
        ref = WeightRef(module.name, attribute, transposed=transposed)
        if len(size) == 2:
            d_out, d_in = reversed(size) if transposed else size
            yield State(name, Weight(d_out, d_in), weight=ref)
        elif len(size) == 1:
            yield State(name, Vector(size[0]), weight=ref)
    if module.input is not None:
        yield State("x", Tokens(module.input), ActivationRef(INPUT, key_path=module.input_path))
    if module.output is not None:
        yield State("h", Tokens(module.output), ActivationRef(OUTPUT, key_path=module.output_path))


def modules_below(paths: Iterable[Steps], table: SiteTable) -> list[ModuleInfo]:
    """The modules with parameters at and under each path, in model order.

    A sub-layer need not be one module (an ffn can be two Linears of the layer); its sites then tell
    what is below.
    """
    roots = {root for steps in dict.fromkeys(paths) for root in _roots(steps, table)}
    return [info for info in table.modules if info.parameters and not roots.isdisjoint(_prefixes(info.name))]


def _roots(steps: Steps, table: SiteTable) -> set[str]:
    sites = [site for site in table.sites if site.steps[: len(steps)] == steps]
    others = [site.module for site in table.sites if site.steps[: len(steps)] != steps]
    owners = {ref.module for site in sites for state in site.states.values() if (ref := state.weight)}
    layers = [site.module for site in sites if site.steps[-1][0] == "layer"]
    if layers and all(stack_steps([name for name, _ in site.steps]) >= len(steps) for site in sites):
        lists = {layer.rpartition(".")[0] for layer in layers}  # the lists of layers, then the stacks that hold them
        modules = lists | {name.rpartition(".")[0] for name in lists}
    else:
        modules = {site.module for site in sites if site.steps == steps}
    return owners | {name for name in modules if name and not any(name in _prefixes(other) for other in others)}


def _prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`"""
    return list(accumulate(name.split("."), lambda parent, part: f"{parent}.{part}"))
