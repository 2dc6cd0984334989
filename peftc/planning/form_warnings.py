"""Warnings of forms at sites that they are not meant for: P220, P325."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import plural
from peftc.planning.foldability.affine import is_linear, is_table
from peftc.planning.ir import FormCall, Read, SiteEdit, Term, subterms
from peftc.syntax import ast
from peftc.syntax.printer import print_selector
from peftc.syntax.vocabulary import DECODER, EVERY_MODULE, LINEAR
from peftc.syntax.walk import arms


def linear_form_warnings(edit: ast.Edit, site_edits: Sequence[SiteEdit]) -> Iterator[Diagnostic]:
    """P220, one for each call of a form that is affine in `x`, where `h` is not."""
    calls: dict[Span, list[SiteEdit]] = defaultdict(list)
    for site_edit in site_edits:
        if not _has_parameters(site_edit.site) or is_linear(site_edit.site) or is_table(site_edit.site):
            continue
        for span in dict.fromkeys(term.source.span for term in site_edit.terms() if _maps_input(term)):
            calls[span].append(site_edit)
    for span, places in calls.items():
        yield _warning(edit, span, places, sum(one.count for one in site_edits))


def token_mean_warnings(edit: ast.Edit, site_edits: Sequence[SiteEdit]) -> Iterator[Diagnostic]:
    """P325, one for each call of a form with a mean over tokens, in a decoder."""
    calls: dict[Span, tuple[str, SiteEdit]] = {}
    for site_edit in site_edits:
        if site_edit.site.steps[0][0] == DECODER:
            for call in (term for term in site_edit.terms() if isinstance(term, FormCall)):
                if call.instance.form.joins_tokens:
                    calls.setdefault(call.source.span, (call.instance.form.name, site_edit))
    for span, (name, first) in calls.items():
        message = f"`{name}` has a mean over the tokens of a call, and tokens of a decoder attend to earlier ones alone"
        notes = ("each token depends on later ones, and on padding", "with a cache it is the mean of the new tokens")
        help_ = "call the model with `use_cache=False`, and without padding; or edit an encoder"
        label = f"e.g. at `{first.site.path}`"
        yield Diagnostic("P325", message, span, label=label, notes=notes, help=help_, severity="warning")


def _has_parameters(site: Site) -> bool:
    """Whether the site is a module with parameters of its own, and not a sub-layer."""
    return any(state.weight is not None for state in site.states.values())


def _maps_input(term: Term) -> bool:
    """Whether a term is a form that a Linear's weight could hold: affine in `x`."""
    if not isinstance(term, FormCall) or term.instance.form.not_affine(term.instance.args, term.instance.dims):
        return False
    return term.input is not None and any(isinstance(one, Read) and one.state == "x" for one in subterms(term.input))


def _warning(edit: ast.Edit, span: Span, places: Sequence[SiteEdit], every: int) -> Diagnostic:
    count, first = sum(one.count for one in places), places[0].site
    call = next(t for t in places[0].terms() if isinstance(t, FormCall) and t.source.span == span)
    name = call.instance.form.name
    are_none = f"{count} of {every} sites {'are' if count > 1 else 'is'} none"
    are_none = f"none of {plural(every, 'site')} is one" if count == every else are_none
    message = f"`{name}` is for Linears, and {are_none}"
    note = f"such as `{first.path}`, the module `{first.module}`: no weight of it can hold `{name}`"
    paths = [arm for arm in arms(edit.selector) if isinstance(arm, ast.Path)]
    help_ = "name the Linears alone; a norm takes `h *= vector(init=1)`, or `train norms = [w, b] at …`"
    if (path := next((path for path in paths if path.steps[-1].name == EVERY_MODULE), None)) is not None:
        help_ = f"write `{print_selector(path)}.{LINEAR}`: the Linears and nothing else"
    label = f"it stays beside {'these modules' if count > 1 else 'the module'}"
    return Diagnostic("P220", message, span, label=label, notes=(note,), help=help_, severity="warning")
