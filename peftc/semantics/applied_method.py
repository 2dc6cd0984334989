"""`apply … at STACK as enc`: restricts the selectors of a method, and prefixes its names."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.moves import moves_to
from peftc.syntax import ast
from peftc.syntax.printer import print_index, print_selector
from peftc.syntax.vocabulary import STACKS, TOWERS
from peftc.syntax.walk import map_children, selects_stack

_QUALIFIERS = (*STACKS, *TOWERS)
_PATTERN = "a pattern on module names cannot be restricted"
Steps = tuple[ast.Step, ...]


def restrict(inner: ast.Selector, outer: ast.Selector) -> ast.Selector:
    """The sites of `inner` within `outer`; spans are those of `inner`. Raises: PeftcError P122."""
    match outer, inner:
        case ast.Union(arms), _:
            return ast.Union(tuple(restrict(inner, arm) for arm in arms), span=inner.span)
        case ast.Difference(left, right), _:
            return ast.Difference(restrict(inner, left), restrict(inner, right), span=inner.span)
        case _, ast.Union(arms) if isinstance(outer, ast.Path):
            return replace(inner, arms=tuple(restrict(arm, outer) for arm in arms))
        case _, ast.Difference(left, right) if isinstance(outer, ast.Path):
            return replace(inner, left=restrict(left, outer), right=restrict(right, outer))
        case ast.Path(), ast.Path():
            # The steps of `outer` are in another text, or in another place of it.
            above = tuple(replace(step, span=inner.steps[0].span) for step in outer.steps)
            return replace(inner, steps=_Join(inner, outer).steps(inner.steps, above))
        case _:
            raise _error(inner, outer, _PATTERN)


class _Join:
    """Joins paths: `layer[*].attn` and `encoder.layer[0..5]` give `encoder.layer[0..5].attn`."""

    def __init__(self, inner: ast.Path, outer: ast.Path) -> None:
        self.inner, self.outer = inner, outer

    def steps(self, steps: Steps, above: Steps) -> Steps:
        first, stack = steps[0].name, above[0].name
        if selects_stack(steps, 0) and not any(selects_stack(above, i) for i in range(len(above))):
            at = next((i for i, step in enumerate(above) if step.name not in _QUALIFIERS), len(above))
            return (*above[:at], steps[0], *(self.steps(steps[1:], above[at:]) if above[at:] else steps[1:]))
        if first in _QUALIFIERS and stack not in _QUALIFIERS:
            return (steps[0], *self.steps(steps[1:], above)) if len(steps) > 1 else steps
        if first in STACKS and stack in TOWERS:
            return (above[0], *(self.steps(steps, above[1:]) if len(above) > 1 else steps))
        if first in _QUALIFIERS and stack != first:
            raise _error(self.inner, self.outer, f"`{first}` is not in `{stack}`")
        names = [step.name for step in above]
        common = next(
            (n for n in range(min(len(steps), len(above)), 0, -1) if names[-n:] == [step.name for step in steps[:n]]), 0
        )
        in_layers = any(step.name == "layer" for step in above) or above[-1].name not in _QUALIFIERS
        if in_layers and not common and first != "**":
            raise _error(self.inner, self.outer, f"`{first}` is not in `{print_selector(self.outer)}`")
        before = len(above) - common
        both = (self._step(a, b) for a, b in zip(above[before:], steps[:common], strict=True))
        return (*above[:before], *both, *steps[common:])

    def _step(self, above: ast.Step, step: ast.Step) -> ast.Step:
        """The step with the indices that both have."""
        if _is_every(step) or above.indices == step.indices:
            return replace(step, indices=above.indices if above.indices is not None else step.indices)
        if _is_every(above):
            return step
        inner, outer = (", ".join(map(print_index, each.indices or ())) for each in (step, above))
        raise _error(self.inner, self.outer, f"both select among `{step.name}`: `[{inner}]` and `[{outer}]`")


def _is_every(step: ast.Step) -> bool:
    return step.indices is None or step.indices == (ast.Index(None, None),)


def _error(inner: ast.Selector, outer: ast.Selector, reason: str) -> PeftcError:
    message = f"`{print_selector(inner)}` cannot be restricted to `{print_selector(outer)}`"
    help_ = "write the edit with the intended selector, or apply the method without `at`"
    return PeftcError(Diagnostic("P122", message, inner.span, label=reason, help=help_))


def prefix_names(statements: Iterable[ast.Statement], alias: str) -> list[ast.Statement]:
    """The statements of one applied method, with prefixed edits, `train`s and shared parameters."""
    body = list(statements)
    edits = {s.name: f"{alias}.{s.name}" for s in body if isinstance(s, ast.Edit | ast.Train)}
    shared = {s.name: f"{alias}.{s.name}" for s in body if isinstance(s, ast.Let)}
    moves = moves_to([s for s in body if isinstance(s, ast.Moved)], {*edits, *shared})
    return [_statement(statement, edits, shared, dict.fromkeys(moves, alias)) for statement in body]


def _statement(
    statement: ast.Statement,
    edits: Mapping[str, str],
    shared: Mapping[str, str],
    moves: Mapping[ast.Moved, str],
) -> ast.Statement:
    match statement:
        case ast.Edit():
            body = tuple(replace(line, value=_rename_calls(line.value, shared)) for line in statement.body)
            return replace(statement, name=edits[statement.name], body=body)
        case ast.Train():
            return replace(statement, name=edits[statement.name])
        case ast.Let():
            return replace(statement, name=shared[statement.name])
        case ast.Moved(old, new) if (alias := moves.get(statement)) is not None:
            return replace(statement, old=f"{alias}.{old}", new=f"{alias}.{new}")
        case ast.Expect(left, _, right):
            right = None if right is None else _rename_names(right, edits)
            return replace(statement, left=_rename_names(left, edits), right=right)
        case _:
            return statement


def _rename_calls(value: ast.Expr, names: Mapping[str, str]) -> ast.Expr:
    """Equations call shared parameters."""
    value = map_children(value, lambda child: _rename_calls(child, names))
    return replace(value, function=names.get(value.function, value.function)) if isinstance(value, ast.Call) else value


def _rename_names(value: ast.Expr, names: Mapping[str, str]) -> ast.Expr:
    """Expectations name edits."""
    value = map_children(value, lambda child: _rename_names(child, names))
    return replace(value, id=names.get(value.id, value.id)) if isinstance(value, ast.Name) else value
