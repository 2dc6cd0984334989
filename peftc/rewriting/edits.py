"""Edits of a region, properties of their equations, and the container of their form modules."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from peftc.addressing.sites import FeatureDims, Kernel, Slice, WeightRef
from peftc.diagnostics.diagnostic import printable
from peftc.equation_code.form_code import code_text
from peftc.equations.analysis import Place
from peftc.equations.definition import TextForm, owner_path
from peftc.equations.words import scope_of
from peftc.forms.shapes import KeyValue, Prompt, Scalar, Tokens
from peftc.modules.new_modules import module_with
from peftc.modules.torch_attributes import TABLES, with_lazy_tables
from peftc.planning import ir
from peftc.planning.pass_edit import form_of_pass
from peftc.planning.pass_form import PassForm
from peftc.rewriting.anchors import Anchor
from peftc.syntax.printer import print_statement

_PLAIN = nn.Module()
EQUATIONS = "equations"  # in a node's meta: the comments above its line
STREAM = "<stream>"  # the layer's input, read only for its batch and token sizes
CONTAINER = "peftc"  # the container's name in its region
SHARED = "peftc_shared"  # the name, at the model's root, of the modules that several sites share


@dataclass(frozen=True)
class RegionState:
    """A state of an edit: an anchor or a parameter. Names are relative to the edit's region."""

    anchor: Anchor | None = None
    rows: Slice | None = None
    size: int = 0  # of the dimension that `rows` are a part of
    flat: bool = False  # the model's code has the shape (batch · tokens, d) here
    image: Literal["", "channels first", "channels last"] = ""  # where an image has its features; empty for tokens
    dims: FeatureDims | None = None  # where the features are, if not in the last dimension
    kernel: Kernel | None = None  # of the convolution that reads an image in patches
    weight: WeightRef | None = None
    definitions: tuple[Anchor, ...] = ()  # where the state is by definition, however a call computes it
    aliases: tuple[Anchor, ...] = ()  # all anchors of its value in the layer's trace
    overwritten: bool = False  # in place, by code of the region that is not entered


@dataclass(frozen=True)
class RegionEdit:
    """One edit at one site, in its region. `slug` names the site within the region."""

    edit: str
    slug: str
    assigns: tuple[ir.Assign, ...]
    states: dict[str, RegionState]
    functions: dict[str, str]
    keys: tuple[str, ...]
    lets: tuple[tuple[int, ir.Term], ...] = ()
    form: PassForm | None = None  # of a pass

    @classmethod
    def of(
        cls,
        p: ir.SiteEdit,
        states: dict[str, RegionState],
        functions: dict[str, str] | None = None,
        of_several_layers: bool = False,
    ) -> RegionEdit:
        keys = tuple(instance.key for instance in p.instances)
        form = form_of_pass(p)
        return cls(p.edit, slug(p, of_several_layers), p.assigns, states, functions or {}, keys, p.lets, form)

    @property
    def edit_name(self) -> str:
        return module_name(self.edit.replace(".", "__"))

    @property
    def fingerprint(self) -> str:
        """A text that is equal for edits that rewrite a region in the same way."""
        return f"{self.slug} {self.pattern}"

    @cached_property
    def pattern(self) -> str:
        """A text that is equal for edits that do so but for the names of the sites."""
        assigns = [(a.state, describe(a.value)) for a in self.assigns]
        lets = [(i, describe(term)) for i, term in self.lets]
        return repr((self.edit, self.states, self.functions, assigns, lets, self.form and self.form.key))

    @cached_property
    def own_form(self) -> str | None:
        """Where the region has a form of this edit, if attached adapters have the edit."""
        values = (*(assign.value for assign in self.assigns), *(term for _, term in self.lets))
        forms = (term.instance for value in values for term in ir.subterms(value) if isinstance(term, ir.FormCall))
        return next((f"{self.place}.{instance.key}" for instance in forms if instance.are_adapters), None)

    @property
    def place(self) -> str:
        """Where a region has the forms of the edit."""
        return f"{CONTAINER}.{self.edit_name}.{self.slug}"


