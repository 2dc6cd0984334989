"""Forms that act at some positions only: the stack that takes the tokens tells them where these stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.planning import ir
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.anchors import Anchor, contains
from peftc.rewriting.base_call import base_call
from peftc.rewriting.edits import EQUATIONS, Bound, Region, RegionEdit
from peftc.rewriting.prompts import EMBEDS, is_prompt, prompt_regions, taking
from peftc.runtime.positions import forward_with_positions

KIND = "positions"  # of the anchor
NAME = "<positions>"  # in the place of an edit's, and no edit can have it
SEQUENCE = "sequence"  # the name in a region's container under which the forms' knowledge stands


def picks(instance: ir.FormInstance) -> bool:
    return instance.form.picks(instance.form.fill(instance.args))


def refused(placed: Sequence[ir.SiteEdit], anatomy: ModelStructure) -> Iterator[tuple[str, Diagnostic]]:
    """What stands against prompts and forms that pick positions, with its edit; of each edit the first.

    P418: what `prompt_regions` raises. P422: no module takes the tokens of a site, another edit changes what it takes or gives,
    or sites of two such modules have one form.
    """
    others: dict[str, tuple[str, str]] = {}  # by module: an edit of its boundary, and what that does
    for p in placed:
        if is_prompt(p):
            try:
                others |= {r.module: (p.edit, "joins a prompt to them") for r in prompt_regions(p, anatomy)}
            except PeftcError as error:
                yield from ((p.edit, found) for found in error.diagnostics)
        elif any(p.site.states[assign.state].weight is None for assign in p.assigns):
            others.setdefault(p.site.root, (p.edit, "changes what is around them"))
    told: dict[str, str] = {}
    seen = set[str]()
    for p, one in ((q, one) for q in placed for one in q.instances if picks(one)):
        module = _telling(p, anatomy)
        found = _untold(p, one, module, others)
        if found is None and any(_telling(use, anatomy) != module for use in p.uses()):
            message = f"`{p.edit}` picks positions in a module that several stacks have, each with its own"
            found = Diagnostic("P422", message, _call(p, one), help="leave out `first` and `last`")
        if found is None and one.owner is not None and told.setdefault(one.owner, str(module)) != module:
            message = f"`{p.edit}` shares a form that picks positions between stacks, each with its own"
            found = Diagnostic("P422", message, _call(p, one), help="write an edit for each stack")
        if found is not None and p.edit not in seen:
            seen.add(p.edit)
            yield p.edit, found


def _untold(
    p: ir.SiteEdit, one: ir.FormInstance, module: str | None, others: Mapping[str, tuple[str, str]]
) -> Diagnostic | None:
    """P422 for a form at a site, the tokens of which `module` takes."""
    if module is None:
        message = f"no stack tells the positions of the tokens at `{p.site.path}`"
        note = f"known are those of layers in a module that takes `{EMBEDS}`, but not of the context they attend to"
        return Diagnostic("P422", message, _call(p, one), notes=(note,), help="leave out `first` and `last`")
    if module in others:
        edit, does = others[module]
        message = f"`{p.edit}` counts the tokens at `{p.site.path}`, and `{edit}` {does}"
        return Diagnostic("P422", message, _call(p, one), help=f"leave out `first` and `last`, or `{edit}`")
    return None


def _call(placed: ir.SiteEdit, one: ir.FormInstance) -> Span:
    """Where a form stands in the text."""
    terms = (*(a.value for a in placed.assigns), *(term for _, term in placed.lets))
    parts = (part for term in terms for part in ir.subterms(term))
    return next(part.source.span for part in parts if isinstance(part, ir.FormCall) and part.instance is one)


def position_regions(placed: Iterable[ir.SiteEdit], anatomy: ModelStructure) -> list[Region]:
    """The stacks around the sites that have such forms; each once, with the sites that it serves."""
    found: dict[str, Region] = {}
    for p in placed:
        if not any(map(picks, p.instances)):
            continue
        module = _telling(p, anatomy)
        assert module is not None, p.site.path  # else it is `refused`
        edit = RegionEdit(NAME, KIND, (), {KIND: Bound(anchor=Anchor(KIND, "", ()))}, {}, ())
        first = Region(module, frozenset(), [edit], [replace(p, instances=())])
        found.setdefault(module, first).serves.append((p.edit, p.site.path))
    return list(found.values())


def _telling(placed: ir.SiteEdit, anatomy: ModelStructure) -> str | None:
    """The module that takes the tokens of a site, and of no other stack."""
    site = placed.site
    names = [name for name, _ in site.steps]
    stack = next((s for s in anatomy.stacks if any(contains(layer, site.module) for layer in s.layers)), None)
    if stack is None or ("cross" in names and names[-1] in ("k", "v")):
        return None
    module = taking((EMBEDS,), stack.layers[0], stack, anatomy)
    others = [s for s in anatomy.stacks if s is not stack]
    return None if module is None or any(contains(module, s.layers[0]) for s in others) else module


def tells(edit: RegionEdit) -> bool:
    """Whether it stands for telling the positions of a call."""
    return any(bound.anchor is not None and bound.anchor.kind == KIND for bound in edit.states.values())


def located_call(graph: fx.Graph) -> None:
    """The call of a stack's own forward, as one whose forms know the positions."""
    call = next(n for n in graph.nodes if n.target is base_call)
    base, *given = call.args
    named = {str(n.target).lstrip("*"): n for n in given if isinstance(n, fx.Node)}
    rest = next((name for name, n in named.items() if str(n.target).startswith("**")), None)
    others: Any = {} if rest is None else named.pop(rest)
    with graph.inserting_before(call):
        made = graph.call_function(forward_with_positions, (base, graph.get_attr("_self"), named, others))
    made.meta[EQUATIONS] = ("tells the edits inside the positions of the tokens",)
    call.replace_all_uses_with(made)
    graph.erase_node(call)
