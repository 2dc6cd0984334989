"""Forms that act at some positions only: the stack that takes the tokens tells them where these stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning import ir
from peftc.positioning import located
from peftc.rewriting.anchors import Anchor, contains
from peftc.rewriting.edits import Bound, Region, RegionEdit
from peftc.rewriting.emit import base_call
from peftc.rewriting.prompts import EMBEDS, taking
from peftc.tracing.kinds import Anatomy

KIND = "positions"  # of the anchor
NAME = "<positions>"  # in the place of an edit's, and no edit can have it
SEQUENCE = "sequence"  # the name in a region's container under which the forms' knowledge stands


def picks(instance: ir.Instance) -> bool:
    return instance.form.picks(instance.form.fill(instance.args))


def position_regions(placed: Iterable[ir.Placed], anatomy: Anatomy) -> list[Region]:
    """The stacks around the sites that have such forms; each once, with the sites that it serves.

    Raises: P422 where no module takes the tokens of a site.
    """
    found: dict[str, Region] = {}
    for p in placed:
        if not any(map(picks, p.instances)):
            continue
        module = _telling(p, anatomy)
        if module is None:
            message = f"no stack tells the positions of the tokens at `{p.site.path}`"
            span = next(iter(p.assigns)).source.span
            note = f"known are those of layers in a module that takes `{EMBEDS}`, but not of the context they attend to"
            raise PeftcError(Diagnostic("P422", message, span, notes=(note,), help="leave out `first` and `last`"))
        edit = RegionEdit(NAME, KIND, (), {KIND: Bound(anchor=Anchor(KIND, "", ()))}, {}, ())
        first = Region(module, frozenset(), [edit], [replace(p, instances=())])
        found.setdefault(module, first).serves.append((p.edit, p.site.path))
    return list(found.values())


def _telling(placed: ir.Placed, anatomy: Anatomy) -> str | None:
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


def refuse_prompts(region: Region) -> None:
    """Raises: P422 for a stack that takes a prompt, too."""
    kinds = {b.anchor.kind for e in region.edits for b in e.states.values() if b.anchor is not None}
    if KIND in kinds and len(kinds) > 1:
        edit, path = region.serves[0]
        message = f"`{edit}` counts the tokens at `{path}`, and another edit joins a prompt to them"
        raise PeftcError(Diagnostic("P422", message, help="leave out `first` and `last`, or the prompt"))


def located_call(graph: fx.Graph) -> None:
    """The call of a stack's own forward, as one whose forms know the positions."""
    call = next(n for n in graph.nodes if n.target is base_call)
    base, *given = call.args
    named = {str(n.target).lstrip("*"): n for n in given if isinstance(n, fx.Node)}
    rest = next((name for name, n in named.items() if str(n.target).startswith("**")), None)
    others: Any = {} if rest is None else named.pop(rest)
    with graph.inserting_before(call):
        made = graph.call_function(located, (base, graph.get_attr("_self"), named, others))
    call.replace_all_uses_with(made)
    graph.erase_node(call)