@dataclass
class Region:
    """A module to rewrite, by its dotted name, with its edits in order."""

    module: str
    inline: frozenset[str]  # relative names of the modules whose code is entered, "" for its own
    edits: list[RegionEdit]
    site_edits: list[ir.SiteEdit] = field(default_factory=list[ir.SiteEdit])
    # (edit, site) of the forms that read token positions from this region
    position_sites: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def equation_comment(edit: str, assign: ir.Assign) -> str:
    """`edit ffn: h += adapter(x, r=512)`, printed from the syntax tree on one line."""
    source = assign.text or assign.source
    return printable(f"edit {edit}: {print_statement(replace(source, leading=(), trailing=None))}")


def describe(term: ir.Term) -> object:
    """A term as nested tuples, equal for equal terms."""
    match term:
        case ir.Read(state=state):
            return state
        case ir.Constant(value=value):
            return value
        case ir.FormCall(instance=instance, inputs=values) if is_inline(instance):
            code = code_text(place_of(instance)), tuple(owners_of(instance))
            return (instance.key, instance.form.name, code, row_count(term), *map(describe, values))
        case ir.FormCall(instance=instance, inputs=values):
            arguments = sorted(instance.args.items(), key=lambda item: item[0])
            return (instance.key, instance.form.name, arguments, instance.are_adapters, *map(describe, values))
        case ir.FrozenCall(function=function, input=value):
            return (function, describe(value))
        case ir.Feature(input=value, index=index):
            return ("feature", describe(value), index)
        case ir.Arithmetic(op=op, left=left, right=right):
            return (op, describe(left), describe(right))
        case ir.Concat(parts=parts):
            return ("concat", *map(describe, parts))


def is_inline(instance: ir.FormInstance) -> bool:
    """Whether the operations of a form stand in the code of the edited module: those of a text,
    where there is one form for all rows, which computes the same at all sites that share it.
    """
    form = instance.form
    return isinstance(form, TextForm) and not form.differs_by_site(instance.args) and not instance.tasks


def has_sum(form: ir.FormCall) -> bool:
    """Whether the module of a form of tasks also computes its sum with a state (`added_to`)."""
    is_text = isinstance(form.instance.form, TextForm) and bool(form.instance.tasks)
    return is_text and all(type(term.shape) is Tokens for term in (form, *form.inputs))


def place_of(instance: ir.FormInstance) -> Place:
    """The equation of a form where it stands."""
    assert isinstance(instance.form, TextForm)
    return instance.form.at(instance.form.fill(instance.args), instance.dims)


def owners_of(instance: ir.FormInstance) -> dict[str, str]:
    """The parameters that the form's module at the site has not itself, but its owner."""
    if instance.form.text is None or instance.owner is None:
        return {}
    form, parameters = instance.form, place_of(instance).parameters.items()
    assert isinstance(form, TextForm)
    return {
        n: owner_path(line, form)
        for n, line in parameters
        if scope_of(line) != "site" or not instance.has_site_parameters
    }


def frozen_modules(site_edit: ir.SiteEdit) -> dict[str, str]:
    """The frozen sub-modules that an edit applies: name to dotted name."""
    return {t.function: t.module for t in site_edit.terms() if isinstance(t, ir.FrozenCall)}


def group_by_state(site_edits: Iterable[ir.SiteEdit]) -> list[list[ir.SiteEdit]]:
    """Groups edits of one state at one site: they share a region and apply in order."""
    groups: list[list[ir.SiteEdit]] = []
    for new in site_edits:
        at_site = (group for group in groups if group[0].site.path == new.site.path)
        same = [group for group in at_site if any(written_states(p) & written_states(new) for p in group)]
        groups = [group for group in groups if group not in same]
        groups.append([*(p for group in same for p in group), new])
    return groups


