"""Whether an edit changes nothing at initialisation: its equations over "the state itself", constants and unknowns."""

from __future__ import annotations

from dataclasses import dataclass

from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term


@dataclass(frozen=True)
class Same:
    """The value the base model has in a state, bit for bit."""

    state: str


Initial = Same | float | None  # a state's own value, a constant, or anything else


def is_identity(placed: SiteEdit) -> bool:
    """True where every state that the edit writes has, at initialisation, exactly the value of the base model.

    `h + 4 * adapter(x, init=lora)` is, since 4 · 0 + h = h; `(1 - g) * h + g * f` and added keys are not.
    """
    env: dict[str, Initial] = {name: Same(name) for name in placed.site.states}
    values = dict[int, Initial]()
    for i, assign in enumerate(placed.assigns):
        for _, term in (let for let in placed.lets if let[0] == i):
            values[id(term)] = initial(term, env, values)
        env[assign.state] = initial(assign.value, env, values)
    return all(env[assign.state] == Same(assign.state) for assign in placed.assigns)


def initial(term: Term, env: dict[str, Initial], values: dict[int, Initial]) -> Initial:
    """The value of a term at initialisation; `values` holds the terms bound by `let`."""
    if id(term) in values:
        return values[id(term)]
    match term:
        case Read(state=state):
            return env[state]
        case Constant(value=value):
            return value
        case FormCall():
            return _applied(term, env, values)
        case Arithmetic(op=op, left=left, right=right):
            return _arithmetic(op, initial(left, env, values), initial(right, env, values))
        case FrozenCall() | Concat():
            return None


def _applied(term: FormCall, env: dict[str, Initial], values: dict[int, Initial]) -> Initial:
    form, args = term.instance.form, term.instance.args
    if form.passes and term.input is not None:
        value = initial(term.input, env, values)
        return value if value == Same("w") else None
    return form.at_init(args)


def _arithmetic(op: str, left: Initial, right: Initial) -> Initial:
    if isinstance(left, float) and isinstance(right, float):
        return _constants(op, left, right)
    match op, left, right:
        case ("+" | "-", value, 0.0) | ("+", 0.0, value) | ("*" | "/", value, 1.0) | ("*", 1.0, value):
            return value
        case ("*", 0.0, _) | ("*", _, 0.0):
            return 0.0
        case _:
            return None


def _constants(op: str, left: float, right: float) -> Initial:
    match op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right if right else None
