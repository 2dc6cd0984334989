"""Changes of specs: after some an adapter means the same, after others it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from peftc.semantics import expand
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from peftc.syntax.walk import map_children

Change = Callable[[ast.Spec], ast.Spec | None]  # None where a spec has nothing to change
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Each change of an expanded spec, by its name, as text."""
    spec = expand(parse_text(text))
    for name, function in CHANGES.items():
        changed = function(spec)
        if changed is not None and print_spec(changed) != print_spec(spec):
            yield name, print_spec(changed)


def edits_of(spec: ast.Spec) -> list[ast.Edit]:
    return [s for s in spec.statements if isinstance(s, ast.Edit)]


def with_edits(spec: ast.Spec, function: Callable[[ast.Edit], ast.Edit]) -> ast.Spec:
    return replace(spec, statements=tuple(function(s) if isinstance(s, ast.Edit) else s for s in spec.statements))


def with_values(spec: ast.Spec, function: Callable[[ast.Expr], ast.Expr]) -> ast.Spec:
    """A spec with a function applied to the values of its equations, and of what they share."""

    def changed(line: ast.Equation | ast.Let) -> ast.Equation | ast.Let:
        return replace(line, value=function(line.value))

    whole = with_edits(spec, lambda edit: replace(edit, body=tuple(map(changed, edit.body))))
    lets = (changed(s) if isinstance(s, ast.Let) else s for s in whole.statements)
    return replace(whole, statements=tuple(lets))


def with_arguments(spec: ast.Spec, function: Callable[[ast.Call], dict[str, ast.Expr]]) -> ast.Spec:
    """A spec with other arguments of its calls."""

    def changed(value: ast.Expr) -> ast.Expr:
        value = map_children(value, changed)
        if not isinstance(value, ast.Call) or not (own := function(value)):
            return value
        rest = tuple(k for k in value.kwargs if k.name not in own)
        return replace(value, kwargs=(*rest, *(ast.Keyword(name, new) for name, new in own.items())))

    return with_values(spec, changed)


def named(call: ast.Call) -> dict[str, ast.Expr]:
    return {keyword.name: keyword.value for keyword in call.kwargs}


# An adapter means the same


@change
def other_dropout(spec: ast.Spec) -> ast.Spec:
    return with_arguments(
        spec, lambda call: {"dropout": ast.Number(0.25)} if call.function in ("lora", "adapter", "vera") else {}
    )


@change
def other_first_values(spec: ast.Spec) -> ast.Spec:
    return with_arguments(spec, lambda call: {"init": ast.Name("houlsby")} if call.function == "adapter" else {})


@change
def defaults_are_written(spec: ast.Spec) -> ast.Spec:
    written = {"lora": {"rslora": ast.Boolean(False)}, "adapter": {"norm_in": ast.Boolean(False)}}
    return with_arguments(spec, lambda call: {**written.get(call.function, {}), **named(call)})


@change
def no_shorthand(spec: ast.Spec) -> ast.Spec:
    """`h += f` as `h = h + f`."""

    def changed(line: ast.Equation | ast.Let) -> ast.Equation | ast.Let:
        if not isinstance(line, ast.Equation) or line.op == "=":
            return line
        op = "+" if line.op == "+=" else "*"
        return replace(line, op="=", value=ast.Binary(op, ast.Name(line.target), line.value))

    return with_edits(spec, lambda edit: replace(edit, body=tuple(map(changed, edit.body))))


@change
def no_expectations(spec: ast.Spec) -> ast.Spec:
    return replace(spec, statements=tuple(s for s in spec.statements if not isinstance(s, ast.Expect)))


@change
def values_have_names(spec: ast.Spec) -> ast.Spec:
    """Names of values inside an edit are other names."""

    def changed(edit: ast.Edit) -> ast.Edit:
        names = {line.name: f"{line.name}_value" for line in edit.body if isinstance(line, ast.Let)}

        def expression(value: ast.Expr) -> ast.Expr:
            if isinstance(value, ast.Name):
                return replace(value, id=names.get(value.id, value.id))
            return map_children(value, expression)

        lines = (replace(line, value=expression(line.value)) for line in edit.body)
        own = (replace(line, name=names[line.name]) if isinstance(line, ast.Let) else line for line in lines)
        return replace(edit, body=tuple(own))

    return with_edits(spec, changed)


