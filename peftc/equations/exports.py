"""What an adapter has in the place of a form: the lines `save` of its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from peftc.diagnostics.record import record
from peftc.equations.analysis import Place
from peftc.equations.table import FORMS
from peftc.equations.values import FormError
from peftc.equations.words import NONE, POSITIONS
from peftc.forms.form import Args, Dims, Form, PlacementError
from peftc.syntax import ast

_OPPOSITES = {"==": "!=", "!=": "=="}


@record()
class Export:
    """A form that is saved in the place of another.

    Attributes:
        form: the form that is saved.
        line: where the text says so.
        arguments: those of its call, by the names that they have in the call of the other form.
    """

    form: Form
    line: ast.Save
    arguments: Mapping[str, str]

    def sizes(self, args: Args, dims: Dims) -> dict[str, tuple[int, ...]]:
        """The sizes of its parameters at a place. Raises: PlacementError where it cannot stand."""
        own = self.form.fill({new: args[old] for old, new in self.arguments.items() if old in args})
        self.form.shape(own, dims)
        return {
            p.name: p.size
            for p in self.form.parameters(own, dims)
            if p.role in ("trained", "state") and p.size is not None
        }


def export_of(form: Form, text: ast.Form, args: Args) -> Export | None:
    """What is saved in the place of a call; None if it is the form itself, with its parameters."""
    for line in text.body:
        if isinstance(line, ast.Save) and may_hold(line.condition, args):
            saved = form if line.call.function == text.name else FORMS[line.call.function]
            if saved is form and all(_is_own(keyword, form, text, args) for keyword in line.call.kwargs):
                return None
            pairs = ((k.value.id, k.name) for k in line.call.kwargs if isinstance(k.value, ast.Name))
            known = {old: new for old, new in pairs if saved.argument(new) is not None}
            return Export(saved, line, known | {"dtype": "dtype"})
    return None


def check_export(export: Export | None, place: Place, args: Args, dims: Dims) -> None:
    """Raises: FormError P301 if what a form saves is not what the other form has."""
    if export is None:
        return
    own = {name: place.type_of(node).size for name, node in (place.saved or {}).items()}
    try:
        wanted = export.sizes(args, dims)
    except PlacementError as error:
        raise FormError(error.code, error.message, export.line) from None
    if own != wanted:
        shown = [", ".join(f"{n} {list(size)}" for n, size in sizes.items()) for sizes in (own, wanted)]
        message = f"it saves {shown[0] or 'nothing'}, and `{export.form.name}` has {shown[1] or 'nothing'}"
        raise FormError("P301", message, export.line)


def _is_own(keyword: ast.Keyword, form: Form, text: ast.Form, args: Args) -> bool:
    """Whether a form saves an argument, or a parameter, as it is."""
    if keyword.value != ast.Name(keyword.name) or form.argument(keyword.name) is not None:
        return keyword.value == ast.Name(keyword.name)
    own = (line for line in text.body if isinstance(line, ast.Parameter) and line.name == keyword.name)
    return any(may_hold(line.condition, args) for line in own)


def may_hold(condition: ast.Condition | None, args: Args) -> bool:
    """Whether a condition holds with these arguments, as far as they decide it."""
    if condition is None or not isinstance(condition.left, ast.Name) or condition.left.id not in args:
        return True
    value, right = args[condition.left.id], condition.right
    if right is None:
        return bool(value)
    if condition.op not in ("==", "!=") or not isinstance(right, ast.Name | ast.Boolean):
        return True
    other = right.value if isinstance(right, ast.Boolean) else None if right.id == NONE else right.id
    return (value == other) == (condition.op == "==")


def are_alternatives(lines: Sequence[ast.Parameter]) -> bool:
    """Whether a form has parameters of each site, or else parameters in common: never both."""
    own, common = ([line for line in lines if is_common == bool(line.scope)] for is_common in (False, True))
    return bool(own and common) and all(_exclude(a.condition, b.condition) for a in own for b in common)


def _exclude(one: ast.Condition | None, other: ast.Condition | None) -> bool:
    """Whether at most one of two conditions holds."""
    if one is None or other is None or one.right is None or other.right is None:
        return False
    return (one.left, one.right) == (other.left, other.right) and _OPPOSITES.get(one.op) == other.op


def has_ends(calls: Iterable[ast.Call], args: Args) -> bool:
    """Whether a call of `positions` has an end or a token, with these arguments."""
    return any(
        end != ast.Name(NONE) and not (isinstance(end, ast.Name) and args.get(end.id, end) is None)
        for call in calls
        if call.function == POSITIONS
        for end in call.args[1:]
    )
