"""The first runs of a pass, on the traces of the layers: they show what it needs at each site."""

from __future__ import annotations

import torch

from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_copy
from peftc.forms.shapes import Scalar
from peftc.planning import ir
from peftc.planning.lowering_context import path_spot
from peftc.planning.pass_edit import PassEdit, equation_of, pass_edit
from peftc.planning.pass_form import Pass, PassForm
from peftc.planning.selection.selectors import resolve
from peftc.recognition.layer_types import LayerType, has_parts
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.edits import RegionEdit, module_name
from peftc.rewriting.insert import Inserter
from peftc.rewriting.passes.region import completed
from peftc.rewriting.passes.run import check_repeated, insert_pass
from peftc.rewriting.regions import LayerRegions
from peftc.syntax import ast
from peftc.tracing.tracer import RegionTracer


def first_runs(
    name: str, function: Pass, selector: ast.Selector, table: SiteTable, structure: ModelStructure
) -> PassEdit:
    """A pass at the sites of a selector, as a statement.

    Raises: P201-P203 (the selector), P440-P445.
    """
    if not callable(function):  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"a pass is a function of a region, not a {type(function).__name__}"
        raise PeftcError(Diagnostic("P440", message, help="`def tap(region): …`"))
    kinds = {root: kind for s in structure.stacks for root, kind in zip(s.roots, s.kinds, strict=True)}
    by_layer: dict[str, list[Site]] = {}
    for site in table.sites:
        by_layer.setdefault(site.root, []).append(site)
    runs: dict[object, PassForm] = {}
    forms: list[tuple[str, PassForm]] = []
    for site in resolve(selector, table):
        layer, part, *_ = path_spot(site.path, 0, 0)
        kind = kinds.get(site.root)
        if kind is None or not layer or site.shared_with:
            message = f"a pass rewrites layers, and `{site.path}` is " + ("shared" if site.shared_with else "in none")
            raise PeftcError(Diagnostic("P445", message, help='name sites of layers: `at="layer[*].ffn"`'))
        key = (id(kind), part)
        form = runs.get(key)
        if form is None or form.layer:
            own = PassForm(name, function, (), part, by_layer[site.root])
            form = runs[key] = first_run(own, layer, kind, structure)
        forms.append((site.path, form))
    return pass_edit(name, selector, tuple(forms))


def first_run(form: PassForm, layer: str, kind: LayerType, structure: ModelStructure) -> PassForm:
    """The form of a pass at a site, with its members. It runs twice. Raises: P440-P445."""
    regions = LayerRegions(kind, form.layer_sites[0].root, {})
    slug = module_name("".join(c if c.isalnum() else "_" for c in form.site) or "layer")
    source = equation_of(form.name, "h")
    constant = ir.Constant(0.0, shape=Scalar(), source=source.value)
    assigns, states = (ir.Assign("h", constant, source),), regions.states_of_pass(form)
    edit = RegionEdit(form.name, slug, assigns, states, {}, (form.name,), (), form)
    runs: list[PassForm] = []
    with torch.inference_mode(False):  # whose tensors have no gradients
        for _ in range(2):
            tracer = RegionTracer(lambda name: has_parts(kind.root, name))
            with structure.mode:
                traced = tracer.trace_region(kind.root, fake_copy(kind.arguments, structure.mode))
            inserter = Inserter(traced)
            inserter.lookup.resolve([edit])
            runs.append(completed(form, insert_pass(inserter, edit, layer=layer)))
    check_repeated(*runs)
    return runs[0]
