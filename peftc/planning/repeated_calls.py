"""What cannot be edited where a layer computes several times with one weight."""

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Scalar
from peftc.planning.ir import SiteEdit
from peftc.syntax import ast


def check_calls_of_weight(edit: ast.Edit, site_edit: SiteEdit) -> None:
    """Raises: P218 where an edit would act at one of several uses of a weight, P219 where it needs
    examples or positions that are not known at a call.
    """
    site = site_edit.site
    if site.calls == 1:
        return
    states = site_edit.reads() | {assign.state for assign in site_edit.assigns}
    if not site.is_of_every_call and any(site.states[name].activation is not None for name in states):
        message = f"the layer reads the weight of `{site.path}` {site.calls} times in its own code"
        note = "an edit of `h` would act at one of these places, and the weight is one for all"
        help_ = "edit the weight, as in `w += lowrank(r=8)`: it is changed everywhere"
        raise PeftcError(Diagnostic("P218", message, edit.selector.span, notes=(note,), help=help_))
    if (reason := next(_reasons(edit, site_edit), None)) is not None:
        note = f"its layer calls `{site.module}` {site.calls} times, and an edit acts at each call"
        help_ = "edit the sub-layer around it"
        message = f"{reason} at a call of `{site.path}`"
        raise PeftcError(Diagnostic("P219", message, edit.selector.span, notes=(note,), help=help_))


def _reasons(edit: ast.Edit, site_edit: SiteEdit) -> Iterator[str]:
    """Why the equations have no meaning at some call: it reads no examples, or other tokens."""
    if any(one.selects_positions for one in site_edit.instances):
        yield f"`{edit.name}` selects tokens by their positions, which are not known"
    if site_edit.site.by_example or all(assign.state in ("w", "b") for assign in site_edit.assigns):
        return
    if edit.per_task:
        yield f"`{edit.name}` has parameters for each task, and the examples are not known"
    if any(isinstance(term.shape, Scalar) and term.shape.per_example for term in site_edit.terms()):
        yield f"`{edit.name}` has a factor for each example, and the examples are not known"
