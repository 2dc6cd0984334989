"""Checks of a form that need no place: names, functions, and that it has one value."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equations.analysis import LOSS
from peftc.equations.bindings import BINDERS, INITIAL, layer_call_errors, mean_over_sites
from peftc.equations.checks.selections import check_rows_at, check_scatter
from peftc.equations.checks.states import (
    WEIGHTS,
    check_numbered,
    check_pruned,
    check_saved,
    check_states,
    is_first_value,
    lines_of,
    pruned_part,
)
from peftc.equations.checks.unknown_names import function_help, name_help, names_behind, unknown_argument
from peftc.equations.definition import RESULT
from peftc.equations.matrices import DECOMPOSITIONS
from peftc.equations.primitives import ACTIVATIONS, FUNCTIONS, WORDS
from peftc.equations.table import FORMS
from peftc.equations.words import (
    BELOW,
    BUDGET,
    BUFFER,
    CHOICE,
    INITIAL_VALUES,
    MEANS,
    NONE,
    NUMBERS,
    OUT,
    PERMUTATION,
    POSITIONS,
    PRUNED,
    RANDOM,
    ROWS_AT,
    SCATTER,
    SELECTION,
    SIZES,
    TAIL,
    criterion_of,
    function_of,
    inputs_of,
    mean_over,
    number_of,
    scope_of,
    words_of,
)
from peftc.forms.reserved import is_reserved
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import CONCAT, FROZEN_MODULES, SHARED, STATES, state_name
from peftc.syntax.walk import children, names_in, values, walk

_OWN_ARGUMENTS = ("dtype", "seed")  # every form has them, or those with fixed values
_MOST_INPUTS = 2
_KINDS = {
    ast.String: "text",
    ast.List: "a list",
    ast.Pair: "a pair",
    ast.Attribute: "an attribute",
    ast.Binding: "a name that is bound",
}


def check_form(form: ast.Form, forms: Container[str] = ()) -> Iterator[Diagnostic]:
    """The errors in the text of a form, in its order. `forms`: the names of those of its file."""
    return _FormChecker(form, forms).errors()


class _FormChecker:
    """Reads the lines of a form in order: a name is known after the line that defines it."""

    def __init__(self, form: ast.Form, forms: Container[str]) -> None:
        self.form, self.forms = form, forms
        self.lets = {line.name: line.value for line in form.body if isinstance(line, ast.Let)}
        self.inputs = inputs_of(form)
        self.names: dict[str, Span] = {}  # with the place of the definition
        self.conditional: set[str] = set()  # those of lines with conditions
        self.used: set[str] = set()
        self.orders: set[str] = set()  # names of permutations
        self.limited: dict[str, str] = {}  # the parameter that has a budget
        self.words = words_of(form)  # of arguments that are one of several words

    def errors(self) -> Iterator[Diagnostic]:
        name, at = self.form.name, self.form.name_span
        if self.form.built_in:
            pass
        elif name in FORMS or name in (*FROZEN_MODULES, CONCAT, SHARED):
            kind = "built-in form" if name in FORMS else "function of the language"
            yield Diagnostic("P111", f"there is a {kind} `{name}`", at, help="use another name")
        elif name in FUNCTIONS or name in NUMBERS or name in SIZES or name in (*BINDERS, INITIAL, RANDOM, BELOW):
            yield Diagnostic("P111", f"equations have a function `{name}`", at, help="use another name")
        elif name in STATES:
            yield Diagnostic("P121", state_name(name), at, help="use another name")
        yield from self._params()
        results: list[ast.Equation] = []
        for line in self.form.body:
            if line.condition is not None:
                yield from self._comparison(line.condition.left, line.condition.right)
            match line:
                case ast.Equation(target) if target == RESULT:
                    results.append(line)
                    for part in children(line.value) if isinstance(line.value, ast.Pair) else (line.value,):
                        yield from self._expression(part)
                case ast.Equation(target) if target.startswith(LOSS) and len(target) > len(LOSS) and line.op == "=":
                    yield from self._expression(mean_over_sites(line.value) or line.value)
                case ast.Equation(target):
                    help_ = f"write `let {target} = …` for a part, and `{RESULT} = …` for the value of the form"
                    yield Diagnostic("P107", f"a form assigns `{RESULT}` alone", line.target_span, help=help_)
                case ast.Let(let, value):
                    match value:
                        case ast.Call(function, (count,), ()) if function == RANDOM:
                            yield from self._expression(count)
                        case _:
                            yield from self._expression(value)
                    yield from self._define(let, line.span, line.condition)
                case ast.Parameter():
                    yield from self._parameter(line)
                case ast.Require(left, _, right):
                    yield from self._comparison(left, right)
                case ast.Save(call):
                    yield from self._save(call)
        if not results:
            yield Diagnostic("P319", f"the form `{name}` has no value", at, help=f"add `{RESULT} = …`")
        for line in results[1:] if any(line.condition is None for line in results) else ():
            yield Diagnostic("P111", f"the form `{name}` has two values", line.target_span, help="remove one of them")
        if results:
            yield from self._unused()
        yield from check_states(self.form)
        shared = [line for line in lines_of(self.form) if line.scope and not line.fixed]
        if len({line.common for line in shared}) > 1 and any(map(criterion_of, lines_of(self.form))):
            message = f"tasks share some parameters of `{name}`, which selects, and have others of their own"
            yield Diagnostic("P111", message, shared[-1].name_span, help="write `common` at all of them, or at none")
        scopes = {scope_of(line): line for line in lines_of(self.form)}
        if {"group", "edit"} <= scopes.keys():
            message = f"`{name}` has parameters `per group` and `per edit`"
            help_ = "choose one of them for all of its common parameters"
            yield Diagnostic("P111", message, scopes["group"].name_span, help=help_)

    def _params(self) -> Iterator[Diagnostic]:
        for param in self.form.params:
            is_word = isinstance(param.default, ast.Name) and param.default.id in self.words.get(param.name, ())
            if param.default is not None and not is_word and function_of(param) is None:
                yield from self._expression(param.default)
            yield from self._define(param.name, param.span)
            if param.name in _OWN_ARGUMENTS:
                message = f"every form has the argument `{param.name}`"
                yield Diagnostic("P111", message, param.span, help="remove it, or use another name")
            elif param.name in STATES and param.default is not None and param.name not in self.inputs[1:]:
                message = f"{state_name(param.name)}, so it is an input: the first has no default, another `none`"
                yield Diagnostic("P121", message, param.span, help="use another name for an argument")
        for name in self.inputs[_MOST_INPUTS:]:
            message = f"{state_name(name)}, so it is an input, and a form has at most two"
            yield Diagnostic("P108", message, self.names[name], help="use another name for an argument")

    def _save(self, call: ast.Call) -> Iterator[Diagnostic]:
        """The errors of a form that is saved, of its arguments and its parameters."""
        name = call.function
        if name != self.form.name and name not in FORMS:
            help_ = did_you_mean(name, [self.form.name, *FORMS]) or "a built-in form, or this one with other arguments"
            yield Diagnostic("P101", f"there is no form `{name}` to save", call.function_span, help=help_)
            return
        if call.args:
            message = "a form is saved with its arguments and its parameters by name"
            yield Diagnostic("P108", message, call.args[0].span, help="write `NAME=value`")
        own = {param.name for param in self.form.params}
        arguments = own if name == self.form.name else {argument.name for argument in FORMS[name].arguments}
        for keyword in call.kwargs:
            is_argument = isinstance(keyword.value, ast.Name) and keyword.value.id in own
            if keyword.name in arguments and not is_argument:
                message = f"`{keyword.name}` of the saved `{name}` is an argument of `{self.form.name}`, as it is"
                yield Diagnostic("P105", message, keyword.value.span)
            if (part := pruned_part(keyword.value)) is None and not is_argument:
                yield from check_saved(self.form, keyword.value)
            yield from self._expression(part or keyword.value)

    def _comparison(self, left: ast.Expr, right: ast.Expr | None) -> Iterator[Diagnostic]:
        for side, other in ((left, right), (right, left)):
            words = self.words.get(other.id, ()) if isinstance(other, ast.Name) else ()
            if side is not None and not (isinstance(side, ast.Name) and side.id in words):
                yield from self._expression(side)

    def _define(self, name: str, at: Span, condition: ast.Condition | None = None) -> Iterator[Diagnostic]:
        if name in (OUT, RESULT) or (name in MEANS and name in self._means()):
            yield Diagnostic("P121", f"`{name}` is reserved in a form", at, help="use another name")
        elif name in self.names and not self._may_define_again(name, condition) and not is_first_value(self.form, name):
            yield Diagnostic("P111", f"`{name}` is defined twice in `{self.form.name}`", at, help="use another name")
        if condition is not None:
            self.conditional.add(name)
        self.names.setdefault(name, at)

    def _means(self) -> set[str]:
        """The words of `mean(x, tokens)` and `mean(x, batch)`."""
        parts = (part for value in values(self.form) for part in walk(value) if isinstance(part, ast.Call))
        return {mean_over(call) for call in parts}

    def _may_define_again(self, name: str, condition: ast.Condition | None) -> bool:
        """Whether several lines define a name, or a parameter is there if its argument says so."""
        return condition is not None and (name in self.conditional or condition.left == ast.Name(name))

    def _parameter(self, line: ast.Parameter) -> Iterator[Diagnostic]:
        for size in line.sizes:
            yield from self._expression(size)
        if (number := number_of(line)) and number not in self.names:
            help_ = "`per site`, `per group` (of an attention), `per edit`, or `per n` with `let n = layer(out)`"
            help_ = "`per task` belongs to an edit" if number == "task" else help_
            yield Diagnostic("P023", f"a parameter is not `per {number}`", line.name_span, help=help_)
        elif number:
            self.used.add(number)
            yield from check_numbered(self.form, line, number)
        if line.common and (line.fixed or scope_of(line) == "site"):
            message = "`common` is for parameters `per group` or `per edit`, which tasks have apart otherwise"
            yield Diagnostic("P023", message, line.name_span, help="remove it")
        match line.value:
            case ast.Name(name) if name in INITIAL_VALUES and name not in self.names:
                if name == BUFFER and not line.fixed:
                    message = f"`{line.name}` is filled by a command, and nothing trains it"
                    yield Diagnostic("P105", message, line.value.span, help=f"write `fixed {line.name} … = buffer`")
                if name == PERMUTATION:
                    self.orders.add(line.name)
                    if not line.fixed or len(line.sizes) != 1:
                        message = f"`{line.name}` is an order of entries, which nothing trains"
                        yield Diagnostic("P105", message, line.value.span, help="write `fixed order[n] = permutation`")
            case ast.Call(name, args, kwargs) if name == SELECTION:
                words = {param.name: param.default for param in self.form.params}
                is_argument = isinstance(words.get(criterion_of(line)), ast.Name)
                if not line.fixed or len(line.sizes) != 1 or not is_argument or kwargs:
                    message = f"`{line.name}` has the numbers of what `peftc.calibrate` selects"
                    help_ = f"write `fixed {line.name}[k] = selection(select)` with an argument `select = magnitude`"
                    yield Diagnostic("P105", message, line.value.span, help=help_)
                yield from (error for arg in args for error in self._expression(arg))
            case ast.Call(name, args, ()) if name in INITIAL_VALUES:
                if len(args) > (1 if name in ("normal", "truncated", "uniform", "identity", CHOICE, TAIL) else 0):
                    yield Diagnostic("P108", f"`{name}` is {INITIAL_VALUES[name]}", line.value.span)
                yield from (error for arg in args for error in self._expression(arg))
            case value:
                yield from self._expression(value, of_weights=True)
        if is_reserved(line.name):
            message = f"no parameter can be named `{line.name}`: the module of a form has that name"
            yield Diagnostic("P121", message, line.name_span, help="use another name")
        yield from self._define(line.name, line.name_span, line.condition)

    def _expression(self, value: ast.Expr, of_weights: bool = False) -> Iterator[Diagnostic]:
        match value:
            case ast.Name(name):
                yield from self._name(value, name, of_weights)
            case ast.Call("rows", (table, ids), ()):
                yield from (error for part in (table, ids) for error in self._expression(part, of_weights))
            case ast.Call(function) if function == RANDOM:
                message = f"`{print_expression(value)}` stands in a line of its own: `let i = random(n)`"
                yield Diagnostic("P105", message, value.span, help="then write `A[i]`")
            case ast.Call(function) if function in BINDERS:
                yield from self._sum(value, of_weights)
            case ast.Call("below" | "history"):
                yield from layer_call_errors(self.form, value)
                self.used |= {name.id for name in value.args[:1] if isinstance(name, ast.Name)}
                yield from (
                    e for arg in value.args[value.function == BELOW :] for e in self._expression(arg, of_weights)
                )
            case ast.Call(function) if function == INITIAL:
                if len(value.args) != 1 or value.kwargs or of_weights:
                    message = "`initial(f)` is a value of the equation with the first values of its parameters"
                    yield Diagnostic("P108", message, value.span)
                yield from (error for part in children(value) for error in self._expression(part, of_weights))
            case ast.Call(function, _, kwargs):
                yield from list(self._function(value, function, of_weights)) or map(unknown_argument(function), kwargs)
                yield from self._arguments(value, of_weights)
            case ast.Number() | ast.Boolean():
                pass
            case ast.Attribute(ast.Call(function, args), name) if f"{function}.{name}" in DECOMPOSITIONS:
                if not of_weights:
                    message = f"`{print_expression(value)}` is computed once: it is a first value of a parameter"
                    yield Diagnostic("P105", message, value.span)
                yield from (error for arg in args for error in self._expression(arg, of_weights))
            case ast.Negative() | ast.Binary() | ast.Item():
                yield from (error for part in children(value) for error in self._expression(part, of_weights))
            case _:
                self.used |= set(names_in(value))
                message = f"the equation of a form has no meaning for {_KINDS.get(type(value), 'this')}"
                yield Diagnostic("P105", message, value.span, help="it has numbers, names, functions and `+ - * / @`")

    def _sum(self, call: ast.Call, of_weights: bool) -> Iterator[Diagnostic]:
        """The errors of `sum(i in n, …)`, in which i is known."""
        match call.args:
            case (ast.Binding(name, count, name_span=at), term) if not call.kwargs:
                yield from self._expression(count, of_weights)
                if name in self.names or name in (OUT, *MEANS, RESULT) or name in STATES:
                    self.used |= set(names_in(term))
                    meaning = state_name(name) if name in STATES else f"`{name}` has a meaning here already"
                    yield Diagnostic("P111", meaning, at, help="use another name")
                    return
                self.names[name] = at
                yield from self._expression(term, of_weights)
                if name not in self.used:
                    help_ = f"write the number of terms times one of them, or index by `{name}`"
                    yield Diagnostic("P114", f"all terms are the same: none uses `{name}`", at, help=help_)
                self.used.discard(name)
                del self.names[name]
            case _:
                self.used |= {name for arg in call.args for name in names_in(arg)}
                message = f"`{call.function}(i in n, …)` has a term for each i = 0, 1, … n - 1"
                help_ = "the sum of the features of each token is `d(x) * mean(x)`, that of a parameter `total(A)`"
                yield Diagnostic("P108", message, call.span, help=help_ if call.function == "sum" else None)

    def _name(self, node: ast.Name, name: str, of_weights: bool) -> Iterator[Diagnostic]:
        self.used |= {name, *name.split(".")}
        if name in self.names or name in WORDS or (of_weights and name in WEIGHTS):
            return
        known = [*self.names, *(INITIAL_VALUES if of_weights else ())]
        help_ = name_help(name, self.inputs, known)
        if name in names_behind(name, self.lets):
            help_ = "no value is defined by itself: use another name for this one"
        elif name in (line.name for line in self.form.body if isinstance(line, ast.Parameter | ast.Let)):
            help_ = "move its definition above this line"
        yield Diagnostic("P107", f"there is no name `{name}` in `{self.form.name}`", node.span, help=help_)

    def _function(self, call: ast.Call, function: str, of_weights: bool) -> Iterator[Diagnostic]:
        is_choice = any(word in ACTIVATIONS for word in self.words.get(function, ()))
        if is_choice:
            self.used.add(function)
        if is_choice or function in FUNCTIONS or function in NUMBERS or function in SIZES:
            if function in MEANS.values():
                over = next(word for word, name in MEANS.items() if name == function)
                yield Diagnostic("P101", f"write `mean(x, {over})`", call.function_span)
            return
        self.used |= {*function.split(".")[:-1], *(name for word in call.kwargs for name in names_in(word.value))}
        known = [
            *FUNCTIONS,
            *NUMBERS,
            *SIZES,
            *BINDERS,
            INITIAL,
            RANDOM,
            BELOW,
            *(INITIAL_VALUES if of_weights else ()),
        ]
        help_ = function_help(function, known, self.names, self.forms)
        yield Diagnostic("P101", f"there is no function `{function}` in a form", call.function_span, help=help_)

    def _arguments(self, call: ast.Call, of_weights: bool) -> Iterator[Diagnostic]:
        function, args = call.function, call.args
        if function in SIZES:
            names = (*self.inputs, OUT)
            is_known = len(args) == 1 and isinstance(args[0], ast.Name) and args[0].id in names
            if not is_known:
                help_ = f"`{function}(NAME)` with {join_names(names, 'or')}"
                at = args[0].span if args else call.span
                yield Diagnostic("P108", f"`{function}` is {SIZES[function]}", at, help=help_)
            self.used |= {arg.id for arg in args if isinstance(arg, ast.Name)}
            return
        if function == "permuted" and not (isinstance(args[-1], ast.Name) and args[-1].id in self.orders):
            help_ = "write `fixed order[n] = permutation`, and `permuted(v, order)`"
            yield Diagnostic("P105", f"`{print_expression(args[-1])}` is no permutation", args[-1].span, help=help_)
        if function == BUDGET:
            yield from self._budget(call)
        if function == SCATTER:
            yield from check_scatter(self.form, call, self.limited)
        if function == ROWS_AT:
            yield from check_rows_at(self.form, call)
        if function == PRUNED:
            yield from check_pruned(self.form, call)
        ends = [ast.Name(NONE)] if function == POSITIONS else []
        for arg in args[:1] if mean_over(call) else [arg for arg in args if arg not in ends]:
            yield from self._expression(arg, of_weights)

    def _budget(self, call: ast.Call) -> Iterator[Diagnostic]:
        """The errors of `budget(v, …)`: v is the parameter with a budget."""
        name = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
        lines = [line for line in self.form.body if isinstance(line, ast.Parameter) and line.name == name]
        if not lines or any(line.fixed or line.scope not in ("", "site") or len(line.sizes) != 1 for line in lines):
            help_ = "write `param v[n] = …`, and `budget(v, …)`"
            yield Diagnostic(
                "P105", f"`{print_expression(call)}` gives up entries of no parameter", call.span, help=help_
            )
        if self.limited.setdefault(BUDGET, name) != name:
            message = f"`{self.limited[BUDGET]}` has a budget already, and a form has one"
            yield Diagnostic("P111", message, call.span)

    def _unused(self) -> Iterator[Diagnostic]:
        for name, at in self.names.items():
            if name not in self.used:
                message = f"`{name}` is never used in `{self.form.name}`"
                yield Diagnostic("P114", message, at, help="remove it: it would have no effect")


def check_forms(forms: Iterable[ast.Form]) -> Iterator[Diagnostic]:
    """The errors of the forms of a file."""
    forms, seen = list(forms), set[str]()
    names = {form.name for form in forms}
    for form in forms:
        if form.name in seen:
            yield Diagnostic("P111", f"there are two forms named `{form.name}`", form.name_span)
        seen.add(form.name)
        yield from check_form(form, names)
