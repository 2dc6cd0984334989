"""What of an equation is wrong at any site: the planner says it of the sites of a model."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.form import Args, Form
from peftc.semantics.arguments import bind
from peftc.semantics.layer_values import variants
from peftc.syntax import ast
from peftc.syntax.numbers import COMPARISONS, numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import CONCAT, PARAMETERS, STATES, WEIGHT_AND_BIAS
from peftc.syntax.walk import children, names_in, walk

_OF_WEIGHTS = (*PARAMETERS, WEIGHT_AND_BIAS)
_ACTIVATIONS = frozenset(STATES) - {*_OF_WEIGHTS}


def equation_errors(line: ast.Equation, forms: Mapping[str, Form]) -> Iterator[Diagnostic]:
    """P301 for a weight that is computed from activations, P303 for keys and values without a
    `concat`, P310 for a form of activations of a weight.
    """
    target, value = line.target, line.value
    is_concat = isinstance(value, ast.Call) and value.function == CONCAT
    if target == "kv" and not is_concat and isinstance(value, ast.Call) and value.function in forms:
        present = {keyword.name for keyword in value.kwargs}
        missing = [one.name for one in forms[value.function].arguments if one.required and one.name not in present]
        whole = replace(value, kwargs=(*value.kwargs, *(ast.Keyword(name, ast.Name("…")) for name in missing)))
        help_ = f"write `kv = concat({print_expression(whole)}, kv)`"
        message = "keys and values are changed by `concat` only"
        yield Diagnostic("P303", message, value.span, label="not a `concat`", help=help_)
    if target not in _OF_WEIGHTS:
        return
    for call in (node for node in walk(value) if isinstance(node, ast.Call) and node.function in forms):
        inputs = {one.id for one in call.args if isinstance(one, ast.Name)}
        help_ = f"write `h += {call.function}(x, …)`, or of the weight alone `{target} += lowrank(…)`"
        if read := sorted(inputs & _ACTIVATIONS):
            message = f"`{target}` is the same for all inputs, and `{call.function}` reads `{read[0]}`"
            yield Diagnostic("P301", message, call.span, help=help_)
        elif inputs & {*_OF_WEIGHTS} and forms[call.function].inputs[:1] == ("x",):
            message = f"`{call.function}` reads a hidden state, and `{target}` is none"
            yield Diagnostic("P310", message, call.span, help=help_)


def replacement_warnings(edit: ast.Edit, forms: Collection[str]) -> Iterator[Diagnostic]:
    """P320 for `h = lora(x)`: what the site computes is thrown away, and a form is left.

    A value that reads the state, or has another state beside the form, is meant to replace it, and
    so is a head.
    """
    if isinstance(edit.selector, ast.Path) and edit.selector.steps[-1].name == "head":
        return
    values: dict[str, ast.Expr] = {}
    for line in edit.body:
        if isinstance(line, ast.Let):
            values[line.name] = line.value
            continue
        if line.op != "=" or line.target in (*_OF_WEIGHTS, "kv"):
            continue
        beside, calls = set[str](), list[str]()
        _collect(line.value, values, forms, beside, calls)
        if calls and not beside and line.target not in _read(line.value, values):
            message = f"`{line.target} = …` throws away the `{line.target}` that the site computes"
            label = f"`{calls[0]}(…)` is all that is left"
            help_ = f"write `{line.target} += …` to add it"
            yield Diagnostic("P320", message, line.span, label=label, help=help_, severity="warning")


def _collect(
    value: ast.Expr, values: Mapping[str, ast.Expr], forms: Collection[str], beside: set[str], calls: list[str]
) -> None:
    """The states that a value has outside of calls, and the forms that it calls."""
    match value:
        case ast.Name(name) if name in values:
            _collect(values[name], values, forms, beside, calls)
        case ast.Name(name):
            beside.add(name)
        case ast.Call(function) if function in forms:
            calls.append(function)
        case ast.Call(function):
            beside.add(function)
        case _:
            for part in children(value):
                _collect(part, values, forms, beside, calls)


def _read(value: ast.Expr, values: Mapping[str, ast.Expr]) -> set[str]:
    """The names that a value reads, by way of lets, too."""
    names, todo = set[str](), [*names_in(value)]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += names_in(values[name]) if name in values else ()
    return names


def presence_errors(call: ast.Call, form: Form) -> Iterator[Diagnostic]:
    """P317 for arguments of which a form requires one, or none beside another."""
    text: object = getattr(form, "form", None)  # of a form that is a text
    if not isinstance(text, ast.Form):
        return
    try:
        args = form.fill(bind(next(variants(call)), form).args)
    except PeftcError:  # which is reported
        return
    for line in text.body:
        if not isinstance(line, ast.Require) or not isinstance(line.left, ast.Name) or not _is_none(line.right):
            continue
        if line.op not in ("==", "!=") or not _holds(line.condition, args):
            continue
        name, is_there = line.left.id, args.get(line.left.id) is not None
        if name in args and is_there == (line.op == "=="):
            where = "" if line.condition is None else f" with `{_shown(line.condition)}`"
            verb, help_ = ("takes no", f"leave out `{name}`") if is_there else ("needs", f"add `{name}=…`")
            keyword = next((one for one in call.kwargs if one.name == name), None)
            span = keyword.span if keyword is not None else call.function_span
            yield Diagnostic("P317", f"`{form.name}` {verb} `{name}`{where}", span, help=help_)
            return


def _is_none(value: ast.Expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "none"


def _shown(condition: ast.Condition) -> str:
    right = "" if condition.right is None else f" {condition.op} {print_expression(condition.right)}"
    return f"{print_expression(condition.left)}{right}"


def _holds(condition: ast.Condition | None, args: Args) -> bool:
    """Whether a condition on arguments holds; False for one that depends on shapes."""
    if condition is None:
        return True
    if any(name not in args and name != "none" for name in names_in(condition.left)):
        return False
    left = args.get(condition.left.id) if isinstance(condition.left, ast.Name) else None
    match condition.right:
        case None:
            return left is True
        case ast.Name("none"):
            right: object = None
        case ast.Name(word):
            right = word
        case ast.Number():
            right = numeric_value(condition.right)
        case ast.Boolean(right):
            pass
        case _:
            return False
    return condition.op in ("==", "!=") and COMPARISONS[condition.op](left, right)
