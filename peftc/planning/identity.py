"""Whether an edit leaves the model unchanged at initialisation, by abstract interpretation."""

from __future__ import annotations

from dataclasses import dataclass

from peftc.planning.arithmetic import ARITHMETIC
from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term


@dataclass(frozen=True)
class BaseValue:
    """The value that the base model has in a state, bit for bit."""

    state: str


Initial = BaseValue | float | None  # None: unknown


def is_identity(site_edit: SiteEdit) -> bool:
    """True if every written state has, at initialisation, exactly its value in the base model.

    `h + 4 * adapter(x, init=lora)` is one, since 4 · 0 + h = h; `(1 - g) * h + g * f` is not.
    """
    env: dict[str, Initial] = {name: BaseValue(name) for name in site_edit.site.states}
    values = dict[int, Initial]()
    for i, assign in enumerate(site_edit.assigns):
        for _, term in (let for let in site_edit.lets if let[0] == i):
            values[id(term)] = initial_value(term, env, values)
        env[assign.state] = initial_value(assign.value, env, values)
    return all(env[assign.state] == BaseValue(assign.state) for assign in site_edit.assigns)


def initial_value(term: Term, env: dict[str, Initial], values: dict[int, Initial]) -> Initial:
    """The value of a term at initialisation; `values` holds the terms bound by `let`, by id."""
    if id(term) in values:
        return values[id(term)]
    match term:
        case Read(state=state):
            return env[state]
        case Constant(value=value):
            return value
        case FormCall(instance=instance, input=source):
            if instance.form.passes and source is not None:
                value = initial_value(source, env, values)
                return value if value == BaseValue("w") else None
            return instance.form.at_init(instance.args)
        case Arithmetic(op=op, left=left, right=right):
            return _arithmetic(op, initial_value(left, env, values), initial_value(right, env, values))
        case FrozenCall() | Concat():
            return None


def _arithmetic(op: str, left: Initial, right: Initial) -> Initial:
    if isinstance(left, float) and isinstance(right, float):
        return None if op == "/" and not right else ARITHMETIC[op](left, right)
    match op, left, right:
        case ("+" | "-", value, 0.0) | ("+", 0.0, value) | ("*" | "/", value, 1.0) | ("*", 1.0, value):
            return value
        case ("*", 0.0, _) | ("*", _, 0.0):
            return 0.0
        case _:
            return None