@change
def renamed_and_moved(spec: ast.Spec) -> ast.Spec:
    """All edits have other names, and `moved` says so."""
    own = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train)]
    moves = tuple(ast.Moved(s.name, f"{s.name}_now") for s in own)
    statements = (
        replace(s, name=f"{s.name}_now") if isinstance(s, ast.Edit | ast.Train) else s
        for s in no_expectations(spec).statements
    )
    return replace(spec, version=2, statements=(*moves, *statements))


# It does not load


@change
def renamed(spec: ast.Spec) -> ast.Spec:
    first = edits_of(spec)[:1]
    return with_edits(no_expectations(spec), lambda edit: replace(edit, name="other") if edit in first else edit)


@change
def larger(spec: ast.Spec) -> ast.Spec:
    def more(call: ast.Call) -> dict[str, ast.Expr]:
        sizes = {name: value for name, value in named(call).items() if name in ("r", "len")}
        return {n: ast.Number(v.value + 1) for n, v in sizes.items() if isinstance(v, ast.Number)}

    return with_arguments(no_expectations(spec), more)


@change
def last_edit_is_gone(spec: ast.Spec) -> ast.Spec | None:
    own = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train)]
    if len(own) < 2:
        return None
    return replace(spec, statements=tuple(s for s in no_expectations(spec).statements if s != own[-1]))


@change
def one_more_edit(spec: ast.Spec) -> ast.Spec:
    (more,) = parse_text("peft 1 edit more at layer[*].ffn.up { h += lora(x, r=2) }").statements
    return replace(no_expectations(spec), statements=(*no_expectations(spec).statements, more))


@change
def fewer_layers(spec: ast.Spec) -> ast.Spec:
    """`layer[*]` is `layer[0]`."""

    def selector(value: ast.Selector) -> ast.Selector:
        match value:
            case ast.Union(arms):
                return replace(value, arms=tuple(map(selector, arms)))
            case ast.Path(steps):
                first = (ast.Index(0, 0),)
                return replace(value, steps=tuple(replace(s, indices=first) if s.name == "layer" else s for s in steps))
            case _:
                return value

    return with_edits(no_expectations(spec), lambda edit: replace(edit, selector=selector(edit.selector)))


@change
def without_biases(spec: ast.Spec) -> ast.Spec:
    return with_arguments(
        no_expectations(spec), lambda call: {"bias": ast.Boolean(False)} if call.function == "adapter" else {}
    )


# It loads, and means something else


@change
def other_scale(spec: ast.Spec) -> ast.Spec:
    def changed(edit: ast.Edit) -> ast.Edit:
        body = (
            replace(line, value=ast.Binary("*", ast.Number(3), line.value))
            if isinstance(line, ast.Equation) and line.op == "+="
            else line
            for line in edit.body
        )
        return replace(edit, body=tuple(body))

    return with_edits(no_expectations(spec), changed)


@change
def other_alpha(spec: ast.Spec) -> ast.Spec:
    return with_arguments(spec, lambda call: {"alpha": ast.Number(7)} if call.function in ("lora", "lowrank") else {})


@change
def other_activation(spec: ast.Spec) -> ast.Spec:
    return with_arguments(spec, lambda call: {"act": ast.Name("tanh")} if call.function == "adapter" else {})


@change
def no_activation(spec: ast.Spec) -> ast.Spec:
    return with_arguments(
        no_expectations(spec), lambda call: {"act": ast.Name("none")} if call.function == "adapter" else {}
    )


@change
def other_seed(spec: ast.Spec) -> ast.Spec:
    return with_arguments(spec, lambda call: {"seed": ast.Number(9)} if call.function in ("vera", "said") else {})


@change
def constant_edit(spec: ast.Spec) -> ast.Spec:
    (more,) = parse_text("peft 1 edit more at layer[*].ffn.up { h *= 2 }").statements
    return replace(no_expectations(spec), statements=(*no_expectations(spec).statements, more))


@change
def other_order(spec: ast.Spec) -> ast.Spec:
    """The edits in the opposite order: the same, unless they act on one state."""
    own = iter(reversed(edits_of(spec)))
    return replace(
        spec, statements=tuple(next(own) if isinstance(s, ast.Edit) else s for s in no_expectations(spec).statements)
    )
