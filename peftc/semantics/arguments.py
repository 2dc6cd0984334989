"""A call in the text meets the row of its form: every argument is known, present, of its type and in its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms.registry import Form, Param, Value
from peftc.semantics.constants import constant
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression


@dataclass(frozen=True)
class BoundArguments:
    """A call that fits: its input (None where the form takes none) and a second one, and a value for every parameter of the form."""

    input: ast.Expr | None
    args: dict[str, Value]
    second: ast.Expr | None = None


def bind(call: ast.Call, form: Form, *, shared: bool = False) -> BoundArguments:
    """The arguments of `call` as `form` wants them, defaults filled in.

    `shared`: the call stands in `shared(…)`, where the input of the form is left to its uses.

    Raises:
        PeftcError: P102 unknown, P103 missing, P104 given twice, P105 wrong type, P106 value that is not allowed,
        P108 wrong number of inputs: everything that is wrong with the call. The spans are in the text of the call.
    """
    errors = list(_inputs(call, form, shared))
    args: dict[str, Value] = {}
    for keyword in call.kwargs:
        param = form.param(keyword.name)
        if param is None:
            errors.append(_unknown(keyword, form))
        elif keyword.name in args:
            message = f"`{keyword.name}` of `{form.name}` is given twice"
            errors.append(Diagnostic("P104", message, keyword.span, help="remove one of them"))
        else:
            try:
                args[keyword.name] = _value(keyword.value, param, form)
            except PeftcError as error:
                args[keyword.name] = param.default
                errors += error.diagnostics
    for param in form.params:
        if param.name not in args:
            args[param.name] = param.default
            if param.required and len(call.args) <= form.takes_input:  # else the value is there, without its name
                errors.append(_missing(call, param, form))
    if errors:
        raise PeftcError(errors)
    inputs = call.args if form.takes_input else ()
    return BoundArguments(inputs[0] if inputs else None, args, inputs[1] if len(inputs) > 1 else None)


def signature(form: Form) -> str:
    """`adapter(x, r, …)`: how a form is called."""
    inputs = (["h", "[x]"] if form.second else ["x"]) if form.takes_input else []
    return f"{form.name}({', '.join([*inputs, *(_shown(param) for param in form.params)])})"


def _shown(param: Param) -> str:
    default = param.default
    value = str(default).lower() if isinstance(default, bool) else "none" if default is None else str(default)
    return param.name if param.required else f"{param.name}={value}"


def _inputs(call: ast.Call, form: Form, shared: bool) -> Sequence[Diagnostic]:
    wanted = 1 if form.takes_input and not shared else 0
    if len(call.args) < wanted:
        at = call.function_span if call.function_span.end else call.span
        help_ = f"say what it reads: `{form.name}(x{', …' if call.kwargs else ''})` or `{form.name}(h{', …' if call.kwargs else ''})`"
        return [Diagnostic("P108", f"`{form.name}` has no input", at, help=help_)]
    most = wanted + 1 if wanted and form.second else wanted
    return [_surplus(value, form, shared) for value in call.args[most:]]


def _surplus(value: ast.Expr, form: Form, shared: bool) -> Diagnostic:
    if shared and form.takes_input:
        message, help_ = f"`{form.name}` has its input where it is used, not in `shared`", "leave it out here"
        return Diagnostic("P108", message, value.span, help=help_)
    what = "takes two inputs at most" if form.second else "takes one input" if form.takes_input else "takes no input"
    first = next((param for param in form.params if param.required), form.params[0] if form.params else None)
    is_value = not isinstance(value, ast.Name | ast.Call | ast.Binary)
    help_ = (
        f"did you mean `{first.name}={print_expression(value)}`?"
        if first and is_value
        else "arguments have names: " + signature(form)
    )
    return Diagnostic(
        "P108", f"`{form.name}` {what}, `{print_expression(value)}` is one too many", value.span, help=help_
    )


def _unknown(keyword: ast.Keyword, form: Form) -> Diagnostic:
    known = [param.name for param in form.params]
    message = f"`{form.name}` has no argument `{keyword.name}`"
    help_ = did_you_mean(keyword.name, known) or f"it has {join_names(known)}"
    return Diagnostic("P102", message, _name_span(keyword), help=help_, notes=(f"`{signature(form)}`",))


def _missing(call: ast.Call, param: Param, form: Form) -> Diagnostic:
    at = call.function_span if call.function_span.end else call.span
    message = f"`{form.name}` needs `{param.name}`: {param.doc}"
    return Diagnostic("P103", message, at, help=f"add `{param.name}=…`", notes=(f"`{signature(form)}`",))


def _name_span(keyword: ast.Keyword) -> Span:
    at, length = keyword.span, len(keyword.name)
    if at.end - at.start <= length:
        return at
    return Span(at.start, at.start + length, at.line, at.column, at.line, at.column + length)


def _value(value: ast.Expr, param: Param, form: Form) -> Value:
    is_none = isinstance(value, ast.Name) and value.id == "none"
    if is_none and "none" not in param.choices and param.default is None and not param.required:
        return None
    match param.type:
        case "int" | "float":
            return _in_range(_number(value, param, form), value, param, form)
        case "bool":
            if not isinstance(value, ast.Boolean):
                raise _wrong(value, param, form, "`true` or `false`")
            return value.value
        case "choice":
            return _choice(value, param, form)
        case "call":
            return _nested(value, param, form)


def _number(value: ast.Expr, param: Param, form: Form) -> int | float:
    number = constant(value)
    if number is None:
        raise _wrong(value, param, form, "a whole number" if param.type == "int" else "a number")
    if param.type == "int" and not isinstance(number, int):
        raise _wrong(value, param, form, "a whole number")
    return number if param.type == "int" else float(number)


def _in_range(number: int | float, value: ast.Expr, param: Param, form: Form) -> int | float:
    low, high = param.low, param.high
    too_low = low is not None and (number < low or (number == low and param.open in {"low", "both"}))
    too_high = high is not None and (number > high or (number == high and param.open in {"high", "both"}))
    if too_low or too_high:
        message = f"`{param.name}` of `{form.name}` must be {interval(param)}, found {print_expression(value)}"
        raise PeftcError(Diagnostic("P106", message, value.span, label=param.doc))
    return number


def interval(param: Param) -> str:
    """The range of a parameter, in words: at least 1, in [0, 1)."""
    low, high = (None if end is None else f"{end:g}" for end in (param.low, param.high))
    if low is not None and high is not None:
        left, right = "(" if param.open in {"low", "both"} else "[", ")" if param.open in {"high", "both"} else "]"
        return f"in {left}{low}, {high}{right}"
    if low is not None:
        return f"above {low}" if param.open in {"low", "both"} else f"at least {low}"
    return f"below {high}" if param.open in {"high", "both"} else f"at most {high}"


def _choice(value: ast.Expr, param: Param, form: Form) -> str:
    word = value.id if isinstance(value, ast.Name) else value.value if isinstance(value, ast.String) else None
    if isinstance(value, ast.Name) and value.id in param.choices:
        return value.id
    help_ = f"one of {join_names(param.choices, 'or')}"
    if isinstance(word, str) and word in param.choices:
        help_ = f"write it without quotes: `{param.name}={word}`"
    elif isinstance(word, str):
        help_ = did_you_mean(word, param.choices) or help_
    message = f"`{param.name}` of `{form.name}` cannot be `{print_expression(value)}`"
    raise PeftcError(Diagnostic("P106", message, value.span, label=f"one of {', '.join(param.choices)}", help=help_))


def _nested(value: ast.Expr, param: Param, form: Form) -> tuple[str, int]:
    wanted = join_names([f"{name}(…)" for name in param.choices], "or")
    if not isinstance(value, ast.Call):
        raise _wrong(value, param, form, wanted)
    if value.function not in param.choices:
        help_ = did_you_mean(value.function, param.choices) or f"one of {wanted}"
        message = f"`{param.name}` of `{form.name}` cannot be `{value.function}(…)`"
        raise PeftcError(Diagnostic("P106", message, value.function_span, help=help_))
    number = constant(value.args[0]) if len(value.args) == 1 and not value.kwargs else None
    if not isinstance(number, int):
        message = f"`{value.function}` takes one whole number, found `{print_expression(value)}`"
        raise PeftcError(Diagnostic("P105", message, value.span, help=f"e.g. `{param.name}={value.function}(512)`"))
    if number < 1:
        message = f"`{value.function}` takes a number of at least 1, found {number}"
        raise PeftcError(Diagnostic("P106", message, value.args[0].span))
    return value.function, number


def _wrong(value: ast.Expr, param: Param, form: Form, wanted: str) -> PeftcError:
    message = f"`{param.name}` of `{form.name}` must be {wanted}, found `{print_expression(value)}`"
    unknown = isinstance(value, ast.Name)
    help_ = f"no parameter and no constant is called `{value.id}`" if isinstance(value, ast.Name) and unknown else None
    return PeftcError(Diagnostic("P105", message, value.span, label=param.doc, help=help_))
