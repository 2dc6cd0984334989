"""Tokens before those of the input: the modules that embed tokens and run the layers take longer inputs from then on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Tokens
from peftc.planning import ir
from peftc.prompting import prompted
from peftc.rewriting.anchors import Anchor, contains, relative
from peftc.rewriting.edits import Bound, Region, RegionEdit, slug
from peftc.rewriting.emit import base_call
from peftc.tracing.calls import signature_of
from peftc.tracing.kinds import Anatomy, Stack
from peftc.tracing.outside import enclosing

EMBEDS, CONTEXT, CONTEXT_MASK = "inputs_embeds", "encoder_hidden_states", "encoder_attention_mask"


def is_prompt(placed: ir.Placed) -> bool:
    """Whether an edit joins tokens to those of the input."""
    return any(isinstance(a.value, ir.Concat) and isinstance(a.value.shape, Tokens) for a in placed.assigns)


def prompt_regions(placed: ir.Placed, anatomy: Anatomy) -> Iterator[Region]:
    """The stack that takes the tokens, and one that attends to what it gives.

    Rows of the prompt leave an encoder that a decoder attends to; of any other stack the result has those of the input.
    Raises: P418 where no module takes embedded tokens, or where the same edit does something else besides.
    """
    span = next(iter(placed.assigns)).source.span
    if len(placed.assigns) > 1 or placed.lets:
        message = f"`{placed.edit}` joins tokens and does something else"
        raise PeftcError(Diagnostic("P418", message, span, help="write two edits"))
    stack = _stack(placed, anatomy)
    module = taking((EMBEDS,), placed.site.module, stack, anatomy)
    if module is None:
        message = f"no module takes the tokens of `{placed.site.path}` as `{EMBEDS}`, so none can be joined to them"
        raise PeftcError(Diagnostic("P418", message, span))
    readers = [other for other in anatomy.stacks if other is not stack and attends(other)] if not attends(stack) else []
    keys = (relative(placed.site.module, module), bool(readers))
    yield _region(placed, module, Anchor("tokens", "", keys))
    for other in readers:
        reader = taking((CONTEXT, CONTEXT_MASK), other.layers[0], other, anatomy)
        if reader is not None:
            yield _region(replace(placed, instances=()), reader, Anchor("context", "", ()))


def attends(stack: Stack) -> bool:
    """Whether the layers of a stack attend to what another stack gives."""
    return any(sub.variant == "cross" for kind in stack.kinds for sub in kind.subs)


def prompted_call(graph: fx.Graph) -> fx.Node:
    """The call of a stack's own forward, as one that takes more tokens."""
    call = next(n for n in graph.nodes if n.target in (base_call, prompted))
    if call.target is prompted:
        return call
    base, *given = call.args
    named = {str(n.target).lstrip("*"): n for n in given if isinstance(n, fx.Node)}
    rest = next((name for name, n in named.items() if str(n.target).startswith("**")), None)
    others: Any = {} if rest is None else named.pop(rest)
    with graph.inserting_before(call):
        made = graph.call_function(prompted, (base, graph.get_attr("_self"), named, others, [], "", True, 0))
    call.replace_all_uses_with(made)
    graph.erase_node(call)
    return made


def set_tokens(
    call: fx.Node, made: Sequence[fx.Node] = (), embedding: str = "", keep: bool = True, context: int = 0
) -> None:
    """Adds rows before those that the call has already, or tokens of the context."""
    *first, rows, name, keeps, before = call.args
    assert isinstance(rows, Sequence)
    assert isinstance(before, int)
    call.args = (*first, [*made, *rows], embedding or name, keep and keeps, before + context)


def _stack(placed: ir.Placed, anatomy: Anatomy) -> Stack:
    name = ".".join(step for step, _ in placed.site.steps[:-1])
    found = [stack for stack in anatomy.stacks if stack.name == name]
    return (found or anatomy.stacks)[0]


def taking(parameters: tuple[str, ...], inner: str, stack: Stack, anatomy: Anatomy) -> str | None:
    """The innermost module around `inner` and the layers of a stack whose forward has these parameters."""
    for name in (*enclosing(inner), ""):
        module: nn.Module = anatomy.model.get_submodule(name)
        if (
            name != inner
            and contains(name, stack.layers[0])
            and set(parameters) <= set(signature_of(module).parameters)
        ):
            return name
    return None


def _region(placed: ir.Placed, module: str, anchor: Anchor) -> Region:
    keys = tuple(one.key for one in placed.instances)
    edit = RegionEdit(placed.edit, slug(placed), placed.assigns, {"h": Bound(anchor=anchor)}, {}, keys)
    return Region(module, frozenset(), [edit], [placed])
