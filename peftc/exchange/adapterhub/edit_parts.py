"""The edits of a model as the library's writers take them: one part for each site."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from peftc.addressing.sites import Site
from peftc.diagnostics import PeftcError
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import site_parameters
from peftc.exchange.adapterhub.terms import Product, operands
from peftc.exchange.lora_export import no_form
from peftc.installation.record import Installation
from peftc.planning import ir
from peftc.planning.ir import SiteEdit
from peftc.syntax.printer import print_line

NAME = "peftc"


@dataclass(frozen=True, eq=False)
class EditPart:
    """An edit at a site. `tensors`: the parameters of its forms, by `form.parameter`."""

    site_edit: SiteEdit
    tensors: Mapping[str, Tensor]

    @property
    def edit(self) -> str:
        return self.site_edit.edit

    @property
    def site(self) -> Site:
        return self.site_edit.site

    @property
    def forms(self) -> frozenset[str]:
        return frozenset(one.form.name for one in self.site_edit.instances)

    @property
    def equations(self) -> str:
        return "`, `".join(print_line(assign.source) for assign in self.site_edit.assigns)

    def no_form(self, reason: str) -> PeftcError:
        """P801, with the equations."""
        return no_form(self.edit, f"`{self.equations}` at `{self.site.path}`: {reason}")

    def named(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """By the library's names, which are the keys of `names`."""
        return {end: self.tensors[name] for end, name in names.items() if name in self.tensors}

    def product(self, state: str = "h", index: int = 0) -> tuple[Product, list[ir.Term]] | None:
        """The product of forms that an equation adds, and the other operands of the sum."""
        assign = self.site_edit.assigns[index]
        if assign.state != state:
            return None
        parts: list[Any] = list(operands(assign.value, "+"))
        own = [one for one in parts if any(isinstance(term, ir.FormCall) for term in ir.subterms(one))]
        return (Product.of(own[0]), [one for one in parts if one is not own[0]]) if len(own) == 1 else None


@dataclass(frozen=True, eq=False)
class Written:
    """A configuration, and its tensors by their keys."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def edit_parts(model: nn.Module, record: Installation) -> list[EditPart]:
    parts = list[EditPart]()
    for site_edit in record.site_edits:
        if any(one.tasks for one in site_edit.instances):
            raise no_form(site_edit.edit, "it has parameters for each task")
        tensors = {name: one.detach() for _, name, one in site_parameters(model, record, site_edit)}
        parts.append(EditPart(site_edit, tensors))
    return parts


def key(owner: str, holder: str, end: str) -> str:
    return f"{owner}.{holder}.{NAME}.{end}".lstrip(".")


def left_out(parts: Collection[EditPart], expected: Iterable[Site], places: HubPlaces) -> list[int]:
    """The layers without any of the parts. Raises: P801 where a layer has only some of them."""
    sites = list(expected)
    numbers = {site.path: places.layer_number(site) for site in (*sites, *(part.site for part in parts))}
    present, paths = {numbers[part.site.path] for part in parts}, {part.site.path for part in parts}
    for site in sites:
        if numbers[site.path] in present and site.path not in paths:
            reason = f"the library has the same at `{site.path}`, too, if at any in this layer"
            raise next(iter(parts)).no_form(reason)
    return sorted({numbers[site.path] for site in sites} - present)


def subsites(places: HubPlaces, names: Collection[str]) -> Iterator[Site]:
    """The sites of Linears with these names, of all attentions and ffns."""
    for sublayer in places.sublayers:
        for name in names:
            if (site := places.sites.get(f"{sublayer.path}.{name}")) is not None:
                yield site
