"""What an edit computes with the parameters of an adapter, in a form that can be compared.

What acts while training alone is left out: dropout, first values, terms of the loss. So are the
sizes of parameters, which `peftc.comparison.breaking` compares on their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from peftc.comparison.moves import Moves
from peftc.equations.definition import RESULT, TextForm
from peftc.equations.table import forms_of
from peftc.equations.words import BUFFER, NONE, criterion_of, function_of, is_choice_of_numbers
from peftc.forms import Args, Form
from peftc.forms.arguments import DTYPE, SEED
from peftc.forms.form import ArgumentValue
from peftc.forms.registry import class_path
from peftc.semantics.arguments import bind
from peftc.semantics.layer_values import variants
from peftc.semantics.substitute import constant, fold_constants, substitute
from peftc.syntax import ast
from peftc.syntax.numbers import COMPARISONS
from peftc.syntax.printer import print_expression, print_selector, print_where
from peftc.syntax.vocabulary import LAYER
from peftc.syntax.walk import condition_values, differs_by_layer, is_shared, map_children, names_in, walk

Lines = tuple[str, ...]


@dataclass(frozen=True)
class CallMeaning:
    """What a call of a form computes, and which parameters it has.

    Attributes:
        form: the name of the form.
        value: the lines of its equation that its value depends on, with the arguments in them.
        parameters: those that an adapter has: name, sizes and scope.
        args: the arguments that act outside of training, for messages.
    """

    form: str
    value: Lines
    parameters: Lines
    args: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True)
class EditMeaning:
    """What an edit, or a `train` statement, says.

    Attributes:
        name: in the spec.
        at: the arms of its selector.
        per_task: whether tasks have parameters of their own.
        lines: its equations, in which calls have the names of their parameters.
        calls: what these calls compute.
        states: of a `train` statement.
    """

    name: str
    at: Lines
    per_task: bool = False
    lines: Lines = ()
    calls: Mapping[str, CallMeaning] = field(default_factory=dict[str, CallMeaning])
    states: Lines = ()

    @property
    def has_parameters(self) -> bool:
        return bool(self.states) or any(call.parameters for call in self.calls.values())


def meanings(flat: ast.Spec, moves: Moves | None = None) -> dict[str, EditMeaning]:
    """What each edit of an expanded spec means, by its name.

    `moves`: to the names of a later spec.
    """
    reader = _Reader(flat, moves or Moves())
    edits = (s for s in flat.statements if isinstance(s, ast.Edit | ast.Train))
    return {reader.name(edit.name): reader.edit(edit) for edit in edits}


class _Reader:
    def __init__(self, flat: ast.Spec, moves: Moves) -> None:
        self.moves, self.forms = moves, forms_of(flat)
        lets = (s for s in flat.statements if isinstance(s, ast.Let))
        self.shared = {s.name: s.value.args[0] for s in lets if isinstance(s.value, ast.Call) and is_shared(s.value)}

    def name(self, old: str) -> str:
        return self.moves.names.get(old, old)

    def edit(self, edit: ast.Edit | ast.Train) -> EditMeaning:
        arms = edit.selector.arms if isinstance(edit.selector, ast.Union) else (edit.selector,)
        where = (print_where(edit).strip(),) if edit.where else ()
        at = (*sorted(map(print_selector, arms)), *where)
        if isinstance(edit, ast.Train):
            return EditMeaning(edit.name, at, states=tuple(sorted(edit.states)))
        calls: dict[str, CallMeaning] = {}
        lines, names = list[str](), dict[str, ast.Expr | None]()
        for line in edit.body:
            value = fold_constants(self.expression(line.value, names, calls))
            if isinstance(line, ast.Let):
                names[line.name] = ast.Name(f"value {len(names) + 1}")
                lines.append(f"{print_expression(names[line.name] or value)} = {print_expression(value)}")
                continue
            if line.op != "=":
                value = ast.Binary("+" if line.op == "+=" else "*", ast.Name(line.target), value)
            lines.append(f"{line.target} = {print_expression(value)}")
        return EditMeaning(edit.name, at, edit.per_task, tuple(lines), calls)

    def expression(
        self, value: ast.Expr, names: Mapping[str, ast.Expr | None], calls: dict[str, CallMeaning]
    ) -> ast.Expr:
        """An expression whose calls have the names of their parameters."""
        if isinstance(value, ast.Name):
            return names.get(value.id) or value
        inner = map_children(value, lambda part: self.expression(part, names, calls))
        if not isinstance(value, ast.Call) or not isinstance(inner, ast.Call):
            return inner
        call = value
        if isinstance(shared := self.shared.get(value.function), ast.Call):
            call = replace(shared, args=value.args, kwargs=(*shared.kwargs, *value.kwargs))
        form = self.forms.get(call.function)
        if form is None:
            return inner
        key = self.key(value.function, calls)
        calls[key] = self.call(call, form)
        return replace(inner, function=key, kwargs=())

    def key(self, function: str, calls: Mapping[str, CallMeaning]) -> str:
        if function in self.shared:
            return self.name(function)
        name = self.moves.forms.get(function, function)
        count = 1 + sum(call.form == name for call in calls.values())
        return name if count == 1 else f"{name}_{count}"

    def call(self, call: ast.Call, form: Form) -> CallMeaning:
        first, *others = [self.one_call(one, form) for one in variants(call)]
        if not differs_by_layer(call):
            return first
        texts = {k.name: print_expression(k.value) for k in call.kwargs if differs_by_layer(k.value)}
        value = (*first.value, *(line for other in others for line in other.value))
        parameters = (*first.parameters, *(line for other in others for line in other.parameters))
        numbers = (k.name for k in call.kwargs if ast.Name(LAYER) in walk(k.value))  # whose value a text does not have
        value += tuple(f"{name}={texts[name]}" for name in numbers if name not in form.training_arguments)
        return replace(first, value=value, parameters=parameters, args={**first.args, **texts})

    def one_call(self, call: ast.Call, form: Form) -> CallMeaning:
        """The meaning of a call with one value for each argument."""
        args = form.fill(bind(call, form).args)
        name = self.moves.forms.get(form.name, form.name)
        acting = (item for item in args.items() if item[0] not in form.training_arguments)
        shown = {key: print_expression(literal(value)) for key, value in acting}
        if not isinstance(form, TextForm):
            own = tuple(f"{key}={text}" for key, text in shown.items())
            return CallMeaning(name, (class_path(form), f"version {form.version}", *own), own, shown)
        text = _Text(form.form, args, {old: new for (of, old), new in self.moves.parameters.items() if of == name})
        parameters = tuple(text.trained())
        return CallMeaning(name, (*text.value(), f"dtype={shown.get(DTYPE.name)}"), parameters, shown)


def literal(value: ArgumentValue) -> ast.Expr:
    """The value of an argument, as a text has it."""
    match value:
        case None:
            return ast.Name(NONE)
        case bool():
            return ast.Boolean(value)
        case int() | float():
            number = ast.Number(int(abs(value)) if float(value).is_integer() else abs(value))
            return ast.Negative(number) if value < 0 else number
        case str():
            return ast.Name(value)
        case (function, size):
            return ast.Call(function, (ast.Number(size),))


class _Text:
    """The lines of a form that are there with some arguments, with these in the place of names."""

    def __init__(self, form: ast.Form, args: Args, renamed: Mapping[str, str]) -> None:
        self.args = args
        self.environment: dict[str, ast.Expr | None] = {}
        for param in form.params:
            if param.name in args:
                self.environment[param.name] = self._argument(param, args[param.name])
        self.lines = [line for line in form.body if self._holds(getattr(line, "condition", None))]
        own = (line for line in self.lines if isinstance(line, ast.Parameter))
        self.parameters = {line.name: ast.Name(renamed.get(line.name, line.name)) for line in own}
        self.environment |= self.parameters
        self.sizes = {**self.environment, **self._numbers()}

    def _argument(self, param: ast.FormParam, value: ArgumentValue) -> ast.Expr:
        if value is None and param.default is not None:
            call = param.default
            default = call.args[0] if function_of(param) is not None and isinstance(call, ast.Call) else call
            return substitute(default, self.environment)
        return ast.Number(value[1]) if isinstance(value, tuple) else literal(value)

    def _holds(self, condition: ast.Condition | None) -> bool:
        """Whether a condition holds, or sizes decide it."""
        if condition is None:
            return True
        left, *right = (_python(substitute(side, self.environment)) for side in condition_values(condition))
        if left is _UNKNOWN or _UNKNOWN in right:
            return True
        if not right:
            return bool(left) and left != NONE
        if condition.op in ("==", "!="):
            return (left == right[0]) == (condition.op == "==")
        numbers = all(isinstance(side, int | float) for side in (left, right[0]))
        return not numbers or COMPARISONS[condition.op](left, right[0])

    def _numbers(self) -> dict[str, ast.Expr | None]:
        """The values that lines name, by which sizes are given: all that they may be."""
        numbers = dict[str, ast.Expr | None]()
        for line in self.lines:
            if isinstance(line, ast.Let):
                value = substitute(line.value, {**self.environment, **numbers})
                other = numbers.get(line.name)
                numbers[line.name] = value if other is None else ast.Pair(other, value)
        return numbers

    def trained(self) -> Iterator[str]:
        """The parameters that an adapter has, by their names: sizes and scope."""
        for line in self.lines:
            if isinstance(line, ast.Parameter) and not _is_drawn(line):
                yield f"{self._declared(line)}{self._condition(line)}"

    def _declared(self, line: ast.Parameter) -> str:
        sizes = ", ".join(_text(substitute(size, self.sizes)) for size in line.sizes)
        scope = (f" per {line.scope}" if line.scope else "") + (" common" if line.common else "")
        return f"{self._print(ast.Name(line.name))}[{sizes}]{scope}"

    def value(self) -> Lines:
        """The value, the values that it names, without their names, and what is fixed in it."""
        results = [line for line in self.lines if isinstance(line, ast.Equation) and line.target == RESULT]
        lets = [line for line in self.lines if isinstance(line, ast.Let)]
        order: dict[str, None] = {}
        todo: list[ast.Let | ast.Equation] = list(results)
        reached: list[ast.Let | ast.Equation] = []
        while todo:
            line = todo.pop(0)
            reached.append(line)
            names = dict.fromkeys(
                name for value in (line.value, *condition_values(line.condition)) for name in names_in(value)
            )
            new = [name for name in names if name not in order]
            order |= dict.fromkeys(new)
            todo += [let for name in new for let in lets if let.name == name]
        named = {let.name: None for let in reached if isinstance(let, ast.Let)}
        for name in tuple(named):  # a number stands where its name does
            values = [substitute(let.value, self.environment) for let in lets if let.name == name]
            if len(values) == 1 and constant(values[0]) is not None:
                self.environment[name] = values[0]
                del named[name]
        reached = [line for line in reached if not isinstance(line, ast.Let) or line.name in named]
        self.environment |= {name: ast.Name(f"value {i + 1}") for i, name in enumerate(named)}
        lines = [
            f"{self._print(ast.Name(_target(line)))} = {self._print(line.value)}{self._condition(line)}"
            for line in reached
        ]
        fixed = [one for one in self.lines if isinstance(one, ast.Parameter) and _is_drawn(one) and one.name in order]
        lines += [f"{self._declared(line)} = {self._print(line.value)}{self._condition(line)}" for line in fixed]
        if fixed:
            lines.append(f"{SEED.name}={self.args.get(SEED.name)}")
        return tuple(lines)

    def _print(self, value: ast.Expr) -> str:
        return _text(substitute(value, self.environment))

    def _condition(self, line: ast.Parameter | ast.Let | ast.Equation) -> str:
        """The condition of a line where sizes decide it."""
        sides = [substitute(side, self.environment) for side in condition_values(line.condition)]
        if all(_python(side) is not _UNKNOWN for side in sides) or line.condition is None:
            return ""
        return f" if {f' {line.condition.op} '.join(map(print_expression, sides))}"


_UNKNOWN = object()


def _is_drawn(line: ast.Parameter) -> bool:
    """Whether a parameter is drawn from a seed whenever a spec is compiled: no adapter has it."""
    is_saved = line.value == ast.Name(BUFFER) or criterion_of(line) or is_choice_of_numbers(line)
    return line.fixed and not is_saved


def _target(line: ast.Let | ast.Equation) -> str:
    return line.name if isinstance(line, ast.Let) else line.target


def _python(value: ast.Expr) -> object:
    """The value of a literal, or a word; else `_UNKNOWN`."""
    if isinstance(value, ast.Boolean):
        return value.value
    if isinstance(value, ast.Name):
        return value.id
    number = constant(value)
    return _UNKNOWN if number is None else number


def _text(value: ast.Expr) -> str:
    return print_expression(_plain(fold_constants(_without_dropout(value))))


def _without_dropout(value: ast.Expr) -> ast.Expr:
    """`dropout(x, p)` is x in evaluation."""
    if isinstance(value, ast.Call) and value.function == "dropout" and len(value.args) == 2:
        return _without_dropout(value.args[0])
    return map_children(value, _without_dropout)


def _plain(value: ast.Expr) -> ast.Expr:
    """Numbers as integers where they are whole, without units."""
    number = constant(value)
    return map_children(value, _plain) if number is None else literal(number)
