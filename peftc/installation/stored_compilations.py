"""Compilations that other processes can use: the site table, and how edits rewrite which modules.

Only regions are stored that are edited at their boundaries, such as Linears with LoRA: their
classes need no trace. Everything else is made anew: the plan, generated classes and parameters.
A stored compilation was free of errors, and so is a model with the same state. Source files,
versions and patches are compared as those of tables are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch

from peftc.addressing.sites import SiteTable
from peftc.cache.entries import FORMAT, read, write
from peftc.cache.environment import environment
from peftc.cache.location import cache_folder
from peftc.cache.table_json import decode, decode_table, encode, encode_table
from peftc.equations.table import built_in_texts, registered_forms
from peftc.installation.cached_analysis import keep_latest, source_key
from peftc.installation.compilations import Compilation
from peftc.installation.model_state import ModelState, NotComparable, StateText, state_text
from peftc.models.sources import ModelSource
from peftc.planning import ir
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.representatives import SiteEdits
from peftc.rewriting.anchors import Anchor
from peftc.rewriting.edits import Region, RegionEdit, RegionState
from peftc.rewriting.region_list import RegionBlock, RegionList, RegionTemplate
from peftc.syntax import ast
from peftc.syntax.printer import print_spec

MOST = 8  # compilations that are kept in this process

_recent: list[tuple[object, Compilation]] = []  # the latest is last
_BOUNDARIES = ("in", "out")


class Storage:
    """Where the compilation of a spec onto a model is stored, here and for other processes."""

    def __init__(self, source: ModelSource, state: ModelState, spec: ast.Spec, tasks: tuple[str, ...]) -> None:
        self.source, self.state, self.spec, self.tasks = source, state, spec, tasks

    @classmethod
    def of(
        cls, source: ModelSource, state: ModelState | None, spec: ast.Spec, tasks: tuple[str, ...]
    ) -> Storage | None:
        """None if there is no cache, or the model or a form has code that may change."""
        if state is None or cache_folder() is None or registered_forms(spec):
            return None
        storage = cls(source, state, spec, tasks)
        return None if storage.own_key not in map(itemgetter(0), _recent) and storage.text is None else storage

    @cached_property
    def own_key(self) -> tuple[Any, ...]:
        """All that a compilation depends on in this process, whose libraries do not change."""
        spec, options = self.spec, (torch.get_default_dtype(), cache_folder(), self.tasks)
        origins = [getattr(s, "origin", None) for s in spec.statements]
        return source_key(self.source), options, spec, spec.source, origins, self.state

    @cached_property
    def text(self) -> StateText | None:
        try:
            return state_text(self.state)
        except NotComparable:
            return None

    @cached_property
    def key(self) -> Mapping[str, Any]:
        """All that a compilation depends on."""
        assert self.text is not None
        source = self.source
        model = [source.id, source.kind, source.type, str(source.folder)]
        texts = "\n".join([print_spec(self.spec), *built_in_texts(self.spec).values()])
        printed = hashlib.sha256(texts.encode()).hexdigest()
        compilation = [model, self.text.sha256, printed, self.tasks]
        return {"format": FORMAT, "compilation": compilation, "environment": environment()}

    def read(self) -> Compilation | None:
        """What an earlier compilation has stored."""
        entry = next((entry for entry in _recent if entry[0] == self.own_key), None)
        if entry is None:
            stored = read(self.key, lambda entry: (decode_table(entry["table"]), entry["regions"], entry["edits"]))
            compilation = None if stored is None else _decoded(*stored, self.spec, self.tasks)
            if compilation is None:
                return None
            entry = (self.own_key, compilation)
        keep_latest(_recent, entry, MOST)
        return entry[1]

    def write(self, compilation: Compilation, table: SiteTable) -> None:
        """Stores a compilation that came of a trace, if all regions are edited at boundaries."""
        planned = compilation.planned
        if needs_graphs(planned.site_edits):
            return
        with suppress(ValueError, TypeError, LookupError):
            regions, edits = _encoded(compilation.regions, planned.site_edits)

            def content() -> dict[str, Any]:
                return {"table": encode_table(table), "regions": regions, "edits": edits}

            write(lambda: self.key, content, () if self.text is None else self.text.classes)


def _decoded(
    table: SiteTable, regions: Mapping[str, Any], edits: list[Any], spec: ast.Spec, tasks: tuple[str, ...]
) -> Compilation | None:
    """None for regions that do not fit the edits of the spec."""
    planned = plan_on_table(table, spec, tasks, is_valid=True)
    with suppress(ValueError, TypeError, LookupError):
        decoded = _decoded_regions(regions, edits, planned.site_edits)
        return Compilation(planned, lambda: decoded)
    return None


def _encoded(regions: RegionList, site_edits: SiteEdits) -> tuple[dict[str, Any], list[Any]]:
    """Regions, and the states of edits, each once. Raises: ValueError for what is not stored."""
    templates = {id(block.template): block.template for block in regions.blocks}
    numbers = {key: number for number, key in enumerate(templates)}
    edits = _Edits()
    rows = [[t.group, [edits.row(r, _edits_of(t.group, site_edits)) for r in t.regions]] for t in templates.values()]
    places = [{id(layer): i for i, layer in enumerate(group.layers)} for group in site_edits.groups or ()]
    blocks: list[list[int]] = []
    for block in regions.blocks:
        group = block.template.group
        blocks.append([numbers[id(block.template)], 0 if group is None else places[group][id(block.layer)]])
    return {"templates": rows, "blocks": blocks}, edits.data


def _edits_of(group: int | None, site_edits: SiteEdits) -> Sequence[ir.SiteEdit]:
    """The edits that regions of a group are for. Raises: LookupError for an unknown group."""
    if group is None:
        return site_edits
    return (site_edits.groups or ())[group].site_edits


class _Edits:
    """The states of edits, equal ones once."""

    def __init__(self) -> None:
        self.data: list[Any] = []
        self.texts: dict[str, int] = {}
        self.known: dict[int, int] = {}  # the texts of edits, which layers of one type share
        self.numbers: dict[int, dict[int, int]] = {}

    def row(self, region: Region, site_edits: Sequence[ir.SiteEdit]) -> list[Any]:
        if region.inline or region.position_sites:
            raise ValueError
        if (numbers := self.numbers.get(id(site_edits))) is None:
            numbers = self.numbers[id(site_edits)] = {id(one): number for number, one in enumerate(site_edits)}
        row: list[Any] = [region.module]
        for edit, site_edit in zip(region.edits, region.site_edits, strict=True):
            row += [numbers[id(site_edit)], self.number(edit)]
        return row

    def number(self, edit: RegionEdit) -> int:
        if id(edit) not in self.known:
            states = [[name, *_encoded_state(state)] for name, state in edit.states.items()]
            one = [edit.slug, states, dict(edit.functions)]
            if (number := self.texts.setdefault(repr(one), len(self.texts))) == len(self.data):
                self.data.append(one)
            self.known[id(edit)] = number
        return self.known[id(edit)]


def _encoded_state(state: RegionState) -> list[Any]:
    anchor = None if state.anchor is None else _encoded_anchor(state.anchor)
    names = [list(map(_encoded_anchor, anchors)) for anchors in (state.definitions, state.aliases)]
    plain = (state.rows, state.size, state.flat, state.image, state.dims, state.kernel, state.weight, state.overwritten)
    return [anchor, *names, *map(encode, plain)]


def _encoded_anchor(anchor: Anchor) -> list[Any]:
    if anchor.kind not in _BOUNDARIES or not all(isinstance(part, str | int) for part in anchor.key):
        raise ValueError(anchor)
    return [anchor.kind, anchor.module, *anchor.key]


def _decoded_regions(regions: Mapping[str, Any], edits: list[Any], site_edits: SiteEdits) -> RegionList:
    known: dict[object, RegionEdit] = {}
    data = [(slug, {name: _decoded_state(*parts) for name, *parts in states}, fs) for slug, states, fs in edits]

    def decoded(row: list[Any], own_edits: Sequence[ir.SiteEdit]) -> Region:
        module, *pairs = row
        own: list[tuple[RegionEdit, ir.SiteEdit]] = []
        for number, which in zip(pairs[::2], pairs[1::2], strict=True):
            p, (slug, states, functions) = own_edits[number], data[which]
            key = which, p.edit, id(p.assigns), id(p.lets)
            if key not in known:
                keys = tuple(instance.key for instance in p.instances)
                known[key] = RegionEdit(p.edit, slug, p.assigns, states, functions, keys, p.lets)
            own.append((known[key], p))
        return Region(module, frozenset(), [edit for edit, _ in own], [p for _, p in own])

    groups = site_edits.groups or ()
    layers = {number: group.layers for number, group in enumerate(groups)} | {None: (None,)}
    templates: list[RegionTemplate] = []
    for group, rows in regions["templates"]:
        own_edits = _edits_of(group, site_edits)
        own = tuple(decoded(row, own_edits) for row in rows)
        templates.append(RegionTemplate(own, group, layers[group][0]))
    blocks = ((templates[number], layer) for number, layer in regions["blocks"])
    return RegionList(RegionBlock(template, layers[template.group][layer]) for template, layer in blocks)


def _decoded_state(anchor: Any, definitions: Any, aliases: Any, *plain: Any) -> RegionState:
    rows, size, flat, image, dims, kernel, weight, overwritten = map(decode, plain)
    first, others = (tuple(map(_decoded_anchor, anchors)) for anchors in (definitions, aliases))
    own = None if anchor is None else _decoded_anchor(anchor)
    return RegionState(own, rows, size, flat, image, dims, kernel, weight, first, others, overwritten)


def _decoded_anchor(data: list[Any]) -> Anchor:
    kind, module, *key = data
    return Anchor(kind, module, tuple(key))
