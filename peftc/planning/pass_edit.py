"""A pass as a statement of a spec: an edit whose rewriting is a function of the program."""

from __future__ import annotations

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.record import record
from peftc.forms.form import Dims
from peftc.planning.ir import Assign, FormCall, FormInstance, Read, SiteEdit
from peftc.planning.pass_form import PassForm
from peftc.syntax import ast


@record()
class PassEdit(ast.Edit):
    """A pass at the sites of a selector. `forms`: what it has at each site, by the site's path."""

    forms: tuple[tuple[str, PassForm], ...] = ()


def pass_edit(name: str, selector: ast.Selector, forms: tuple[tuple[str, PassForm], ...] = ()) -> PassEdit:
    """The statement of a pass. Its text says what it changes: a state, by the pass of that name."""
    return PassEdit(name, selector, (equation_of(name, "h"),), forms=forms)


def equation_of(name: str, state: str) -> ast.Equation:
    """A pass as the equation of a state."""
    return ast.Equation(state, "=", ast.Call(name, (ast.Name(state),)))


def lower_pass(edit: PassEdit, site: Site, d_model: int) -> SiteEdit:
    """A pass at one site, which stands for a change of the state that the site computes.

    Raises: P445 where the pass has not been run, or the site has no state of a graph.
    """
    form = dict(edit.forms).get(site.path)
    state = site.states.get("h") or next((s for s in site.states.values() if s.activation is not None), None)
    if form is None or state is None:
        raise PeftcError(Diagnostic("P445", f"`{edit.name}` cannot be at `{site.path}`: no layer's graph has it"))
    source = equation_of(edit.name, state.name)
    read = Read(state.name, shape=state.shape, source=ast.Name(state.name))
    dims = Dims(state.shape, state.shape, d_model, runs=site.runs)
    instance = FormInstance(form.name, form, {}, dims)
    value = FormCall(instance, read, shape=state.shape, source=source.value)
    return SiteEdit(edit.name, site, (Assign(state.name, value, source),), (instance,))


def form_of_pass(site_edit: SiteEdit) -> PassForm | None:
    """The form of a pass at a site; None for another edit."""
    form = site_edit.instances[0].form if site_edit.instances else None
    return form if isinstance(form, PassForm) else None
