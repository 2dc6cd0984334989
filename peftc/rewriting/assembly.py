"""The regions of a whole model for a plan's site edits, one for each module."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from peftc.addressing.sites import TABLE_IDS, Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.walk import submodule
from peftc.planning import ir
from peftc.planning.on_table import is_prompt, needs_graphs
from peftc.planning.representatives import SiteEdits
from peftc.recognition.layer_types import LayerType
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.anchors import contains, relative
from peftc.rewriting.edits import Region, used_states
from peftc.rewriting.legality.bypasses import (
    disable_fast_paths,
    has_fast_path,
    innermost_called,
    may_run_children,
    own_parameters,
    parameter_reads,
    parents,
)
from peftc.rewriting.module_regions import module_region
from peftc.rewriting.prompts import offset_regions, position_regions, prompt_regions
from peftc.rewriting.region_list import RegionBlock, RegionList, RegionTemplate
from peftc.rewriting.regions import LayerRegions


def regions_of(site_edits: Iterable[ir.SiteEdit], structure: ModelStructure) -> RegionList:
    """The regions that the edits touch. Raises: P213, P435, and the codes of single regions."""
    if isinstance(site_edits, SiteEdits) and (blocks := alike_regions(site_edits, structure)) is not None:
        return RegionList(blocks)
    site_edits = tuple(site_edits)
    regions = position_regions(site_edits, structure) + offset_regions(site_edits, structure)
    for p in filter(is_prompt, site_edits):
        regions += prompt_regions(p, structure)
    regions += chain(*regions_by_root(site_edits, structure).values())
    regions = merge_by_module(regions, structure)
    check_shared_modules(regions, structure)
    check_calls_of_regions(regions)
    check_order(site_edits)
    check_parameter_reads(regions, structure)
    return RegionList.of(disable_fast_paths(regions, structure.model, structure.shared))


def alike_regions(site_edits: SiteEdits, structure: ModelStructure) -> list[RegionBlock] | None:
    """The regions, once for layers that are alike; None where more than the layer decides."""
    if structure.shared or needs_graphs(site_edits) or (groups := site_edits.groups) is None:
        return None
    memory: dict[Any, Any] = {}
    every: list[Region] = []
    blocks: dict[tuple[int, int], RegionBlock] = {}  # by the first edit of their root, and the block
    for number, group in enumerate(groups):
        if len({layer and layer.module.rpartition(".")[0] for layer in group.layers}) > 1:
            return None  # lists whose code may differ
        by_root = regions_by_root(group.site_edits, structure, memory)
        merged = [region for regions in by_root.values() for region in regions]
        layer, names = group.layers[0], [region.module for region in merged]
        if len(names) > len({*names}) or not all(layer is None or contains(layer.module, name) for name in names):
            return None
        every += merged
        by_statement: dict[int, list[Region]] = {}
        for (first, _), regions in by_root.items():
            by_statement.setdefault(group.statements[first], []).extend(regions)
        for statement, regions in by_statement.items():
            template = RegionTemplate(tuple(regions), number, layer)
            pairs = zip(group.blocks, group.layers, strict=True)
            blocks |= {(statement, block): RegionBlock(template, one) for block, one in pairs}
    around = {name for region in every for name in parents(region.module)}
    if len({region.module for region in every}) < len(every) or any(
        has_fast_path(type(submodule(structure.model, name))) for name in around
    ):
        return None
    check_calls_of_regions(every)
    for group in groups:
        check_order(group.site_edits)
    check_parameter_reads(every, structure)
    return [blocks[key] for key in sorted(blocks)]


def regions_by_root(
    site_edits: Sequence[ir.SiteEdit], structure: ModelStructure, memory: dict[Any, Any] | None = None
) -> dict[tuple[int, str], list[Region]]:
    """The regions of edits, but of prompts, by the layer or module whose graph has their states;
    and by the index of its first edit.
    """
    layers = {n: k for s in structure.stacks for n, k in zip(s.roots, s.kinds, strict=True)}
    kinds = {k.key: k for s in structure.stacks for k in s.kinds}
    first: dict[str, int] = {}
    by_root: dict[str, list[ir.SiteEdit]] = {}
    parts = {use.site.module for p in site_edits for use in p.uses() if use.site.root != use.site.module}
    for number, p in enumerate(site_edits):
        for use in p.uses() if not is_prompt(p) else ():
            root = use.site.root
            layer = next((n for n in (root, *parents(root)) if n in layers), None)
            if layer is not None and layers[layer].calls(relative(root, layer)):
                is_apart = root not in parts and has_own_region(use.site, layers[layer], layer, structure)
                root = root if is_apart or use.site.is_of_every_call else layer
            first.setdefault(root, number)
            if not any(is_same_use(use, other) for other in by_root.setdefault(root, [])):
                by_root[root].append(use)
    memory = {} if memory is None else memory
    regions: dict[tuple[int, str], list[Region]] = {}
    for root, edits in by_root.items():
        if root in layers:
            own = LayerRegions(layers[root], root, memory, structure.shared, kinds).regions(edits)
        else:
            is_called = any(use.site.is_of_every_call for use in edits)
            module = root if is_called else innermost_called(root, structure.seen.calls, structure.model)
            own = [module_region(edits, module, structure.model)]
        regions[first[root], root] = own
    return regions


def has_own_region(site: Site, kind: LayerType, layer: str, structure: ModelStructure) -> bool:
    """Whether an edit of a module, named in a layer, is one of the module's own forward alone.

    So it is for every call, of which the layer's graph may have several or, where code could not
    be traced, none; and for a table whose ids the forward computes. Not where the code around it
    reads its parameters: that code is part of the region.
    """
    module = site.root
    if module != site.module or module in layers_of(structure) or site.parts or module not in structure.seen.calls:
        return False
    if any(state.activation is not None and state.activation.node == TABLE_IDS for state in site.states.values()):
        return True
    name = relative(module, layer)
    if sum(call.name == name for call in kind.traced.calls) > 1:
        return True
    is_leaf = next(submodule(structure.model, module).children(), None) is None
    return is_leaf and not LayerRegions(kind, layer, {}).has_external_reads(name)


def is_same_use(use: ir.SiteEdit, other: ir.SiteEdit) -> bool:
    """Whether two sites of an edit are one module, which its layer calls in several places."""
    same = (use.edit, use.owner_path, use.site.module) == (other.edit, other.owner_path, other.site.module)
    return same and use.site.is_of_every_call


def layers_of(structure: ModelStructure) -> set[str]:
    return {layer for stack in structure.stacks for layer in stack.modules}


def check_calls_of_regions(regions: list[Region]) -> None:
    """Raises: P216 for an edited module whose code another region enters, call by call."""
    for outer in (region for region in regions if any(region.inline)):
        entered = {f"{outer.module}.{name}".lstrip(".") for name in outer.inline if name}
        for inner in regions:
            if inner.module in entered and inner.site_edits and outer.site_edits:
                edit, other = inner.site_edits[0], outer.site_edits[0]
                reason = f"and `{other.edit}` the code inside one"
                message = f"`{edit.edit}` changes every call of `{inner.module}`, {reason}"
                span, help_ = other.assigns[0].source.span, "let one of them name a state outside of this module"
                raise PeftcError(Diagnostic("P216", message, span, help=help_))


def check_order(site_edits: Sequence[ir.SiteEdit]) -> None:
    """Raises: P216 for edits of what `down` reads, in each of its calls and at one of them: the
    first would act last, and edits of one state act from inner sites to outer ones.
    """
    inner = {p.site.path.removesuffix(".hidden"): p for p in site_edits if p.site.path.endswith(".hidden")}
    for p in site_edits:
        hidden = inner.get(p.site.path)
        if hidden is not None and hidden.site.is_of_every_call and "z" in used_states(p):
            message = f"`{hidden.edit}` acts at every call of `{hidden.site.module}`, and `{p.edit}` at one"
            help_ = "let both name `hidden`, or neither"
            raise PeftcError(Diagnostic("P216", message, p.assigns[0].source.span, help=help_))


def merge_by_module(regions: list[Region], structure: ModelStructure) -> list[Region]:
    """One region for each module, which may have several names."""
    first_names = {name: group[0] for group in structure.shared for name in group}
    merged: dict[str, Region] = {}
    for region in regions:
        is_shared = region.module in first_names
        region.module = first_names.get(region.module, region.module)
        first = merged.setdefault(region.module, region)
        if first is region:
            continue
        present = {(e.edit, p.owner_path) for e, p in zip(first.edits, first.site_edits, strict=True) if is_shared}
        for edit, site_edit in zip(region.edits, region.site_edits, strict=True):
            if (edit.edit, site_edit.owner_path) not in present:
                first.edits.append(edit)
                first.site_edits.append(site_edit)
        first.inline |= region.inline
        first.position_sites += region.position_sites
    return list(merged.values())


def check_shared_modules(regions: list[Region], structure: ModelStructure) -> None:
    """Raises: P213 for an edited module that layers share and that one of their regions enters."""
    first_names = {name: group[0] for group in structure.shared for name in group}
    by_module = {region.module: region for region in regions}
    for region in regions if first_names else ():
        for inner in region.inline - {""}:
            name = f"{region.module}.{inner}".lstrip(".")
            shared = by_module.get(first_names.get(name, name))
            if shared is not None:
                edit, outer = shared.site_edits[0], region.site_edits[0]
                reason = f"and `{outer.edit}` needs its code inside one of them"
                message = f"`{edit.edit}` changes `{name}`, which layers share, {reason}"
                help_ = "let both edits name the same layers"
                raise PeftcError(Diagnostic("P213", message, outer.assigns[0].source.span, help=help_))


def place_in_kind(region: Region, kinds: Mapping[str, object]) -> object | None:
    """What regions have in common that are the same part of layers of one kind; None elsewhere."""
    for layer in (region.module, *parents(region.module)):
        if layer in kinds:
            return kinds[layer], relative(region.module, layer), region.inline
    return None


def check_parameter_reads(regions: list[Region], structure: ModelStructure) -> None:
    """Raises: P435 if code around the layers may read a region's parameters and not call it.

    Outside the layers a parameter may have two uses, such as embedding and head, so only reads in
    code that depends on the mode are refused there.
    """
    names = {name: group for group in structure.shared for name in group}
    layers = layers_of(structure) | structure.repeated_blocks

    def in_layer(module: str) -> bool:
        return not layers.isdisjoint((module, *parents(module)))

    kinds = {n: (id(k), n.rpartition(".")[0]) for s in structure.stacks for n, k in zip(s.layers, s.kinds, strict=True)}
    checked = set[object]()  # in one layer of each type in a list

    for region in regions:
        if region.module not in names and (key := place_in_kind(region, kinds)) is not None:
            if key in checked:
                continue
            checked.add(key)
        for module in names.get(region.module, (region.module,)):
            entered = [module, *(f"{module}.{name}".lstrip(".") for name in region.inline if name)]
            parameters = [n for e in entered for n in own_parameters(submodule(structure.model, e), e)]
            is_inside = in_layer(module)
            for name in parents(module):
                outer = submodule(structure.model, name)
                if has_fast_path(type(outer)):
                    continue
                reads = parameter_reads(outer, [relative(parameter, name) for parameter in parameters])
                runs = is_inside and not in_layer(name) and may_run_children(outer, relative(module, name))
                bypasses = [read for read in reads if read.mode_dependent or (is_inside and read.names_owner)]
                if runs or bypasses:
                    message = f"the code of `{name or type(outer).__name__}` may read parameters of `{module}` itself"
                    span = region.site_edits[0].assigns[0].source.span if region.site_edits else None
                    note = f"it may compute with them instead of calling `{module}`, and the edit would have no effect"
                    help_ = "call the module in all cases, or move that code into the layer"
                    lines = [f"at {read.line}" for read in bypasses if read.line is not None][:1]
                    raise PeftcError(Diagnostic("P435", message, span, notes=(note, *lines), help=help_))
