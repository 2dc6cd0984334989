"""Forms that act at the first or last tokens: the stack that takes the tokens provides their
positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning import ir
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.anchors import Anchor, contains
from peftc.rewriting.edits import Region, RegionEdit, RegionState
from peftc.rewriting.prompts import EMBEDS, innermost_with, is_prompt, prompt_regions

KIND = "positions"  # of the anchor
NAME = "<positions>"  # in place of an edit's name
SEQUENCE = "sequence"  # in a region's container, the record of positions that its forms read


def selects_positions(instance: ir.FormInstance) -> bool:
    return instance.form.picks(instance.form.fill(instance.args))


def prompt_and_position_errors(
    site_edits: Sequence[ir.SiteEdit], structure: ModelStructure
) -> Iterator[tuple[str, Diagnostic]]:
    """Errors of prompts (P418) and of position forms (P422), by name of the edit."""
    conflicts: dict[str, tuple[str, str]] = {}  # for each module, an edit of its input or result, and what it does
    for p in site_edits:
        if is_prompt(p):
            try:
                conflicts |= {r.module: (p.edit, "joins a prompt to them") for r in prompt_regions(p, structure)}
            except PeftcError as error:
                yield from ((p.edit, diagnostic) for diagnostic in error.diagnostics)
        elif any(p.site.states[assign.state].weight is None for assign in p.assigns):
            conflicts.setdefault(p.site.root, (p.edit, "changes the input or the result of the stack that counts them"))
    sources: dict[str, str] = {}  # of each shared form
    refused = set[str]()
    for p in site_edits:
        for instance in filter(selects_positions, p.instances):
            error = position_error(p, instance, structure, conflicts, sources)
            if error is not None and p.edit not in refused:
                refused.add(p.edit)
                span = next(t.source.span for t in p.terms() if isinstance(t, ir.FormCall) and t.instance is instance)
                yield p.edit, replace(error, span=span)


def position_error(
    p: ir.SiteEdit,
    instance: ir.FormInstance,
    structure: ModelStructure,
    conflicts: Mapping[str, tuple[str, str]],
    sources: dict[str, str],
) -> Diagnostic | None:
    """P422 where the positions at a site are unknown or come from several stacks."""
    module, help_ = position_source(p, structure), "leave out `first` and `last`"
    if module is None:
        message = f"the positions of the tokens at `{p.site.path}` are unknown"
        note = f"they are known in layers of a module that takes `{EMBEDS}`, but not for a context that is attended to"
        return Diagnostic("P422", message, notes=(note,), help=help_)
    if module in conflicts:
        edit, action = conflicts[module]
        message = f"`{p.edit}` counts the tokens at `{p.site.path}`, and `{edit}` {action}"
        return Diagnostic("P422", message, help=f"{help_}, or `{edit}`")
    if any(position_source(use, structure) != module for use in p.uses()):
        message = f"`{p.edit}` selects positions in a module that several stacks share, each with its own positions"
        return Diagnostic("P422", message, help=help_)
    if instance.owner is not None and sources.setdefault(instance.owner, module) != module:
        message = f"`{p.edit}` shares a form that selects positions between stacks, each with its own positions"
        return Diagnostic("P422", message, help="write an edit for each stack")
    return None


def position_regions(site_edits: Iterable[ir.SiteEdit], structure: ModelStructure) -> list[Region]:
    """The stacks around sites with such forms, once each."""
    regions: dict[str, Region] = {}
    for p in site_edits:
        if any(map(selects_positions, p.instances)):
            module = position_source(p, structure)
            assert module is not None, p.site.path  # else `prompt_and_position_errors` refuses the edit
            edit = RegionEdit(NAME, KIND, (), {KIND: RegionState(anchor=Anchor(KIND, ""))}, {}, ())
            region = Region(module, frozenset(), [edit], [replace(p, instances=())])
            regions.setdefault(module, region).position_sites.append((p.edit, p.site.path))
    return list(regions.values())


def position_source(site_edit: ir.SiteEdit, structure: ModelStructure) -> str | None:
    """The module that takes the tokens of a site's stack, and of no other stack."""
    site = site_edit.site
    names = [name for name, _ in site.steps]
    stack = next((s for s in structure.stacks if any(contains(layer, site.module) for layer in s.layers)), None)
    if stack is None or ("cross" in names and names[-1] in ("k", "v")):
        return None
    module = innermost_with((EMBEDS,), stack.layers[0], stack, structure)
    others = [s for s in structure.stacks if s is not stack]
    return None if module is None or any(contains(module, s.layers[0]) for s in others) else module


def provides_positions(edit: RegionEdit) -> bool:
    """Whether the edit stands for a stack that provides the positions of its tokens."""
    return any(state.anchor is not None and state.anchor.kind == KIND for state in edit.states.values())
