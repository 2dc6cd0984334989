"""Edits of the modules that take embedded tokens: prompts, and forms that act at some positions."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, fx
from transformers.utils.generic import ModelOutput

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import join_names
from peftc.modules.walk import submodule
from peftc.observation.token_flow import EMBEDS, SampleRun, TokenFlow, token_flow
from peftc.planning import ir
from peftc.planning.on_table import is_prompt
from peftc.recognition.layers import ModelStructure, Stack
from peftc.recognition.non_layer_sites import enclosing
from peftc.rewriting.anchors import Anchor, contains, relative
from peftc.rewriting.boundary import wrap_base_call
from peftc.rewriting.edits import Region, RegionEdit, RegionState, row_count
from peftc.runtime.positions import forward_with_offset, forward_with_positions
from peftc.runtime.prompts import cannot_prepend, forward_with_prompt
from peftc.tracing.module_calls import forward_signature

CONTEXT, CONTEXT_MASK = "encoder_hidden_states", "encoder_attention_mask"
KIND, OFFSET = "positions", "offset"  # of anchors
POSITION_IDS = "position_ids"
NAME = "<positions>"  # in place of an edit's name
SEQUENCE = "sequence"  # in a region's container, the record of positions that its forms read
CACHE_NAME = "_cache_name"  # in a form, under which a cache has what it keeps of its tokens


def prompt_regions(site_edit: ir.SiteEdit, structure: ModelStructure) -> Iterator[Region]:
    """The stack that takes the tokens, and the stacks that attend to its result.

    A decoder attends to the encoder's rows of the prompt too. Other results have no such rows.
    Raises: P418 where no module takes embedded tokens alone, or the edit has other equations.
    """
    span = next(iter(site_edit.assigns)).source.span
    if len(site_edit.assigns) > 1 or site_edit.lets:
        message = f"`{site_edit.edit}` has other equations besides the one that joins tokens"
        raise PeftcError(Diagnostic("P418", message, span, help="write two edits"))
    stack, module = token_stack(site_edit.site, structure, span)
    later = structure.stacks[structure.stacks.index(stack) + 1 :]
    readers = [other for other in later if attends(other)] if not attends(stack) else []
    keys = (relative(site_edit.site.module, module), bool(readers))
    yield stack_region(site_edit, module, Anchor("tokens", "", keys))
    for other in readers:
        reader = innermost_with((CONTEXT, CONTEXT_MASK), other.layers[0], other, structure)
        if reader is not None:
            yield stack_region(replace(site_edit, instances=()), reader, Anchor("context", ""))


def stack_region(site_edit: ir.SiteEdit, module: str, anchor: Anchor) -> Region:
    return Region(module, frozenset(), [RegionEdit.of(site_edit, {"h": RegionState(anchor)})], [site_edit])


def token_stack(site: Site, structure: ModelStructure, span: Span) -> tuple[Stack, str]:
    """The stack whose tokens a site embeds, and its module that takes them. Raises: P418."""
    modules = [(s, innermost_with((EMBEDS,), site.module, s, structure)) for s in structure.stacks]
    takers = [(stack, module) for stack, module in modules if module is not None]
    if takers and site.module not in structure.flows:
        layers = [layer for stack in structure.stacks for layer in stack.layers]
        sample = SampleRun(structure.model, structure.mode, structure.seen.sample, layers)
        structure.flows[site.module] = token_flow(site.module, dict.fromkeys(module for _, module in takers), sample)
    flow = structure.flows[site.module] if takers else TokenFlow()
    takers = [(stack, module) for stack, module in takers if module in flow.arguments]
    if not takers:
        message = f"no module takes the tokens of `{site.path}` as `{EMBEDS}`, so no prompt can be joined to them"
        raise PeftcError(Diagnostic("P418", message, span))
    name = ".".join(step for step, _ in site.steps[:-1])
    own = [(stack, module) for stack, module in takers if stack.name == name]
    stack, module = own[0] if own else max(takers, key=lambda taker: len(taker[1].split(".")) if taker[1] else 0)
    shown = f"`{module}`" if module else "the model"
    if (need := flow.id_dependence.get(module)) is not None:
        message = f"{shown} needs the ids of tokens besides their embeddings, and the tokens of a prompt have none"
        raise PeftcError(Diagnostic("P418", message, span, notes=(need,)))
    if (reason := cannot_prepend(flow.arguments[module])) is not None:
        raise PeftcError(Diagnostic("P418", f"{shown} takes other arguments besides the tokens: {reason}", span))
    result = flow.results[module]
    if module and not attends(stack) and isinstance(result, ModelOutput):
        # results (batch, tokens, features) after the last hidden state
        named = [(n, v) for n, v in list(result.items())[1:] if isinstance(v, Tensor) and not n.startswith("encoder_")]
        if others := [name for name, value in named if value.ndim == 3 and value.is_floating_point()]:
            message = f"{shown} returns more states of tokens than the last one: {join_names(others)}"
            raise PeftcError(Diagnostic("P418", message, span))
    return stack, module


def attends(stack: Stack) -> bool:
    """Whether the layers of a stack attend to another stack's result."""
    has_cross_attention = any(sub.variant == "cross" for kind in stack.kinds for sub in kind.subs)
    return has_cross_attention or any(kind.arguments.get(CONTEXT) is not None for kind in stack.kinds)