def innermost_first(site_edit: ir.SiteEdit) -> int:
    """A sort key: edits of Linears before those of the sub-layers around them."""
    return -site_edit.site.path.count(".")


def used_states(site_edit: ir.SiteEdit) -> list[str]:
    """The states that an edit reads or writes, and `STREAM` if it needs the batch."""
    terms = site_edit.terms()
    reads = [t.state for t in terms if isinstance(t, ir.Read)]
    names = dict.fromkeys([*reads, *(a.state for a in site_edit.assigns)])
    per_example = any(isinstance(t.shape, Scalar) and t.shape.per_example for t in terms)
    needs_batch = per_example or any(instance.tasks for instance in site_edit.instances)
    if site_edit.site.layer_input is not None and needs_batch:
        names[STREAM] = None
    return list(names)


def written_states(site_edit: ir.SiteEdit) -> set[str]:
    return {a.state for a in site_edit.assigns}


def slug(site_edit: ir.SiteEdit, of_several_layers: bool = False) -> str:
    """The site's path below its layer as an identifier, such as `attn_self_q`; the whole path in a
    region of several layers.
    """
    steps = site_edit.site.steps
    start = next((i + 1 for i, (name, _) in enumerate(steps) if name == "layer"), 0)
    start = 0 if of_several_layers else start
    words = [name if index is None else f"{name}_{index}" for name, index in steps[start:]]
    text = "_".join(words) or "layer"
    return module_name("".join(c if c.isalnum() else "_" for c in text))


def module_name(text: str) -> str:
    """A name that any module, and a container, can register a child under."""
    while keyword.iskeyword(text) or hasattr(_PLAIN, text) or hasattr(Container, text):
        text += "_"
    return text


def contains_state(term: ir.Term) -> bool:
    """Whether a term for keys and values contains those of the model, too."""
    return any(isinstance(part, ir.Read) and part.shape == term.shape for part in ir.subterms(term))


def row_count(term: ir.Term) -> int:
    """The number of keys, or of tokens, that a term adds to a state."""
    match term:
        case ir.FormCall(input=value) if value is not None:
            return row_count(value)
        case ir.FormCall(shape=KeyValue(rows=rows) | Prompt(rows=rows)):
            return rows
        case ir.Arithmetic(left=left, right=right):
            return max(row_count(left), row_count(right))
        case ir.Concat(parts=parts):
            return sum(map(row_count, parts))
        case _:
            return 0


@with_lazy_tables
class Container(nn.Module):
    """Keeps each child as a plain attribute, too, which Python finds five times as fast."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        vars(self)[name] = module

    def add(self, name: str, module: nn.Module) -> None:
        """`add_module` of a name that no member has, in a tenth of the time."""
        vars(self)["_modules"][name] = vars(self)[name] = module

    def child(self, name: str) -> Container:
        """The container of that name, which is made where there is none."""
        children: dict[str, Any] = vars(self)["_modules"]
        if name not in children:
            self.add(name, empty_container())
        return children[name]

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            vars(self).pop(name, None)
        super().__delattr__(name)


_PLAIN_ATTRIBUTES = {name: value for name, value in vars(nn.Module()).items() if name not in TABLES}


def empty_container() -> Container:
    """`Container()` in a tenth of the time: there are three at each site."""
    return container_of({})


def container_of(children: dict[str, nn.Module]) -> Container:
    """A container of modules by name; no member has such a name. Keeps the dictionary."""
    attributes = _PLAIN_ATTRIBUTES | children
    attributes["_parameters"], attributes["_buffers"], attributes["_modules"] = {}, {}, children
    return module_with(Container, attributes)


def own_children(sequence: Any) -> Iterator[nn.Module]:
    """The children that an edited `nn.Sequential` runs: all but the container."""
    return (module for name, module in sequence._modules.items() if name != CONTAINER)


def own_length(sequence: Any) -> int:
    return sum(1 for _ in own_children(sequence))
