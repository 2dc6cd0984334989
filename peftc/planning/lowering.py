"""Lowers an edit at a site: from the AST to typed equations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, Span
from peftc.forms.shapes import KeyValue
from peftc.planning.form_instances import FormInstances
from peftc.planning.ir import Assign, Concat, SiteEdit, Term
from peftc.planning.lowering_context import LoweringContext
from peftc.planning.selection.parameter_sites import body_at
from peftc.planning.term_lowering import TermLowering, error, quote
from peftc.semantics.walk import names_in
from peftc.syntax import ast

WRITABLE = frozenset({"h", "q", "k", "v", "kv", "z", "w", "b"})


def lower_edit(edit: ast.Edit, site: Site, context: LoweringContext) -> SiteEdit:
    """The typed equations of an edit at one site; `h += f` becomes `h = h + f`.

    Raises: P101, P105: no such form, or not a value. P205: no such state. P301: shapes that do not
    go together. P303: a misplaced `concat`, or misplaced keys and values. P305: shared parameters
    of two shapes. P306: a state that is read-only. P307: a frozen module that the site does not
    have. Also what `bind` and `Form.shape` raise.
    """
    instances = FormInstances(edit.name, site, context, context.tasks if edit.per_task else ())
    terms = TermLowering(edit.name, site, context, instances)
    assigns: list[Assign] = []
    lets: list[tuple[int, Term]] = []
    body = body_at(edit, site)
    for i, line in enumerate(body):
        if isinstance(line, ast.Equation):
            assigns.append(_assign(line, terms))
        elif (use := _first_use(line, body[i + 1 :])) is not None:
            terms.target = terms.state(*use)
            terms.lets[line.name] = terms.term(line.value)
            lets.append((len(assigns), terms.lets[line.name]))
    return SiteEdit(edit.name, site, tuple(assigns), tuple(instances.instances), tuple(lets))


def unused(edit: ast.Edit) -> Iterable[Diagnostic]:
    """P114 warnings: a `let` that no equation uses has no parameters and no effect."""
    for i, line in enumerate(edit.body):
        if isinstance(line, ast.Let) and _first_use(line, edit.body[i + 1 :]) is None:
            yield Diagnostic("P114", f"`{line.name}` is never used", line.span, help="remove it", severity="warning")


def _first_use(let: ast.Let, rest: Sequence[ast.Equation | ast.Let]) -> tuple[str, Span] | None:
    """What the first equation that uses a `let` writes; the shapes of its forms follow from it."""
    used = {let.name}
    for line in rest:
        if not used & set(names_in(line.value)):
            continue
        if isinstance(line, ast.Equation):
            return line.target, line.target_span
        used.add(line.name)
    return None


def _assign(equation: ast.Equation, terms: TermLowering) -> Assign:
    terms.target = target = terms.state(equation.target, equation.target_span)
    if target.name not in WRITABLE:
        help_ = "write `h`, the state that the site computes" if "h" in terms.site.states else None
        message = f"`{target.name}` cannot be written: it is what the site reads"
        raise error("P306", message, equation.target_span, help=help_)
    value = terms.term(equation.value)
    if equation.op != "=":
        read = terms.read(equation.target, equation.target_span)
        value = terms.arithmetic("+" if equation.op == "+=" else "*", read, value, equation.value)
    if isinstance(target.shape, KeyValue) and isinstance(value.shape, KeyValue) and not isinstance(value, Concat):
        message = "keys and values are changed by `concat` only"
        help_ = "write `kv = concat(prefix(…), kv)`; `k` and `v` can be scaled one by one"
        raise error("P303", message, equation.value.span, label="not a `concat`", help=help_)
    if value.shape != target.shape:
        message = f"`{target.name}` of `{terms.site.path}` is {target.shape}, but the value is {value.shape}"
        notes = (f"`{target.name}` is {target.shape}", f"`{quote(value.source)}` is {value.shape}")
        raise error("P301", message, equation.value.span, label=f"{value.shape}", notes=notes)
    return Assign(target.name, value, equation)