def innermost_with(parameters: tuple[str, ...], inner: str, stack: Stack, structure: ModelStructure) -> str | None:
    """The innermost module around `inner` and a stack whose forward has these parameters."""
    around = (name for name in (*enclosing(inner), "") if name != inner and contains(name, stack.layers[0]))
    forwards = ((name, forward_signature(submodule(structure.model, name)).parameters) for name in around)
    return next((name for name, own in forwards if set(parameters) <= set(own)), None)


def prompted_call(graph: fx.Graph) -> fx.Node:
    """The call of the base's forward, as one that takes a prompt."""
    call = next((n for n in graph.nodes if n.target is forward_with_prompt), None)
    return call if call is not None else wrap_base_call(graph, forward_with_prompt, [], "", True, 0)


def prepend_tokens(
    call: fx.Node, new: Sequence[fx.Node] = (), embedding: str = "", keep: bool = True, context: int = 0
) -> None:
    """Adds rows before those that the call has, or to the length of its context."""
    *first, rows, name, keeps, length = call.args
    assert isinstance(rows, Sequence)
    assert isinstance(length, int)
    call.args = (*first, [*new, *rows], embedding or name, keep and keeps, length + context)


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
    for p in site_edits:
        if any(i.selects_positions for i in p.instances) and (module := position_source(p, structure)) is not None:
            conflicts.setdefault(f"{OFFSET} {module}", (p.edit, "selects tokens by their positions"))
    beside = {name.removeprefix(f"{OFFSET} "): conflict for name, conflict in conflicts.items()}
    yield from offset_errors(site_edits, structure, beside)
    sources: dict[str, str] = {}  # of each shared form
    refused = set[str]()
    for p in site_edits:
        for instance in (i for i in p.instances if i.selects_positions):
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
    module, help_ = position_source(p, structure), "leave out `first`, `last` and `token`"
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
        if any(i.selects_positions for i in p.instances):
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


def counted_rows(site_edit: ir.SiteEdit) -> int:
    """How many rows of keys the positions of tokens count at a site."""
    calls = (term for term in site_edit.terms() if isinstance(term, ir.FormCall))
    return sum(row_count(call) for call in calls if call.instance.form.counts_rows)


def offset_errors(
    site_edits: Sequence[ir.SiteEdit], structure: ModelStructure, conflicts: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, Diagnostic]]:
    """P422 where position ids cannot count rows, by name of the edit.

    Args: `conflicts`: for each module, an edit of its input or result, and what it does.
    """
    counts = defaultdict[str, dict[str, int]](dict)
    for p in (one for one in site_edits if counted_rows(one)):
        module = position_source(p, structure) if p.site.steps[-1][0] != "cross" else None
        if module is None or POSITION_IDS not in forward_signature(submodule(structure.model, module)).parameters:
            message = f"positions cannot count the rows at `{p.site.path}`"
            note = f"they can where a module around it takes `{POSITION_IDS}`, and for the tokens of its own stack"
            yield p.edit, Diagnostic("P422", message, span_of(p), notes=(note,), help="leave out `counted`")
            return
        if module in conflicts:
            edit, action = conflicts[module]
            message = f"positions count the rows of `{p.edit}`, and `{edit}` {action}"
            yield p.edit, Diagnostic("P422", message, span_of(p), help=f"leave out `counted`, or `{edit}`")
            return
        sites = counts[module]
        sites[p.site.path] = sites.get(p.site.path, 0) + counted_rows(p)
    for sites in counts.values():
        if len(set(sites.values())) > 1:
            (first, rows), (other, others) = sorted(sites.items(), key=lambda item: item[1])[:: len(sites) - 1]
            message = f"positions count the rows of keys, {rows} at `{first}` and {others} at `{other}`"
            p = next(one for one in site_edits if one.site.path == other and counted_rows(one))
            yield p.edit, Diagnostic("P422", message, span_of(p), help="join as many rows at all attentions")


def span_of(site_edit: ir.SiteEdit) -> Span:
    return next(iter(site_edit.assigns)).source.span


def offset_regions(site_edits: Iterable[ir.SiteEdit], structure: ModelStructure) -> list[Region]:
    """The stacks whose positions count rows, once each."""
    regions: dict[str, Region] = {}
    rows: dict[tuple[str, str], int] = {}
    for p in (one for one in site_edits if counted_rows(one)):
        module = position_source(p, structure)
        assert module is not None, p.site.path  # else `offset_errors` refuses the edit
        rows[module, p.site.path] = rows.get((module, p.site.path), 0) + counted_rows(p)
        state = RegionState(anchor=Anchor(OFFSET, "", (rows[module, p.site.path],)))
        edit = RegionEdit(NAME, OFFSET, (), {OFFSET: state}, {}, ())
        if module not in regions or rows[module, p.site.path] > counted_of(regions[module]):
            regions[module] = Region(module, frozenset(), [edit], [replace(p, instances=())])
    return list(regions.values())


def counted_of(region: Region) -> int:
    (state,) = region.edits[0].states.values()
    assert state.anchor is not None
    return state.anchor.key[0]


class StackCall(NamedTuple):
    """A call of a stack's own forward by another function: with these arguments, and a comment."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    comment: str


def stack_call(edit: RegionEdit) -> StackCall | None:
    """How an edit that stands for a stack calls it; None for other edits."""
    for state in edit.states.values():
        if state.anchor is not None and state.anchor.kind == KIND:
            return StackCall(forward_with_positions, (), "tells the edits inside the positions of the tokens")
        if state.anchor is not None and state.anchor.kind == OFFSET:
            return StackCall(forward_with_offset, state.anchor.key, "positions count the rows joined to the keys")
    return None
