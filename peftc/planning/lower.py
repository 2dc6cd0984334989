"""Equations to typed terms at one site: names become states, calls become forms with shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, listed, nearest
from peftc.forms import FORMS, Dims, Form, Illegal
from peftc.forms.shapes import KeyValue, Scalar, Tokens
from peftc.planning.affine import said
from peftc.planning.combine import combine
from peftc.planning.ir import Applied, Arithmetic, Assign, Concat, Constant, Frozen, Instance, Placed, Read, Term
from peftc.planning.scope import Scope
from peftc.semantics.constants import amount
from peftc.semantics.walk import names
from peftc.syntax import ast
from peftc.tracing.sites import Site, State

WRITABLE = frozenset({"h", "q", "k", "v", "kv", "z", "w", "b"})


def place(edit: ast.Edit, site: Site, scope: Scope) -> Placed:
    """The edit at one site of the model.

    Raises:
        P205: no such state here. P301: shapes that do not go together. P303: a `concat` or a value out of place.
        P305: shared parameters of two shapes. P306: a state that cannot be written. P307: no such function or value.
        P308: a `let` that nothing uses. What `peftc.semantics.arguments.bind` and `Form.shape` raise.
    """
    return _Placing(edit, site, scope).placed()


@dataclass
class _Placing:
    edit: ast.Edit
    site: Site
    scope: Scope
    lets: dict[str, Term] = field(default_factory=dict[str, Term])
    instances: list[Instance] = field(default_factory=list[Instance])
    keys: Counter[str] = field(default_factory=Counter[str])
    shared: dict[str, Instance] = field(default_factory=dict[str, Instance])
    target: State | None = None

    def placed(self) -> Placed:
        assigns: list[Assign] = []
        lets: list[tuple[int, Term]] = []
        for i, statement in enumerate(self.edit.body):
            if isinstance(statement, ast.Let):
                self.target = self.state(*_first_use(statement, self.edit.body[i + 1 :]))
                self.lets[statement.name] = self.term(statement.value)
                lets.append((len(assigns), self.lets[statement.name]))
            else:
                assigns.append(self.assign(statement))
        return Placed(self.edit.name, self.site, tuple(assigns), tuple(self.instances), tuple(lets))

    # Equations -------------------------------------------------------------------------------------------------------

    def assign(self, equation: ast.Equation) -> Assign:
        self.target = target = self.state(equation.target, equation.target_span)
        if target.name not in WRITABLE:
            raise _error(
                "P306",
                f"`{target.name}` cannot be written: it is what the site reads",
                equation.target_span,
                help="write `h`, the state that the site computes",
            )
        value = self.term(equation.value)
        if equation.op != "=":
            read = Read(target.name, shape=target.shape, source=ast.Name(equation.target, span=equation.target_span))
            value = self.arithmetic("+" if equation.op == "+=" else "*", read, value, equation.value)
        if value.shape != target.shape:
            raise _error(
                "P301",
                f"`{target.name}` of `{self.site.path}` is {target.shape}, but the value is {value.shape}",
                equation.value.span,
                label=f"{value.shape}",
                notes=(f"`{target.name}` is {target.shape}", f"`{said(value)}` is {value.shape}"),
            )
        if isinstance(target.shape, KeyValue) and not isinstance(value, Concat):
            raise _error(
                "P303",
                "keys and values are changed by `concat` only",
                equation.value.span,
                label="not a `concat`",
                help="write `kv = concat(prefix(…), kv)`; `k` and `v` can be scaled one by one",
            )
        return Assign(target.name, value, equation)

    def state(self, name: str, span: Span) -> State:
        if (found := self.site.states.get(name)) is not None:
            return found
        states = list(self.site.states)
        raise _error(
            "P205",
            f"`{self.site.path}` has no state `{name}`",
            span,
            label="not a state of this site",
            notes=(f"`{self.site.path}` has {listed(states)}" if states else f"`{self.site.path}` has no states",),
            help=did_you_mean(name, states),
        )

    # Expressions -----------------------------------------------------------------------------------------------------

    def term(self, source: ast.Expr) -> Term:
        match source:
            case ast.Number():
                return _constant(float(amount(source)), source)
            case ast.Name(name):
                return self.name(source, name)
            case ast.Negative(operand):
                value = self.term(operand)
                if isinstance(value, Constant):
                    return _constant(-value.value, source)
                return self.arithmetic("*", _constant(-1.0, source), value, source)
            case ast.Binary(op, left, right):
                return self.arithmetic(op, self.term(left), self.term(right), source)
            case ast.Call():
                return self.call(source)
            case ast.Boolean() | ast.String():
                raise _error(
                    "P307", "this is not a value that a state can have", source.span, label="not a number or a state"
                )

    def name(self, source: ast.Name, name: str) -> Term:
        if name in self.lets:
            return self.lets[name]
        if name in self.scope.shared:
            return self.shared_call(name, ast.Call(name, span=source.span, function_span=source.span))
        state = self.state(name, source.span)
        return Read(name, shape=state.shape, source=source)

    def arithmetic(self, op: str, left: Term, right: Term, source: ast.Expr) -> Term:
        if isinstance(left, Constant) and isinstance(right, Constant) and not (op == "/" and right.value == 0):
            return _constant(_calculate(op, left.value, right.value), source)
        if op == "/" and isinstance(right, Constant) and right.value == 0:
            raise _error("P307", "this divides by zero", source.span)
        shape = combine(op, left.shape, right.shape)
        if shape is None or isinstance(left, Concat) or isinstance(right, Concat):
            raise self.mismatch(op, left, right, source)
        assert op in ("+", "-", "*", "/")
        return Arithmetic(op, left, right, shape=shape, source=source)

    def mismatch(self, op: str, left: Term, right: Term, source: ast.Expr) -> PeftcError:
        pair = isinstance(left.shape, KeyValue) or isinstance(right.shape, KeyValue)
        return _error(
            "P301",
            f"`{said(left)} {op} {said(right)}` at `{self.site.path}` puts together {left.shape} and {right.shape}",
            source.span,
            label=f"{left.shape} {op} {right.shape}",
            notes=(f"`{said(left)}` is {left.shape}", f"`{said(right)}` is {right.shape}"),
            help="join keys and values with `concat`" if pair else None,
        )

    # Calls -----------------------------------------------------------------------------------------------------------

    def call(self, call: ast.Call) -> Term:
        if call.function == "concat":
            return self.concat(call)
        if call.function in self.scope.shared:
            return self.shared_call(call.function, call)
        if (module := self.site.functions.get(call.function)) is not None:
            return self.frozen(call, module)
        if (form := FORMS.get(call.function)) is not None:
            return self.applied(call, form)
        known = ["concat", *self.site.functions, *FORMS, *self.scope.shared]
        own = listed(self.site.functions) if self.site.functions else "none"
        raise _error(
            "P307",
            f"`{self.site.path}` has no function `{call.function}`",
            call.function_span,
            label="neither a form nor a frozen module of this site",
            notes=(f"frozen modules of `{self.site.path}`: {own}",),
            help=did_you_mean(call.function, known),
        )

    def concat(self, call: ast.Call) -> Concat:
        parts = tuple(self.term(argument) for argument in call.args)
        wrong = next((part for part in parts if not isinstance(part.shape, KeyValue)), None)
        if wrong is not None:
            raise _error("P303", "`concat` joins keys and values", wrong.source.span, label=f"this is {wrong.shape}")
        own = [part for part in parts if isinstance(part, Read)]
        if len(own) != 1 or len(parts) < 2 or call.kwargs or any(isinstance(part, Concat) for part in parts):
            raise _error(
                "P303",
                "`concat` takes rows to add and, exactly once, `kv`",
                call.span,
                label=f"`kv` stands here {len(own)} times" if len(own) != 1 else "",
                help="write `kv = concat(prefix(…), kv)`",
            )
        return Concat(parts, shape=own[0].shape, source=call)

    def frozen(self, call: ast.Call, module: str) -> Frozen:
        if len(call.args) != 1 or call.kwargs:
            raise _error("P303", f"`{call.function}` is a module of the model and takes one value", call.span)
        value = self.term(call.args[0])
        info = next((m for m in self.scope.table.modules if m.name == module), None)
        size = info.parameters.get("weight") if info else None
        d_in = size[-1] if size else None
        if not isinstance(value.shape, Tokens) or (d_in is not None and d_in != value.shape.d):
            expected = f"[…, {d_in}]" if d_in else "hidden states"
            raise _error(
                "P301",
                f"`{call.function}` of `{self.site.path}` reads {expected}, here it has {value.shape}",
                call.args[0].span,
                label=f"{value.shape}",
                notes=(f"`{call.function}` is the module `{module}`",),
            )
        shape = Tokens(size[0]) if size and len(size) == 2 else value.shape
        return Frozen(call.function, module, value, shape=shape, source=call)

    def shared_call(self, name: str, call: ast.Call) -> Applied:
        inner = self.scope.shared[name].call
        form = FORMS[inner.function]
        if call.args or call.kwargs:
            span = call.span
            inner = replace(inner, args=(*inner.args, *call.args), kwargs=(*inner.kwargs, *call.kwargs), span=span)
            inner = replace(inner, function_span=call.function_span)
        return self.applied(inner, form, owner=name, at=call)

    def applied(self, call: ast.Call, form: Form, owner: str | None = None, at: ast.Call | None = None) -> Applied:
        bound = self.scope.bound(call, form)
        value = None if bound.input is None else self.term(bound.input)
        assert self.target is not None
        dims = Dims(None if value is None else value.shape, self.target.shape, self.scope.table.d_model)
        instance = self.instance(form, bound.args, dims, owner)
        try:
            shape = form.shape(bound.args, instance.dims)
        except Illegal as illegal:
            raise self.illegal(illegal, call, bound.input) from None
        if owner is not None:
            self.scope.agree(owner, form, dims, at or call)
        return Applied(instance, value, shape=shape, source=at or call)

    def instance(self, form: Form, args: object, dims: Dims, owner: str | None) -> Instance:
        if owner is not None and owner in self.shared:
            return self.shared[owner]
        self.keys[form.name] += 1
        number = self.keys[form.name]
        key = form.name if number == 1 else f"{form.name}_{number}"
        made = Instance(key, form, args, dims)  # pyright: ignore[reportArgumentType]
        made = self.owned(made, owner)
        self.instances.append(made)
        return made

    def owned(self, made: Instance, owner: str | None) -> Instance:
        """With its owner, where several sites share its parameters, and its number among them."""
        assert self.target is not None
        if owner is not None:
            members = self.scope.shared_by.get(owner, ())
            place = (self.edit.name, self.site.path)
            if not made.form.grouped(made.args) or place not in members:
                self.shared[owner] = replace(made, owner=owner)
            else:
                dims = replace(made.dims, sites=len(members))
                self.shared[owner] = replace(made, owner=owner, dims=dims, index=members.index(place))
            return self.shared[owner]
        if not made.form.grouped(made.args):
            return made
        group, sites = self.scope.group_of(self.edit.name, self.site, self.target.name)
        dims = replace(made.dims, sites=len(sites))
        return replace(
            made, owner=f"{self.edit.name}.{made.key}.{group}", dims=dims, index=list(sites).index(self.site.path)
        )

    def illegal(self, illegal: Illegal, call: ast.Call, value: ast.Expr | None) -> PeftcError:
        keyword = next((k for k in call.kwargs if k.name == illegal.argument), None)
        span = keyword.span if keyword else value.span if illegal.argument == "input" and value else call.span
        assert self.target is not None
        where = f"`{self.target.name}` of `{self.site.path}` is {self.target.shape}"
        return _error(illegal.code, illegal.message, span, notes=(*illegal.notes, where), help=illegal.help)


def _first_use(let: ast.Let, rest: Sequence[ast.Equation | ast.Let]) -> tuple[str, Span]:
    """The state that the first equation using a `let` writes: the shapes of its forms follow from it."""
    used = {let.name}
    for statement in rest:
        if used & set(names(statement.value)):
            if isinstance(statement, ast.Equation):
                return statement.target, statement.target_span
            used.add(statement.name)
    known = [name for statement in rest for name in names(statement.value)]
    raise _error(
        "P308",
        f"nothing uses `{let.name}`",
        let.span,
        label="its parameters would be trained for nothing",
        help=f"did you mean `{found}`?" if (found := nearest(let.name, known)) else "leave it out",
    )


def _constant(value: float, source: ast.Expr) -> Constant:
    return Constant(value, shape=Scalar(), source=source)


def _calculate(op: str, left: float, right: float) -> float:
    match op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right


def _error(
    code: str, message: str, span: Span, *, label: str = "", notes: tuple[str, ...] = (), help: str | None = None
) -> PeftcError:
    return PeftcError(Diagnostic(code, message, span, label=label, notes=notes, help=help))
