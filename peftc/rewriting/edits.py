"""An edit as a region sees it, and what can be said of its equations without a graph."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from peftc.addressing.sites import Slice, WeightRef
from peftc.diagnostics.diagnostic import printable
from peftc.forms.shapes import KeyValue, Scalar
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor
from peftc.syntax.printer import print_statement

_PLAIN = nn.Module()
EQUATIONS = "equations"  # in a node's meta: the comments above its line
STREAM = "<stream>"  # the layer's input, used only for its batch and tokens


@dataclass(frozen=True)
class Bound:
    """A state of an edit, found: by an anchor in its region, or as a parameter. Names are relative to the region.

    `defining`: the anchors of what the language calls by that name, whatever else another call makes of the value; `also`: all
    that name the value in the layer's trace. Where the state is only some rows of the value, `width` is the number of all its rows.
    """

    anchor: Anchor | None = None
    rows: Slice | None = None
    width: int = 0
    flat: bool = False  # (batch · tokens, d) in the model's own code
    map: Literal["", "second", "last"] = ""  # an image there: which of its dimensions is d
    weight: WeightRef | None = None
    defining: tuple[Anchor, ...] = ()
    also: tuple[Anchor, ...] = ()
    overwritten: bool = False  # by the code of the region, which is not entered


@dataclass(frozen=True)
class RegionEdit:
    """One edit at one site, as a region sees it. `slug` names the site within the region."""

    edit: str
    slug: str
    assigns: tuple[ir.Assign, ...]
    states: dict[str, Bound]
    functions: dict[str, str]
    keys: tuple[str, ...]
    lets: tuple[tuple[int, ir.Term], ...] = ()

    @property
    def edit_name(self) -> str:
        """The edit's name as the name of a module."""
        return module_name(self.edit.replace(".", "__"))

    @property
    def fingerprint(self) -> str:
        """A text that two edits share exactly if they rewrite a region in the same way."""
        return repr(
            (
                self.edit,
                self.slug,
                self.states,
                self.functions,
                [describe(a) for a in self.assigns],
                [(i, describe_term(t)) for i, t in self.lets],
            )
        )


@dataclass
class Region:
    """A module to rewrite: its dotted name in the model, the modules in it whose code is entered, its edits in order."""

    module: str
    inline: frozenset[str]  # relative names; "" is the region itself; empty: nothing but its boundary is touched
    edits: list[RegionEdit]
    site_edits: list[ir.SiteEdit] = field(default_factory=list[ir.SiteEdit])
    serves: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (edit, site) that it tells positions


def equation_comment(edit: str, assign: ir.Assign) -> str:
    """`edit ffn: h += adapter(x, r=512)`, printed from the syntax tree on one line."""
    return printable(f"edit {edit}: {print_statement(replace(assign.source, leading=(), trailing=None))}")


def describe(assign: ir.Assign) -> object:
    return (assign.state, describe_term(assign.value))


def describe_term(term: ir.Term) -> object:
    match term:
        case ir.Read(state=state):
            return state
        case ir.Constant(value=value):
            return value
        case ir.FormCall(instance=instance, inputs=values):
            arguments = sorted(instance.args.items(), key=lambda item: item[0])
            return (instance.key, instance.form.name, arguments, *map(describe_term, values))
        case ir.FrozenCall(function=function, input=value):
            return (function, describe_term(value))
        case ir.Arithmetic(op=op, left=left, right=right):
            return (op, describe_term(left), describe_term(right))
        case ir.Concat(parts=parts):
            return ("concat", *map(describe_term, parts))


def terms_of(placed: ir.SiteEdit) -> list[ir.Term]:
    """Every term of an edit, those of its lets included."""
    roots = [a.value for a in placed.assigns] + [term for _, term in placed.lets]
    return [part for root in roots for part in ir.subterms(root)]


def frozen_modules(placed: ir.SiteEdit) -> dict[str, str]:
    """The frozen sub-modules that an edit applies: name to dotted name."""
    return {t.function: t.module for t in terms_of(placed) if isinstance(t, ir.FrozenCall)}


def together(placed: Iterable[ir.SiteEdit]) -> list[list[ir.SiteEdit]]:
    """Edits of one state at one site stay together: they apply in the order of the spec."""
    groups: list[list[ir.SiteEdit]] = []
    for p in placed:
        mine = [g for g in groups if g[0].site.path == p.site.path and any(written(o) & written(p) for o in g)]
        groups = [g for g in groups if g not in mine]
        groups.append([*(o for g in mine for o in g), p])
    return groups


def depth(placed: ir.SiteEdit) -> int:
    """Sorts Linears before the sub-layers they are in."""
    return -placed.site.path.count(".")


def used_states(placed: ir.SiteEdit) -> list[str]:
    """The states that an edit reads or writes, and the stream where it needs the batch back: for a number an example, for the tasks
    of the examples.
    """
    terms = terms_of(placed)
    names = dict.fromkeys([*(t.state for t in terms if isinstance(t, ir.Read)), *(a.state for a in placed.assigns)])
    if placed.site.layer_input is not None and (
        any(isinstance(t.shape, Scalar) and t.shape.per_example for t in terms)
        or any(instance.tasks for instance in placed.instances)
    ):
        names[STREAM] = None
    return list(names)


def written(placed: ir.SiteEdit) -> set[str]:
    return {a.state for a in placed.assigns}


def slug(placed: ir.SiteEdit) -> str:
    """The site's path below its layer as an identifier: `attn_self_q`; `h` for the layer itself."""
    steps = placed.site.steps
    cut = next((i + 1 for i, (name, _) in enumerate(steps) if name == "layer"), 0)
    words = [name if index is None else f"{name}_{index}" for name, index in steps[cut:]]
    text = "_".join(words) or "layer"
    return module_name("".join(c if c.isalnum() else "_" for c in text))


def module_name(text: str) -> str:
    """An identifier under which a child can be registered in any module: no keyword, no attribute of nn.Module."""
    while keyword.iskeyword(text) or hasattr(_PLAIN, text):
        text += "_"
    return text


def heads_of(term: ir.Term) -> int:
    """The heads of a term of keys and values."""
    assert isinstance(term.shape, KeyValue)
    return term.shape.kv_heads


def contains_state(term: ir.Term) -> bool:
    match term:
        case ir.Read():
            return True
        case ir.Concat(parts=parts):
            return any(map(contains_state, parts))
        case ir.Arithmetic(left=left, right=right):
            return contains_state(left) or contains_state(right)
        case _:
            return False


def rows(term: ir.Term) -> int:
    """The number of rows of keys, or of tokens, that a term has besides those of the state itself."""
    match term:
        case ir.FormCall(input=value) if value is not None:
            return rows(value)
        case ir.FormCall(instance=instance):
            length = instance.args.get("len", 0)  # a factor has none
            assert isinstance(length, int)
            return length
        case ir.Arithmetic(left=left, right=right):
            return max(rows(left), rows(right))
        case ir.Concat(parts=parts):
            return sum(map(rows, parts))
        case _:
            return 0
