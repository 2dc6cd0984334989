"""The parts of an adapter by site, the edits of a spec that they make, and their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peftc.adapters.loading import check_tensors, notify_forms
from peftc.addressing.sites import Site
from peftc.equation_code.buffer_module import FILLED, BufferModule
from peftc.exchange.selector_text import Selectors
from peftc.exchange.spec_text import statement, unfit
from peftc.installation.record import Installation, installation_of
from peftc.planning.ir import SiteEdit


@dataclass(frozen=True, eq=False)
class SitePart:
    """What an adapter has at a site. `tensors`: by `form.parameter`. `forms`: the texts of forms
    that the equations call, and that are none of peftc's own.
    """

    kind: str
    site: Site
    equations: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    forms: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SiteEdits:
    """An edit of a spec, with its parts by the paths of their sites."""

    name: str
    text: str
    parts: Mapping[str, SitePart]


def site_edits_of(parts: Iterable[SitePart], selectors: Selectors) -> list[SiteEdits]:
    """One edit for each equation. Raises: P804 for sites that no selector selects alone."""
    groups: dict[tuple[str, tuple[str, ...]], list[SitePart]] = {}
    for part in parts:
        groups.setdefault((part.kind, part.equations), []).append(part)
    edits = list[SiteEdits]()
    for (kind, equations), own in groups.items():
        same = [one for one in groups if one[0] == kind]
        name = kind if len(same) == 1 else f"{kind}_{same.index((kind, equations)) + 1}"
        arms = [arm for step, modules in _by_step(own).items() for arm in _arms(selectors, modules, step)]
        body = equations[0] if len(equations) == 1 else "\n    ".join(("", *equations)) + "\n"
        tail = f" {{ {body} }}" if len(equations) == 1 else f" {{{body}}}"
        edits.append(SiteEdits(name, statement(f"edit {name} at ", arms, tail), {p.site.path: p for p in own}))
    return edits


def _by_step(parts: Iterable[SitePart]) -> dict[str, list[str]]:
    steps: dict[str, list[str]] = {}
    for part in parts:
        steps.setdefault(part.site.steps[-1][0], []).append(part.site.module)
    return steps


def _arms(selectors: Selectors, modules: list[str], step: str) -> list[str]:
    text = selectors.text(modules, step)
    if text is None:
        raise unfit(f"no selector names `{modules[0]}` and the others like it alone")
    return text.split(" | ")


def form_texts(edits: Iterable[SiteEdits]) -> list[str]:
    """Each form that edits call, once."""
    parts = (part for edit in edits for part in edit.parts.values())
    return [f"{text}\n" for text in dict.fromkeys(form.strip() for part in parts for form in part.forms)]


@torch.no_grad()
def fill_sites(model: nn.Module, edits: list[SiteEdits]) -> int:
    """Gives the parameters of forms the tensors themselves, in their dtypes. Raises: P804.

    Returns: how many tensors the parts have.
    """
    record, filled = installation_of(model), set[str]()
    parts = {(edit.name, path): part for edit in edits for path, part in edit.parts.items()}
    for site_edit in record.site_edits:
        part = parts.pop((site_edit.edit, site_edit.site.path), None)
        if part is None:
            raise unfit(f"`{site_edit.edit}` is at `{site_edit.site.path}`, for which the adapter has no tensors")
        for saved, name, parameter in site_parameters(model, record, site_edit):
            tensor = part.tensors.get(name)
            if tensor is None:
                raise unfit(f"`{site_edit.site.path}` has no tensor for `{name}`")
            assign(parameter, tensor, f"{site_edit.site.path}/{name}")
            filled.add(saved)
    if parts:
        raise unfit(f"`{next(iter(parts))[1]}` is not among the sites that the edits change")
    for form in model.modules():
        if isinstance(form, BufferModule):
            form.get_buffer(FILLED).fill_(True)
    notify_forms(model)
    return len(filled)


def site_parameters(model: nn.Module, record: Installation, site_edit: SiteEdit) -> Iterator[tuple[str, str, Tensor]]:
    """The parameters of an edit at a site, also those that other sites have, too, and its buffers:
    the name under which each is saved, and `form.parameter`.
    """
    for instance in site_edit.instances:
        for owner in dict.fromkeys((site_edit.owner_path, instance.owner)):
            place = record.form_modules.get(f"{site_edit.edit}/{owner}/{instance.key}")
            for name, parameter in _saved(model.get_submodule(place)) if place is not None else ():
                yield f"{site_edit.edit}/{owner}/{instance.key}.{name}", f"{instance.key}.{name}", parameter


def _saved(form: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from form.named_parameters()
    if isinstance(form, BufferModule):
        yield from ((name, form.get_buffer(name)) for name in form.adapter())


def assign(parameter: Tensor, tensor: Tensor, name: str) -> None:
    """Raises: P561 for infinite or NaN values, P804 for another shape."""
    if parameter.numel() != tensor.numel():
        raise unfit(f"`{name}` is {list(tensor.shape)} in the adapter, and {list(parameter.shape)} is expected")
    check_tensors({name: tensor}, {name: tensor})
    parameter.data = tensor.detach().reshape(parameter.shape).contiguous().clone()
