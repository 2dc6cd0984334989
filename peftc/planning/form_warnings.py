"""Warnings of forms at sites not meant for them (P220, P325), or that never train (P326)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import plural
from peftc.equations.checks.first_gradients import never_trains
from peftc.equations.definition import TextForm
from peftc.planning.assignments import initial_value
from peftc.planning.foldability.affine import is_linear, is_table
from peftc.planning.ir import Arithmetic, Constant, FormCall, FormInstance, Read, SiteEdit, Term, children_of, subterms
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


def untrained_warnings(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterator[tuple[ast.Edit, Diagnostic]]:
    """P326, one for each call of a form that never trains, and for each edit whose forms multiply
    each other and are all 0 at first.
    """
    trained = {owner for _, site_edits in edits for one in site_edits for owner in _trained_owners(one)}
    for edit, site_edits in edits:
        calls: dict[Span, tuple[FormCall, SiteEdit]] = {}
        for site_edit in site_edits:
            untrained = [call for call in _calls(site_edit) if _never_trains(call.instance)]
            untrained = untrained or ([] if any(map(_reach, _values(site_edit))) else _calls(site_edit)[:1])
            for call in untrained:
                if not trained & {*call.instance.owners()}:
                    calls.setdefault(call.source.span, (call, site_edit))
        for span, (call, site_edit) in calls.items():
            yield edit, _untrained(call, span, site_edit)


def _untrained(call: FormCall, span: Span, site_edit: SiteEdit) -> Diagnostic:
    name = call.instance.form.name
    if _never_trains(call.instance):
        message = f"`{name}` never trains: the derivative to each of its parameters is 0 when training starts"
        help_ = f"let one factor of `{name}` start at other values: `= kaiming`, `= normal(0.02)`, `= ones`"
    else:
        message = f"no form of `{site_edit.edit}` ever trains: what multiplies each is 0 when training starts"
        help_ = "let one of the forms start at other values: `init=1`"
    note = "each term of it has a factor that is 0 at first, for every input"
    return Diagnostic(
        "P326", message, span, label=f"e.g. at `{site_edit.site.path}`", notes=(note,), help=help_, severity="warning"
    )


def _trained_owners(site_edit: SiteEdit) -> Iterator[str]:
    """The owners of parameters that a gradient reaches here, which changes them for all sites."""
    if any(map(_reach, _values(site_edit))):
        for call in _calls(site_edit):
            if not _never_trains(call.instance):
                yield from call.instance.owners()


def _values(site_edit: SiteEdit) -> Iterator[Term]:
    return (assign.value for assign in site_edit.assigns)


def _calls(site_edit: SiteEdit) -> list[FormCall]:
    """The calls of forms with parameters that are trained."""
    calls = (term for term in site_edit.terms() if isinstance(term, FormCall))
    return [call for call in calls if _is_trained(call.instance)]


def _is_trained(instance: FormInstance) -> bool:
    """Whether it has trained parameters, of its own or in common with other sites or tasks."""
    form, args, dims = instance.form, instance.args, instance.dims
    return any(count(args, dims).trained for count in (form.count, form.common_count, form.tasks_count))


def _never_trains(instance: FormInstance) -> bool:
    form = instance.form
    return isinstance(form, TextForm) and never_trains(form.at(form.fill(instance.args), instance.dims))


def _reach(term: Term) -> bool:
    """Whether a gradient of a term reaches a parameter when training starts."""
    match term:
        case FormCall(instance=instance, inputs=inputs):
            return (_is_trained(instance) and not _never_trains(instance)) or any(map(_reach, inputs))
        case Arithmetic(op="*", left=left, right=right):
            return (_reach(left) and not _is_zero(right)) or (_reach(right) and not _is_zero(left))
        case Arithmetic(op="/", left=left, right=right):
            return _reach(left) or (_reach(right) and not _is_zero(left))
        case _:
            return any(map(_reach, children_of(term)))


def _is_zero(term: Term) -> bool:
    """Whether a term is 0 when training starts. The number 0 of `[1, 0] * lora(x)` is meant."""
    return not isinstance(term, Constant) and initial_value(term, defaultdict(lambda: None), {}) == 0


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
