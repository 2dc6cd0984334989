"""What edits assign: whether values change at initialisation, and pairs that assign one state."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from peftc.addressing.sites import Slice
from peftc.diagnostics import Diagnostic
from peftc.planning.foldability.affine import show_term
from peftc.planning.ir import (
    Arithmetic,
    Assign,
    Concat,
    Constant,
    Feature,
    FormCall,
    FrozenCall,
    Read,
    SiteEdit,
    Term,
)
from peftc.planning.pass_edit import form_of_pass
from peftc.syntax import ast
from peftc.syntax.numbers import ARITHMETIC
from peftc.syntax.printer import print_line

_Assignment = tuple[SiteEdit, Assign, Slice | None]  # with the rows that it assigns


def conflicts(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterator[tuple[ast.Edit, Diagnostic]]:
    """P302, with the later edit, for each pair of edits that assign (`=`) a state of one site."""
    earlier: dict[object, list[_Assignment]] = defaultdict(list)
    reported: set[tuple[str, str]] = set()
    for edit, site_edits in edits:
        for site_edit in (use for one in site_edits for use in one.uses()):
            assigns = () if form_of_pass(site_edit) else site_edit.assigns  # passes read what is there
            for assign in {a.state: a for a in assigns if a.source.op == "="}.values():
                key, rows = _storage(site_edit, assign.state)
                for first, other, other_rows in earlier[key]:
                    overlap = rows is None or other_rows is None or rows.overlaps(other_rows)
                    pair = (first.edit, edit.name)
                    if first.edit != edit.name and overlap and pair not in reported:
                        reported.add(pair)
                        yield edit, _conflict(first, other, edit.name, assign)
                earlier[key].append((site_edit, assign, rows))


def changed_weights(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterator[tuple[ast.Edit, Diagnostic]]:
    """P324, with the edit that reads, for each pair of one that reads the weight of a Linear and
    one that changes what the Linear computes: a fold would change what the first one reads.
    """
    reads = [(edit, one, name) for edit, own in edits for one in own for name in one.weights]
    writers = defaultdict[object, list[SiteEdit]](list)
    for one in (use for _, own in edits for site_edit in own for use in site_edit.uses()) if reads else ():
        if (weight := one.site.states.get("w")) is not None and weight.weight is not None:
            writers[weight.weight.module, weight.weight.attribute].append(one)
    reported = set[tuple[str, str]]()
    for edit, one, name in reads:
        weight = one.site.states[name].weight
        assert weight is not None
        for other in writers[weight.module, weight.attribute]:
            rows = _storage(other, "w")[1]
            overlap = rows is None or weight.rows is None or rows.overlaps(weight.rows)
            if overlap and (edit.name, other.edit) not in reported:
                reported.add((edit.name, other.edit))
                message = f"`{edit.name}` reads `{name}` of `{one.site.path}`, and `{other.edit}` changes that Linear"
                help_ = "let the other edit be at other Linears"
                yield edit, Diagnostic("P324", message, one.assigns[-1].source.span, help=help_)


def changed_modules(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterator[tuple[ast.Edit, Diagnostic]]:
    """P324, with the edit that calls, for each pair of one that calls a module of the model, as in
    `norm(x)`, and one that changes this module: the call may have that edit, or pass it by.
    """
    callers = [(edit, own) for edit, own in edits if own and any(isinstance(t, FrozenCall) for t in own[0].terms())]
    writers = defaultdict[str, dict[tuple[str, str], None]](dict)  # edits with the states that they change, by module
    for one in (use for _, own in edits for site_edit in own for use in site_edit.uses()) if callers else ():
        states = (assign.state for assign in one.assigns if assign.state in ("h", "w", "b"))
        writers[one.site.module] |= {(one.edit, state): None for state in states}
    for edit, own in callers:
        calls = ((one, term) for one in own for term in one.terms() if isinstance(term, FrozenCall))
        for one, term in calls:
            # the call of a site's own module has nothing of what edits make of its `h`
            ignored = {"h"} if term.module == one.site.module else set[str]()
            others = [(name, state) for name, state in writers[term.module] if state not in ignored]
            if others:
                other, state = others[0]
                message = (
                    f"`{edit.name}` calls `{term.function}` of `{one.site.path}`, and `{other}` changes its `{state}`"
                )
                help_ = "let the other edit be at other sites"
                yield edit, Diagnostic("P324", message, one.assigns[-1].source.span, help=help_)
                break


def _storage(site_edit: SiteEdit, name: str) -> tuple[object, Slice | None]:
    """The same key for two names of one state, such as `z` of an ffn and `h` of `ffn.hidden`."""
    state = site_edit.site.states[name]
    if state.weight is not None:
        return (state.weight.module, state.weight.attribute, state.weight.stacked_slice), state.weight.rows
    if state.activation is not None:
        return (site_edit.site.root, state.activation.node), state.activation.rows
    return (site_edit.site.path, name), None


def _conflict(first: SiteEdit, earlier: Assign, name: str, later: Assign) -> Diagnostic:
    message = f"`{first.edit}` and `{name}` both assign `{later.state}` of `{first.site.path}`"
    note = f"`{first.edit}` assigns `{earlier.state}` in line {earlier.source.span.line}"
    is_pair = later.state == "kv"
    help_ = "put all rows in one `concat`" if is_pair else "write both equations in one edit, or add with `+=`"
    label = "this would undo the other"
    return Diagnostic("P302", message, later.source.span, label=label, notes=(note,), help=help_)


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


def change_at_first(site_edits: Sequence[SiteEdit]) -> str | None:
    """What of an edit changes the model before training, as a sentence; None if nothing does."""
    site_edit = next((one for one in site_edits if not is_identity(one)), None)
    if site_edit is None:
        return None
    where = f"at `{site_edit.site.path}`"
    for term in site_edit.terms():
        match term:
            case FormCall(instance=instance) if not instance.form.keeps_base(instance.args, instance.dims):
                first = instance.form.initial(instance.args, instance.dims)
                if first is None:
                    init = instance.form.argument("init")
                    zero = "; with `init=lora` it is" if init is not None and "lora" in init.choices else ""
                    return f"`{show_term(term)}` is not 0 before training, {where}{zero}"
            case Concat():
                return f"`{show_term(term)}` adds rows, {where}"
            case _:
                pass
    assign = site_edit.assigns[-1]
    return f"`{print_line(replace(assign.source, leading=(), trailing=None))}` changes it, {where}"


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
            if source is not None and instance.form.keeps_base(instance.args, instance.dims):
                value = initial_value(source, env, values)
                return value if isinstance(value, BaseValue) else None
            return instance.form.initial(instance.args, instance.dims)
        case Arithmetic(op=op, left=left, right=right):
            return _arithmetic(op, initial_value(left, env, values), initial_value(right, env, values))
        case Feature(input=value):  # of a constant
            inner = initial_value(value, env, values)
            return inner if isinstance(inner, float) else None
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
