"""Tokens before those of the input: the modules that embed tokens and run the layers take longer inputs from then on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from transformers.utils.generic import ModelOutput

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.forms.shapes import Tokens
from peftc.observation.token_flow import EMBEDS, SampleRun, TokenFlow, token_flow
from peftc.planning import ir
from peftc.recognition.layers import ModelStructure, Stack
from peftc.recognition.non_layer_sites import enclosing
from peftc.rewriting.anchors import Anchor, contains, relative
from peftc.rewriting.base_call import base_call
from peftc.rewriting.edits import Bound, Region, RegionEdit, slug
from peftc.runtime.prompts import cannot_prepend, forward_with_prompt
from peftc.tracing.module_calls import forward_signature

CONTEXT, CONTEXT_MASK = "encoder_hidden_states", "encoder_attention_mask"


def is_prompt(placed: ir.SiteEdit) -> bool:
    """Whether an edit joins tokens to those of the input."""
    return any(isinstance(a.value, ir.Concat) and isinstance(a.value.shape, Tokens) for a in placed.assigns)


def prompt_regions(placed: ir.SiteEdit, anatomy: ModelStructure) -> Iterator[Region]:
    """The stack that takes the tokens, and one that attends to what it gives.

    Rows of the prompt leave an encoder that a decoder attends to; of any other stack the result has those of the input.
    Raises: P418 where no module takes embedded tokens, or needs more of them than that, or where the same edit does something
    else besides.
    """
    span = next(iter(placed.assigns)).source.span
    if len(placed.assigns) > 1 or placed.lets:
        message = f"`{placed.edit}` joins tokens and does something else"
        raise PeftcError(Diagnostic("P418", message, span, help="write two edits"))
    try:
        stack, module = taker(placed.site, anatomy)
    except Unjoinable as cannot:
        raise PeftcError(Diagnostic("P418", str(cannot), span, notes=cannot.notes)) from None
    later = anatomy.stacks[anatomy.stacks.index(stack) + 1 :]
    readers = [other for other in later if attends(other)] if not attends(stack) else []
    keys = (relative(placed.site.module, module), bool(readers))
    yield _region(placed, module, Anchor("tokens", "", keys))
    for other in readers:
        reader = taking((CONTEXT, CONTEXT_MASK), other.layers[0], other, anatomy)
        if reader is not None:
            yield _region(replace(placed, instances=()), reader, Anchor("context", "", ()))


class Unjoinable(Exception):
    """Why no rows can be joined to the tokens of a site."""

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.notes = notes


def taker(site: Site, anatomy: ModelStructure) -> tuple[Stack, str]:
    """The stack that takes the tokens of a site, and the module of it that takes them embedded.

    Raises: Unjoinable where there is none, or where it needs of a token what a row does not have: its id, or a number beside it.
    """
    around = [(s, m) for s in anatomy.stacks if (m := taking((EMBEDS,), site.module, s, anatomy)) is not None]
    flow = flow_of(site.module, around, anatomy) if around else TokenFlow()
    around = [(stack, module) for stack, module in around if module in flow.arguments]
    if not around:
        raise Unjoinable(f"no module takes the tokens of `{site.path}` as `{EMBEDS}`, so none can be joined to them")
    name = ".".join(step for step, _ in site.steps[:-1])
    own = [(stack, module) for stack, module in around if stack.name == name]
    stack, module = own[0] if own else max(around, key=lambda found: len(found[1].split(".")) if found[1] else 0)
    shown = f"`{module}`" if module else "the model"
    if (need := flow.id_dependence.get(module)) is not None:
        message = f"{shown} needs the ids of tokens besides their embeddings, and the rows of a prompt have none"
        raise Unjoinable(message, need)
    if (reason := cannot_prepend(flow.arguments[module])) is not None:
        raise Unjoinable(f"{shown} is called with more than tokens: {reason}")
    if module and not attends(stack) and (others := other_states(flow.results[module])):
        raise Unjoinable(f"{shown} returns more states of tokens than the last one: {join_names(others)}")
    return stack, module


def other_states(result: Any) -> list[str]:
    """Names of what a stack returns for tokens besides the last hidden state: (batch, tokens, features), or some of each token."""
    named = list(result.items())[1:] if isinstance(result, ModelOutput) else []
    states = [(name, value) for name, value in named if isinstance(value, Tensor) and not name.startswith("encoder_")]
    return [name for name, value in states if value.ndim == 3 and value.is_floating_point()]


def flow_of(embedding: str, around: Sequence[tuple[Stack, str]], anatomy: ModelStructure) -> TokenFlow:
    """The flow of an embedding's tokens, which is followed once."""
    if embedding not in anatomy.flows:
        layers = [layer for stack in anatomy.stacks for layer in stack.layers]
        sample = SampleRun(anatomy.model, anatomy.mode, anatomy.seen.sample, layers)
        anatomy.flows[embedding] = token_flow(embedding, dict.fromkeys(module for _, module in around), sample)
    return anatomy.flows[embedding]


def attends(stack: Stack) -> bool:
    """Whether the layers of a stack attend to what another stack gives."""
    crossing = any(sub.variant == "cross" for kind in stack.kinds for sub in kind.subs)
    return crossing or any(kind.arguments.get(CONTEXT) is not None for kind in stack.kinds)


def prompted_call(graph: fx.Graph) -> fx.Node:
    """The call of a stack's own forward, as one that takes more tokens."""
    call = next(n for n in graph.nodes if n.target in (base_call, forward_with_prompt))
    if call.target is forward_with_prompt:
        return call
    base, *given = call.args
    named = {str(n.target).lstrip("*"): n for n in given if isinstance(n, fx.Node)}
    rest = next((name for name, n in named.items() if str(n.target).startswith("**")), None)
    others: Any = {} if rest is None else named.pop(rest)
    with graph.inserting_before(call):
        made = graph.call_function(forward_with_prompt, (base, graph.get_attr("_self"), named, others, [], "", True, 0))
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


def taking(parameters: tuple[str, ...], inner: str, stack: Stack, anatomy: ModelStructure) -> str | None:
    """The innermost module around `inner` and the layers of a stack whose forward has these parameters."""
    for name in (*enclosing(inner), ""):
        module: nn.Module = anatomy.model.get_submodule(name)
        if (
            name != inner
            and contains(name, stack.layers[0])
            and set(parameters) <= set(forward_signature(module).parameters)
        ):
            return name
    return None


def _region(placed: ir.SiteEdit, module: str, anchor: Anchor) -> Region:
    keys = tuple(one.key for one in placed.instances)
    edit = RegionEdit(placed.edit, slug(placed), placed.assigns, {"h": Bound(anchor=anchor)}, {}, keys)
    return Region(module, frozenset(), [edit], [placed])
