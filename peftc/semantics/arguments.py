"""Binds the arguments of a call to the parameters of its form, like `inspect.Signature.bind`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from peftc.diagnostics import Diagnostic, PeftcError, Span, Suggestion
from peftc.diagnostics.suggestions import did_you_mean, join_names, nearest
from peftc.forms.form import Argument, ArgumentValue, Form
from peftc.semantics.substitute import constant
from peftc.syntax import ast
from peftc.syntax.numbers import is_number
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import state_name

_WHOLE = 100  # percent
_LARGEST = 1e25  # a whole number
_OF_PEFT = {  # what PEFT gives as an argument, and this language in another way
    **dict.fromkeys(("target_modules", "layers_to_transform"), "an edit names its modules behind `at`"),
    "modules_to_save": "`train NAME = [w, b] at SELECTOR` trains parameters of the base",
    "scale": "a scale is a factor: `2 * lora(x, r=8)`",
}


@dataclass(frozen=True)
class BoundArguments:
    """The inputs of a call (None without) and a value for every parameter of its form."""

    input: ast.Expr | None
    args: dict[str, ArgumentValue]
    second: ast.Expr | None = None


def bind(call: ast.Call, form: Form, *, shared: bool = False) -> BoundArguments:
    """Checks the arguments of `call` and adds the defaults.

    In `shared(…)`, whose uses supply the input, there is none.
    Raises: PeftcError: all of P102 unknown, P103 missing, P104 duplicate, P105 wrong type, P106 out
        of range, P108 wrong number of inputs. The spans are in the text of the call.
    """
    inputs = [keyword for keyword in call.kwargs if keyword.name in form.inputs]
    if inputs:
        raise PeftcError(_input_by_name(keyword, form) for keyword in inputs)
    errors = list(_input_errors(call, form, shared))
    args: dict[str, ArgumentValue] = {}
    meant = set[str | None]()  # by unknown names
    for keyword in call.kwargs:
        param = form.argument(keyword.name)
        if param is None:
            errors.append(_unknown(keyword, form))
            meant.add(nearest(keyword.name, [param.name for param in form.arguments]))
        elif keyword.name in args:
            message = f"`{form.name}` has two arguments `{keyword.name}`"
            errors.append(Diagnostic("P104", message, keyword.span, help="remove one of them"))
        else:
            try:
                args[keyword.name] = _value(keyword.value, param, form)
            except PeftcError as error:
                args[keyword.name] = param.default
                errors += error.diagnostics
    for param in form.arguments:
        if param.name not in args:
            args[param.name] = param.default
            # With a surplus input (P108), the value is probably there, without its name.
            if param.required and len(call.args) <= form.takes_input and param.name not in meant:
                message, notes = f"`{form.name}` needs `{param.name}`: {param.doc}", (f"`{signature(form)}`",)
                errors.append(Diagnostic("P103", message, _name_span(call), help=f"add `{param.name}=…`", notes=notes))
    if errors:
        raise PeftcError(errors)
    inputs = call.args if form.takes_input else ()
    return BoundArguments(inputs[0] if inputs else None, args, inputs[1] if len(inputs) > 1 else None)


def shared_call(bound: ast.Call, call: ast.Call) -> ast.Call:
    """The call of a form by a call of its `shared`, whose own arguments hold."""
    own = {keyword.name for keyword in call.kwargs}
    kwargs = (*(keyword for keyword in bound.kwargs if keyword.name not in own), *call.kwargs)
    return replace(bound, args=call.args, kwargs=kwargs, span=call.span)


def signature(form: Form) -> str:
    """`adapter(x, r, …)`: how a form is called."""
    inputs = [f"[{name}]" if name in form.optional_inputs else name for name in form.inputs]
    return f"{form.name}({', '.join([*inputs, *map(_written, form.arguments)])})"


def interval(param: Argument) -> str:
    """The range of a parameter in words: at least 1, in [0, 1)."""
    low, high = (None if end is None else f"{end:g}" for end in (param.low, param.high))
    open_low, open_high = param.open in {"low", "both"}, param.open in {"high", "both"}
    if low is not None and high is not None:
        return f"in {'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
    if low is not None:
        return f"above {low}" if open_low else f"at least {low}"
    return f"below {high}" if open_high else f"at most {high}"


def _written(param: Argument) -> str:
    default = param.default
    value = str(default).lower() if default is None or isinstance(default, bool) else str(default)
    return param.name if param.required else f"{param.name}={value}"


def _name_span(call: ast.Call) -> Span:
    return call.function_span if call.function_span.end else call.span


def _input_errors(call: ast.Call, form: Form, shared: bool) -> Sequence[Diagnostic]:
    required = 1 if form.takes_input and not shared else 0
    if len(call.args) < required:
        more = ", …" if call.kwargs else ""
        help_ = f"name its input: `{form.name}(x{more})` or `{form.name}(h{more})`"
        return [Diagnostic("P108", f"`{form.name}` has no input", _name_span(call), help=help_)]
    most = required + 1 if required and len(form.inputs) > 1 else required
    surplus = call.args[most:]
    literals = [value for value in surplus if not isinstance(value, ast.Name | ast.Call | ast.Binary)]
    if 1 < len(literals) == len(surplus) <= len(form.arguments) and not shared:
        return [_values_without_names(surplus, form)]
    return [_surplus(value, form, shared) for value in surplus]


def _values_without_names(values: Sequence[ast.Expr], form: Form) -> Diagnostic:
    """`lora(x, 8, 16)`: the values of the first arguments, probably."""
    params = sorted(form.arguments, key=lambda param: not param.required)
    texts = list(map(print_expression, values))
    named = ", ".join(f"{param.name}={text}" for param, text in zip(params, texts, strict=False))
    message = f"arguments of `{form.name}` have names, {join_names(texts)} have none"
    span = values[0].span.until(values[-1].span)
    return Diagnostic("P108", message, span, help=f"did you mean `{named}`?", notes=(f"`{signature(form)}`",))


def _surplus(value: ast.Expr, form: Form, shared: bool) -> Diagnostic:
    if shared and form.takes_input:
        message = f"`{form.name}` gets its input where it is used, not in `shared`"
        return Diagnostic("P108", message, value.span, help="remove it here")
    limit = "at most two inputs" if len(form.inputs) > 1 else "one input" if form.takes_input else "no input"
    help_ = f"arguments are named: {signature(form)}"
    if form.arguments and not isinstance(value, ast.Name | ast.Call | ast.Binary):
        param = next((param for param in form.arguments if param.required), form.arguments[0])
        text = print_expression(value)
        help_ = Suggestion(f"did you mean `{param.name}={text}`?", text, f"{param.name}={text}", "unsafe")
    message = f"`{form.name}` takes {limit}, `{print_expression(value)}` is one too many"
    return Diagnostic("P108", message, value.span, help=help_)


def _input_by_name(keyword: ast.Keyword, form: Form) -> Diagnostic:
    """`house(w, k=2)` of `form house(w, k)`: the author meant an argument."""
    name = keyword.name
    message = f"{state_name(name)}, so it is an input of `{form.name}` and no argument"
    help_ = f"use another name in the form; in a call, an input stands without `{name}=`"
    return Diagnostic("P102", message, keyword.span.first(len(name)), help=help_, notes=(f"`{signature(form)}`",))


def _unknown(keyword: ast.Keyword, form: Form) -> Diagnostic:
    known = [param.name for param in form.arguments]
    message = f"`{form.name}` has no argument `{keyword.name}`"
    help_ = did_you_mean(keyword.name, known) or _OF_PEFT.get(keyword.name) or f"it has {join_names(known)}"
    param = form.argument(nearest(keyword.name, known) or "")
    label = f"`{param.name}`: {param.doc}" if param is not None else ""
    span = keyword.span.first(len(keyword.name))
    return Diagnostic("P102", message, span, label=label, help=help_, notes=(f"`{signature(form)}`",))


def _value(value: ast.Expr, param: Argument, form: Form) -> ArgumentValue:
    is_none = isinstance(value, ast.Name) and value.id == "none"
    if is_none and "none" not in param.choices and param.default is None and not param.required:
        return None
    match param.type:
        case "int" | "float":
            return _number(value, param, form)
        case "bool":
            if not isinstance(value, ast.Boolean):
                raise _wrong_type(value, param, form, "`true` or `false`")
            return value.value
        case "choice":
            return _choice(value, param, form)
        case "call":
            return _nested_call(value, param, form)


def _number(value: ast.Expr, param: Argument, form: Form) -> int | float:
    number = constant(value)
    if param.type == "int" and isinstance(number, float) and number.is_integer() and abs(number) >= _LARGEST:
        message = f"`{param.name}` of `{form.name}` is too large: {print_expression(value)}"
        help_ = "no model has so many features, tokens or steps"
        raise PeftcError(Diagnostic("P106", message, value.span, label=param.doc, help=help_))
    if number is None or (param.type == "int" and not isinstance(number, int)):
        raise _wrong_type(value, param, form, "a whole number" if param.type == "int" else "a number")
    low, high = param.low, param.high
    too_low = low is not None and (number < low or (number == low and param.open in {"low", "both"}))
    too_high = high is not None and (number > high or (number == high and param.open in {"high", "both"}))
    if too_low or too_high:
        text = print_expression(value)
        message = f"`{param.name}` of `{form.name}` must be {interval(param)}, found {text}"
        is_percent = too_high and high == 1 and 1 < number < _WHOLE and isinstance(value, ast.Number)
        help_ = Suggestion(f"did you mean `{param.name}={text}%`?", text, f"{text}%", "unsafe") if is_percent else None
        raise PeftcError(Diagnostic("P106", message, value.span, label=param.doc, help=help_))
    return number if param.type == "int" else float(number)


def _choice(value: ast.Expr, param: Argument, form: Form) -> str:
    word = value.id if isinstance(value, ast.Name) else value.value if isinstance(value, ast.String) else None
    if word in param.choices and isinstance(value, ast.Name):
        return value.id
    help_ = f"one of {join_names(param.choices, 'or')}"
    if word in param.choices:
        help_ = Suggestion(f"write it without quotes: `{param.name}={word}`", f'"{word}"', str(word))
    elif isinstance(word, str):
        help_ = did_you_mean(word, param.choices) or help_
    message = f"`{param.name}` of `{form.name}` cannot be `{print_expression(value)}`"
    raise PeftcError(Diagnostic("P106", message, value.span, label=f"one of {', '.join(param.choices)}", help=help_))


def _nested_call(value: ast.Expr, param: Argument, form: Form) -> tuple[str, int]:
    """`reparam=mlp(800)`: a function of one whole number."""
    choices = join_names([f"{name}(…)" for name in param.choices], "or")
    if not isinstance(value, ast.Call):
        raise _wrong_type(value, param, form, choices)
    if value.function not in param.choices:
        help_ = did_you_mean(value.function, param.choices) or f"one of {choices}"
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


def _wrong_type(value: ast.Expr, param: Argument, form: Form, expected: str) -> PeftcError:
    text = print_expression(value)
    message = f"`{param.name}` of `{form.name}` must be {expected}, found `{text}`"
    return PeftcError(Diagnostic("P105", message, value.span, label=param.doc, help=_instead(value, text, param)))


def _instead(value: ast.Expr, text: str, param: Argument) -> str | None:
    """What to write for a value of the wrong type, as other languages write it."""
    words = ["true", "false"] if param.type == "bool" else ["none"] if param.default is None else []
    match value:
        case ast.Name("none"):
            return (
                f"`none` is what is not given, and `{param.name}` must be; in the form, `{param.name} = none` allows it"
            )
        case ast.Name(name):
            return did_you_mean(name, words) or f"no parameter and no constant is named `{name}`"
        case ast.String(word) if is_number(word) or word in words:
            return Suggestion(f"write it without quotes: `{param.name}={word}`", text, word)
        case ast.Number(0 | 1 as number) if param.type == "bool":
            return Suggestion(f"write `{param.name}={words[1 - int(number)]}`", text, words[1 - int(number)])
        case _:
            return None
