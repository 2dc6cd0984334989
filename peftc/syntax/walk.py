"""Traversal of expressions, statements and selectors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from peftc.syntax import ast
from peftc.syntax.vocabulary import EVERY_MODULE, LAYER, LINEAR, SHARED, STACK_CHOICES

MAX_PATHS = 100  # that one path with braces is short for


_CHILDREN: Mapping[type, Callable[[Any], tuple[ast.Expr, ...]]] = {
    ast.Call: lambda value: (*value.args, *[keyword.value for keyword in value.kwargs]),
    ast.Negative: lambda value: (value.operand,),
    ast.Binary: lambda value: (value.left, value.right),
    ast.Pair: lambda value: (value.first, value.second),
    ast.List: lambda value: value.items,
    ast.Item: lambda value: (value.value, *value.indices),
    ast.Attribute: lambda value: (value.value,),
    ast.Binding: lambda value: (value.count,),
}


def children(value: ast.Expr) -> tuple[ast.Expr, ...]:
    """The expressions directly in an expression, in the order of the text."""
    inner = _CHILDREN.get(type(value))
    return () if inner is None else inner(value)


def map_children(value: ast.Expr, function: Callable[[ast.Expr], ast.Expr]) -> ast.Expr:
    """`value` with `function` applied to each of its children."""
    match value:
        case ast.Call(_, args, kwargs):
            named = tuple(replace(keyword, value=function(keyword.value)) for keyword in kwargs)
            return replace(value, args=tuple(map(function, args)), kwargs=named)
        case ast.Negative(operand):
            return replace(value, operand=function(operand))
        case ast.Binary(_, left, right):
            return replace(value, left=function(left), right=function(right))
        case ast.Pair(first, second):
            return replace(value, first=function(first), second=function(second))
        case ast.List(items):
            return replace(value, items=tuple(map(function, items)))
        case ast.Item(owner, indices):
            return replace(value, value=function(owner), indices=tuple(map(function, indices)))
        case ast.Attribute(owner):
            return replace(value, value=function(owner))
        case ast.Binding(_, count):
            return replace(value, count=function(count))
        case _:
            return value


def walk(value: ast.Expr) -> Iterator[ast.Expr]:
    """`value` and its descendants in the order of the text. Not recursive: it may be deep."""
    stack = [value]
    while stack:
        node = stack.pop()
        yield node
        if (inner := _CHILDREN.get(type(node))) is not None:
            stack.extend(reversed(inner(node)))


def fits(value: ast.Expr, depth: int, size: int, environment: Mapping[str, ast.Expr | None] | None = None) -> bool:
    """Whether `value`, after substitution, has at most `depth` levels and `size` nodes."""
    stack = [(value, 1, environment)]
    count = 0
    while stack:
        node, level, names = stack.pop()
        substitution = names.get(node.id) if names is not None and isinstance(node, ast.Name) else None
        if substitution is not None:
            stack.append((substitution, level, None))
            continue
        count += 1
        if level > depth or count > size:
            return False
        stack.extend((child, level + 1, names) for child in children(node))
    return True


def differs_by_layer(value: ast.Expr) -> bool:
    """Whether `value` has a list, `[4, 4, 8]`, or the number `layer`."""
    return any(isinstance(node, ast.List) or node == ast.Name(LAYER) for node in walk(value))


def is_shared(value: ast.Expr) -> bool:
    """Whether `value` is `shared(…)`: one set of parameters for all sites that use it."""
    return isinstance(value, ast.Call) and value.function == SHARED


def names_in(value: ast.Expr) -> Iterator[str]:
    """All names in `value`, those of functions included."""
    nodes = (node for node in walk(value) if isinstance(node, ast.Name | ast.Call))
    return (node.id if isinstance(node, ast.Name) else node.function for node in nodes)


def values(statement: ast.Statement) -> Iterator[ast.Expr]:
    """The expressions of a statement and of its body."""
    match statement:
        case ast.Method(params=params, body=body):
            yield from (value for inner in body for value in values(inner))
            yield from (param.default for param in params)
        case ast.Edit(body=body, where=where):
            yield from (value for condition in where for value in condition_values(condition))
            yield from (line.value for line in body)
        case ast.Train(where=where):
            yield from (value for condition in where for value in condition_values(condition))
        case ast.Equation(value=value, condition=condition) | ast.Let(value=value, condition=condition):
            yield from (value, *condition_values(condition))
        case ast.Expect(left=left, right=right):
            yield from (left,) if right is None else (left, right)
        case ast.Apply(args=args):
            yield from (arg.value for arg in args)
        case ast.Form(params=params, body=body):
            yield from (param.default for param in params if param.default is not None)
            yield from (value for inner in body for value in values(inner))
        case ast.Save(call=call, condition=condition):
            yield from (call, *condition_values(condition))
        case ast.Parameter():
            yield from (*line_values(statement),)
        case ast.Require(left=left, right=right, condition=condition):
            yield from (left, right, *condition_values(condition))
        case _:
            pass


def line_values(line: ast.Parameter) -> tuple[ast.Expr, ...]:
    """The expressions of a parameter: sizes, first value, condition."""
    return (*line.sizes, line.value, *condition_values(line.condition))


def condition_values(condition: ast.Condition | None) -> tuple[ast.Expr, ...]:
    if condition is None:
        return ()
    return (condition.left,) if condition.right is None else (condition.left, condition.right)


def map_condition(condition: ast.Condition, function: Callable[[ast.Expr], ast.Expr]) -> ast.Condition:
    """`condition` with `function` applied to each of its sides."""
    right = None if condition.right is None else function(condition.right)
    return replace(condition, left=function(condition.left), right=right)


def names_in_statements(statements: Iterable[ast.Statement]) -> Iterator[str]:
    return (name for statement in statements for value in values(statement) for name in names_in(value))


def spell_out(selector: ast.Selector) -> ast.Selector:
    """A selector without braces: `attn.{q, v}` is `attn.q | attn.v`."""
    match selector:
        case ast.BracedPath():
            paths = [ast.Path(steps, optional, span=selector.span) for steps, optional in _paths(selector)]
            return ast.Union(tuple(paths), span=selector.span)
        case ast.Union(parts):
            return replace(selector, arms=tuple(arm for part in parts for arm in united(spell_out(part))))
        case ast.Difference(left, right):
            return replace(selector, left=spell_out(left), right=spell_out(right))
        case _:
            return selector


def united(selector: ast.Selector) -> tuple[ast.Selector, ...]:
    """The arms of a union; else the selector itself."""
    return selector.arms if isinstance(selector, ast.Union) else (selector,)


def _paths(path: ast.Path | ast.BracedPath) -> list[tuple[tuple[ast.Step, ...], bool]]:
    """The steps of each path that one with braces is short for, and whether it is optional."""
    paths: list[tuple[tuple[ast.Step, ...], bool]] = [((), path.optional)]
    for step in path.steps:
        parts = [((step,), False)] if isinstance(step, ast.Step) else [p for one in step.paths for p in _paths(one)]
        paths = [(before + steps, first or second) for before, first in paths for steps, second in parts]
    return paths


def count_paths(path: ast.Path | ast.BracedPath) -> int:
    """How many paths one with braces is short for, those in its braces for `MAX_PATHS` each."""
    groups = (step.paths for step in path.steps if isinstance(step, ast.Braces))
    return prod(sum(map(count_paths, paths)) for paths in groups)


def arms(selector: ast.Selector) -> Iterator[ast.Path | ast.Glob]:
    """The paths and patterns of a selector, the subtracted ones included."""
    match selector:
        case ast.BracedPath():
            yield from arms(spell_out(selector))
        case ast.Union(parts):
            yield from (arm for part in parts for arm in arms(part))
        case ast.Difference(left, right):
            yield from (*arms(left), *arms(right))
        case _:
            yield selector


def names_in_selectors(statements: Iterable[ast.Statement]) -> Iterator[str]:
    """The names of the steps of all paths, any of which may be that of a group of sites."""
    for statement in statements:
        match statement:
            case ast.Method(body=body):
                yield from names_in_selectors(body)
            case ast.Edit(selector=selector) | ast.Train(selector=selector) | ast.SiteGroup(selector=selector):
                yield from _step_names(selector)
            case ast.Apply(at=at) if at is not None:
                yield from _step_names(at)
            case _:
                pass


def _step_names(selector: ast.Selector) -> Iterator[str]:
    yield from (step.name for arm in arms(selector) if isinstance(arm, ast.Path) for step in arm.steps)


def above_modules(steps: Sequence[ast.Step]) -> Sequence[ast.Step] | None:
    """The steps before `**` or `**.linear`, which name modules below; None if no path ends so."""
    end = len(steps) - ends_in_linears(steps)
    return steps[: end - 1] if steps[end - 1].name == EVERY_MODULE else None


def ends_in_linears(steps: Sequence[ast.Step]) -> bool:
    """Whether a path ends in `**.linear`: the Linears below."""
    return [step.name for step in steps[-2:]] == [EVERY_MODULE, LINEAR]


def selects_stack(steps: Sequence[ast.Step], number: int) -> bool:
    """Whether a step is the `input` of `input.embed` or the `output` of `output.layer[*]`."""
    return [step.name for step in steps[number + 1 : number + 2]] == [STACK_CHOICES.get(steps[number].name)]


def changes_model(statements: Iterable[ast.Statement]) -> bool:
    """Whether a file has statements that change a model, apart from the definitions of methods."""
    return any(isinstance(statement, ast.Edit | ast.Train | ast.Apply) for statement in statements)
