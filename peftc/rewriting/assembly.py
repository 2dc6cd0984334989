"""The regions of a whole model, from edits at their sites: one a module, whatever names it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.observation.layer_candidates import repeated_blocks
from peftc.planning import ir
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.anchors import relative
from peftc.rewriting.edits import Region
from peftc.rewriting.legality.fast_paths import callers, has_fast_path, innermost_called, with_fast_paths_closed
from peftc.rewriting.legality.parameter_reads import own_parameters, parameter_reads, runs_parts
from peftc.rewriting.positions import position_regions
from peftc.rewriting.prompts import is_prompt, prompt_regions
from peftc.rewriting.regions import LayerRegions, module_region


def regions_of(placed: Iterable[ir.SiteEdit], anatomy: ModelStructure) -> list[Region]:
    """The regions that the edits touch, in model order."""
    layers = {n: k for s in anatomy.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    by_root: dict[str, list[ir.SiteEdit]] = {}
    found: list[Region] = []
    placed = tuple(placed)
    found += position_regions(placed, anatomy)
    for p in placed:
        if is_prompt(p):
            found += prompt_regions(p, anatomy)
            continue
        for use in p.uses():
            inside = next((n for n in (use.site.root, *callers(use.site.root)) if n in layers), None)
            called = inside is not None and layers[inside].calls(relative(use.site.root, inside))
            by_root.setdefault(inside if inside is not None and called else use.site.root, []).append(use)
    memory: dict[Any, Any] = {}
    for root, edits in by_root.items():
        if root in layers:
            found += LayerRegions(layers[root], root, memory, anatomy.shared).regions(edits)
        else:
            found.append(module_region(edits, innermost_called(root, anatomy.seen.calls, anatomy.model), anatomy.model))
    found = joined(found, anatomy)
    refuse_entered(found, anatomy)
    refuse_bypassed(found, anatomy)
    return with_fast_paths_closed(found, anatomy.model, anatomy.shared)


def refuse_entered(regions: list[Region], anatomy: ModelStructure) -> None:
    """Raises: P213 for a region into whose code another one is written, in a layer that shares it."""
    first_names = {name: group[0] for group in anatomy.shared for name in group}
    by_module = {region.module: region for region in regions}
    for region in regions if first_names else ():
        for inner in region.inline - {""}:
            name = f"{region.module}.{inner}".lstrip(".")
            other = by_module.get(first_names.get(name, name))
            if other is not None:
                edit, own = (one.site_edits[0] for one in (other, region))
                message = f"`{edit.edit}` changes `{name}`, which layers share, and `{own.edit}` is written into its code in one"
                help_ = "let both edits name the same layers"
                raise PeftcError(Diagnostic("P213", message, own.assigns[0].source.span, help=help_))


def refuse_bypassed(regions: list[Region], anatomy: ModelStructure) -> None:
    """Raises: P435 for a region whose parameters are read around the layers by code that may leave out its call.

    Outside of the layers a parameter may be used twice (of an embedding, by a head): there only code that asks for the mode is refused.
    """
    names = {name: group for group in anatomy.shared for name in group}
    layers = {layer for stack in anatomy.stacks for layer in stack.layers} | set(repeated_blocks(anatomy.model))
    for region in regions:
        for module in names.get(region.module, (region.module,)):
            entered = [module, *(f"{module}.{name}" for name in region.inline if name)]
            parameters = [n for e in entered for n in own_parameters(anatomy.model.get_submodule(e), e)]
            inside = not layers.isdisjoint((module, *callers(module)))
            for name in callers(module):
                around = anatomy.model.get_submodule(name)
                if has_fast_path(type(around)):
                    continue
                reads = parameter_reads(around, [relative(parameter, name) for parameter in parameters])
                within = not layers.isdisjoint((name, *callers(name)))
                parts = inside and not within and runs_parts(around, relative(module, name))
                if parts or any(read.asks or (inside and read.told) for read in reads):
                    raise PeftcError(bypass(region, module, name or type(around).__name__))


def bypass(region: Region, module: str, around: str) -> Diagnostic:
    return Diagnostic(
        "P435",
        f"the code of `{around}` may read parameters of `{module}` itself",
        region.site_edits[0].assigns[0].source.span if region.site_edits else None,
        notes=(f"it may compute with them in the place of calling `{module}`, and the edit would not act",),
        help="call the module in all cases, or move that code into the layer",
    )


def joined(regions: list[Region], anatomy: ModelStructure) -> list[Region]:
    """One region a module: a module can be reached by its place in a layer and by its name, and by several names."""
    first_names = {name: group[0] for group in anatomy.shared for name in group}
    found: dict[str, Region] = {}
    for region in regions:
        shared = region.module in first_names
        region.module = first_names.get(region.module, region.module)
        if region.module in found:
            first = found[region.module]
            there = {(e.edit, p.owner_path) for e, p in zip(first.edits, first.site_edits, strict=True) if shared}
            pairs = enumerate(zip(region.edits, region.site_edits, strict=True))
            new = [i for i, (e, p) in pairs if (e.edit, p.owner_path) not in there]
            first.edits += [region.edits[i] for i in new]
            first.site_edits += [region.site_edits[i] for i in new]
            first.inline |= region.inline
            first.serves += region.serves
        else:
            found[region.module] = region
    return list(found.values())
