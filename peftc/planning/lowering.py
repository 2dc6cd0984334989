"""Lowers an edit at a site: from the AST to typed equations with states, forms and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from peftc.addressing.module_infos import infos_of
from peftc.addressing.renaming import inner_name
from peftc.addressing.site_list import site_list
from peftc.addressing.sites import Site, State
from peftc.diagnostics import Diagnostic, PeftcError, Related, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names, plural
from peftc.forms import Dims, Form, PlacementError
from peftc.forms.calls import shape_at
from peftc.forms.shapes import KeyValue, Prompt, Scalar, Tokens, Weight
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
    combine_shapes,
    subterms,
    with_weights,
)
from peftc.planning.lowering_context import FormInstances, LoweringContext
from peftc.planning.repeated_calls import check_calls_of_weight
from peftc.planning.selection.module_sites import body_at
from peftc.semantics.arguments import bind, shared_call
from peftc.syntax import ast
from peftc.syntax.numbers import ARITHMETIC, numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import FROZEN_MODULES, WEIGHT
from peftc.syntax.walk import names_in

_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
WRITABLE = frozenset({"h", "q", "k", "v", "kv", "z", "w", "b"})
MAX_QUOTE = 50  # characters of an expression in a message


def lower_edit(edit: ast.Edit, site: Site, context: LoweringContext) -> SiteEdit:
    """The typed equations of an edit at one site; `h += f` becomes `h = h + f`.

    Raises: P101, P105 (no such form, not a value), P205 (no such state), P301 (shapes), P303
    (`concat`), P305 (shared by two shapes), P306 (read-only), P307 (no such module), P218 and P219
    (a weight that the layer uses several times), and more.
    """
    tasks = context.tasks if edit.per_task else edit.adapters
    instances = FormInstances(edit.name, site, context, tasks, are_adapters=bool(edit.adapters))
    terms = TermLowering(edit.name, site, context, instances)
    assigns: list[Assign] = []
    lets: list[tuple[int, Term]] = []
    body = body_at(edit, site)
    for i, line in enumerate(body):
        if isinstance(line, ast.Equation):
            assigns.append(_assign(line, terms))
        elif (use := _first_use(line, body[i + 1 :])) is not None:
            terms.target = terms.state(*use)
            terms.lets[line.name] = terms.term(line.value)
            lets.append((len(assigns), terms.lets[line.name]))
    site_edit = SiteEdit(
        edit.name,
        with_weights(site, terms.weights),
        tuple(assigns),
        tuple(instances.instances),
        tuple(lets),
        weights=terms.weights,
    )
    check_calls_of_weight(edit, site_edit)
    return site_edit


def unused(edit: ast.Edit) -> Iterable[Diagnostic]:
    """P114 warnings: a `let` that no equation uses has no parameters and no effect."""
    for i, line in enumerate(edit.body):
        if isinstance(line, ast.Let) and _first_use(line, edit.body[i + 1 :]) is None:
            yield Diagnostic("P114", f"`{line.name}` is never used", line.span, help="remove it", severity="warning")


def _first_use(let: ast.Let, rest: Sequence[ast.Equation | ast.Let]) -> tuple[str, Span] | None:
    """What the first equation that uses a `let` writes; the shapes of its forms follow from it."""
    used = {let.name}
    for line in rest:
        if not used & set(names_in(line.value)):
            continue
        if isinstance(line, ast.Equation):
            return line.target, line.target_span
        used.add(line.name)
    return None


def _assign(equation: ast.Equation, terms: TermLowering) -> Assign:
    terms.target = target = terms.state(equation.target, equation.target_span)
    if target.name not in WRITABLE:
        help_ = "write `h`, the state that the site computes" if "h" in terms.site.states else None
        message = f"`{target.name}` cannot be written: it is what the site reads"
        raise error("P306", message, equation.target_span, help=help_)
    value = terms.term(equation.value)
    if equation.op != "=":
        read = terms.read(equation.target, equation.target_span)
        value = terms.arithmetic("+" if equation.op == "+=" else "*", read, value, equation.value)
    if isinstance(target.shape, KeyValue) and isinstance(value.shape, KeyValue) and not isinstance(value, Concat):
        message = "keys and values are changed by `concat` only"
        help_ = "write `kv = concat(prefix(…), kv)`; `k` and `v` can be scaled one by one"
        raise error("P303", message, equation.value.span, label="not a `concat`", help=help_)
    if value.shape != target.shape:
        message = f"`{target.name}` of `{terms.site.path}` is {target.shape}, but the value is {value.shape}"
        notes = (f"`{target.name}` is {target.shape}", f"`{quote(value.source)}` is {value.shape}")
        raise error("P301", message, equation.value.span, label=f"{value.shape}", notes=notes)
    return Assign(target.name, value, equation)


@dataclass
class TermLowering:
    edit: str
    site: Site
    context: LoweringContext
    instances: FormInstances
    lets: dict[str, Term] = field(default_factory=dict[str, Term])
    target: State | None = None  # the state that the current equation writes
    weights: dict[str, State] = field(default_factory=dict[str, State])  # of Linears around the site

    def term(self, source: ast.Expr) -> Term:
        match source:
            case ast.Number():
                return constant(float(numeric_value(source)), source)
            case ast.Name(name):
                return self.lets[name] if name in self.lets else self.read(name, source.span)
            case ast.Negative(operand):
                value = self.term(operand)
                if isinstance(value, Constant):
                    return constant(-value.value, source)
                return self.arithmetic("*", constant(-1.0, source), value, source)
            case ast.Binary(op, left, right) if op != "@":
                return self.arithmetic(op, self.term(left), self.term(right), source)
            case ast.Call():
                return self.call(source)
            case ast.Item(value, (ast.Number() as index,)):
                return self.feature(self.term(value), int(index.value), source)
            case _:
                message = f"expected a hidden state or a number, found `{print_expression(source)}`"
                raise error("P105", message, source.span)

    def read(self, name: str, span: Span) -> Read:
        return Read(name, shape=self.state(name, span).shape, source=ast.Name(name, span=span))

    def state(self, name: str, span: Span) -> State:
        if (state := self.site.states.get(name)) is not None:
            return state
        path, states = self.site.path, list(self.site.states)
        notes = (f"`{path}` has {join_names(states)}" if states else f"`{path}` has no states",)
        help_ = _as_weight(name, self.site) or did_you_mean(name, [*states, *self.lets])
        module = infos_of(self.context.table).find(self.site.module)
        if module is not None and name in ("x", "h"):
            notes = (*notes, *([module.unknown] if module.unknown else ()))
            if not module.called and module.unknown:  # which says where its weight is read
                help_ = "the weight may take the edit: `w += lowrank(r=8)`" if "w" in states else None
            elif not module.called and module.type in _CONTAINERS:
                notes = (*notes, f"`{module.name}` is a {module.type}: it has no forward of its own")
                help_ = f'name the modules in it: `"{module.name}.*"`'
            elif not module.called:
                notes = (*notes, f"no forward of the sample calls `{module.name}`")
                help_ = "give a sample that reaches it, `sample={…}`, or several, `samples=[{…}, {…}]`"
        message, label = f"`{path}` has no state `{name}`", "not a state of this site"
        raise error("P205", message, span, label=label, notes=notes, help=help_)

    def arithmetic(self, op: str, left: Term, right: Term, source: ast.Expr) -> Term:
        if op == "/" and isinstance(right, Constant) and right.value == 0:
            raise error("P120", f"`{quote(source)}` divides by zero", source.span)
        if isinstance(left, Constant) and isinstance(right, Constant):
            return constant(ARITHMETIC[op](left.value, right.value), source)
        shape = combine_shapes(op, left.shape, right.shape)
        if shape is None or isinstance(left, Concat) or isinstance(right, Concat):
            is_pair = isinstance(left.shape, KeyValue) or isinstance(right.shape, KeyValue)
            message = f"`{op}` puts together {left.shape} and {right.shape} at `{self.site.path}`"
            notes = tuple(f"`{quote(side.source)}` is {side.shape}" for side in (left, right))
            label, help_ = f"{left.shape} {op} {right.shape}", "join keys and values with `concat`" if is_pair else None
            for one, other in ((left, right), (right, left)):
                if isinstance(one.shape, Tokens) and isinstance(other.shape, Scalar) and other.shape.rows:
                    help_ = "it has no tokens: `f = … + 0 * x` in the form has the same value at each token"
            if isinstance(left.shape, Tokens) and isinstance(right.shape, Tokens):
                few = left if left.shape.d < right.shape.d else right
                if isinstance(few, FormCall):
                    help_ = f"a form gives `d(out)` features; one feature for each token is `{quote(few.source)}[0]`"
            raise error("P301", message, source.span, label=label, notes=notes, help=help_)
        assert op in ("+", "-", "*", "/")
        return Arithmetic(op, left, right, shape=shape, source=source)

    def feature(self, value: Term, index: int, source: ast.Item) -> Feature:
        """`g[0]`: a feature of each token. Raises: P301 for a value without, or without so many."""
        shape, text = value.shape, quote(value.source)
        if not isinstance(shape, Tokens) or isinstance(shape, Prompt):
            help_ = "features are those of hidden states, and of forms with a value for each token"
            raise error("P301", f"`{text}` is {shape}, which has no features", source.span, help=help_)
        if index >= shape.d:
            message, help_ = f"`{text}` has {plural(shape.d, 'feature')}", f"the last one is `{text}[{shape.d - 1}]`"
            raise error("P301", message, source.indices[0].span, help=help_, label="features are numbered from 0")
        return Feature(value, index, shape=replace(shape, d=1), source=source)

    def call(self, call: ast.Call) -> Term:
        name = call.function
        if name == "concat":
            return self.concat(call)
        if (shared := self.context.shared.get(name)) is not None:
            return self.form_call(shared_call(shared, call), self.context.forms[shared.function], owner=name, use=call)
        if (module := self.site.frozen_modules.get(name)) is not None:
            return self.frozen_call(call, module)
        if (form := self.context.forms.get(name)) is not None:
            return self.form_call(call, form)
        if name == WEIGHT:
            return self.weight(call)
        if name in FROZEN_MODULES:
            modules = join_names(self.site.frozen_modules) if self.site.frozen_modules else "none"
            notes = (f"modules of the model that an equation can call there: {modules}",)
            raise error("P307", f"`{self.site.path}` has no `{name}`", call.function_span, notes=notes)
        known = ["concat", *self.site.frozen_modules, *self.context.forms, *self.context.shared]
        raise error("P101", f"there is no form `{name}`", call.function_span, help=did_you_mean(name, known))

    def weight(self, call: ast.Call) -> Read | Concat:
        """The weights of Linears of the sub-layer, as they are in the base, one above the other."""
        parts = [self.weight_of(arg.id, arg.span) for arg in call.args if isinstance(arg, ast.Name)]
        shapes = [part.shape for part in parts if isinstance(part.shape, Weight)]
        if len({shape.d_in for shape in shapes}) > 1:
            texts = join_names(f"{part.state} is {part.shape}" for part in parts)
            raise error("P301", f"weights of different inputs are not one matrix: {texts}", call.span)
        if len(parts) == 1:
            return parts[0]
        whole = replace(shapes[0], d_out=sum(shape.d_out for shape in shapes))
        return Concat(tuple(parts), shape=whole, source=call)

    def weight_of(self, name: str, span: Span) -> Read:
        """The weight of the Linear `k`. Raises: P307 where the sub-layer has none of that name."""
        sites, read = site_list(self.context.table), f"{WEIGHT}({name})"
        outer = self.site.path.rpartition(".")[0]
        site = next(filter(None, (sites.get(f"{path}.{name}") for path in (self.site.path, outer))), None)
        state = None if site is None else site.states.get("w")
        inside = None if site is None else inner_name(site.module, self.site.module)
        if state is None or state.weight is None or inside is None or not isinstance(state.shape, Weight):
            raise error("P307", f"`{self.site.path}` has no Linear `{name}`, whose weight could be read", span)
        self.weights[read] = replace(state, weight=replace(state.weight, module=inside.lstrip(".")))
        return Read(read, shape=state.shape, source=ast.Name(read, span=span))

    def concat(self, call: ast.Call) -> Concat:
        parts = tuple(self.term(argument) for argument in call.args)
        if parts and isinstance(parts[-1].shape, Tokens):
            return self._concat_prompt(call, parts)
        for part in parts:
            if not isinstance(part.shape, KeyValue):
                raise error("P303", "`concat` joins keys and values", part.source.span, label=f"this is {part.shape}")
        reads = [part for part in parts if isinstance(part, Read)]
        if len(reads) != 1 or any(isinstance(part, Concat) for part in parts):
            message = "`concat` takes rows to add and, exactly once, `kv`"
            label = f"`kv` stands here {len(reads)} times" if len(reads) != 1 else ""
            raise error("P303", message, call.span, label=label, help="write `kv = concat(prefix(…), kv)`")
        return Concat(parts, shape=reads[0].shape, source=call)

    def _concat_prompt(self, call: ast.Call, parts: tuple[Term, ...]) -> Concat:
        """`concat(prompt(…), h)`: trained tokens before those of the input."""
        *rows, state = parts
        assert isinstance(state.shape, Tokens)
        if self.site.steps[-1][0] != "embed":
            has_embed = any(site.steps[-1][0] == "embed" for site in self.context.table.sites)
            help_ = "name `input.embed`" if has_embed else f"{self.context.table.model_id} has no site `embed`"
            help_ += "; an attention takes rows of keys and values, `kv = concat(prefix(len=10), kv)`"
            message = "tokens of a prompt can be added only at `embed`"
            raise error("P303", message, call.span, label="not `embed`", help=help_)
        d = state.shape.d
        wrong = next((row for row in rows if not isinstance(row.shape, Prompt) or row.shape.d != d), None)
        if not rows or wrong is not None or call.kwargs or not isinstance(state, Read) or state.state != "h":
            span = call.span if wrong is None else wrong.source.span
            message = "`concat` of tokens takes trained rows and then `h`"
            raise error("P303", message, span, help="write `h = concat(prompt(len=…), h)`")
        if (read := next((t for row in rows for t in subterms(row) if isinstance(t, Read)), None)) is not None:
            message = f"the rows before the tokens are the same for all inputs, and these read `{read.state}`"
            raise error("P303", message, read.source.span, help="write rows that read no state, `prompt(len=…)`")
        return Concat(parts, shape=state.shape, source=call)

    def frozen_call(self, call: ast.Call, module: str) -> FrozenCall:
        if len(call.args) != 1 or call.kwargs:
            raise error("P108", f"`{call.function}` is a module of the model and takes one value", call.span)
        info = infos_of(self.context.table).find(module)
        size = () if info is None else info.parameters.get("weight", ())
        assert self.target is not None
        # forms in the argument produce what the module reads
        terms = replace(self, target=replace(self.target, shape=Tokens(size[-1]))) if size else self
        value = terms.term(call.args[0])
        if not isinstance(value.shape, Tokens) or (size and size[-1] != value.shape.d):
            expected = f"[…, {size[-1]}]" if size else "hidden states"
            message = f"`{call.function}` of `{self.site.path}` reads {expected}, here it has {value.shape}"
            notes = (f"`{call.function}` is the module `{module}`",)
            raise error("P301", message, call.args[0].span, label=f"{value.shape}", notes=notes)
        shape = Tokens(size[0], value.shape.of) if len(size) == 2 else value.shape
        return FrozenCall(call.function, module, value, shape=shape, source=call)

    def form_call(self, call: ast.Call, form: Form, owner: str | None = None, use: ast.Call | None = None) -> FormCall:
        """A call of a form. `owner`: the name of the `shared` through which `use` calls it."""
        use = use or call
        bound = bind(call, form)
        value = None if bound.input is None else self.term(bound.input)
        second = None if bound.second is None else self.term(bound.second)
        assert self.target is not None
        table = self.context.table
        source, second_shape = (None if term is None else term.shape for term in (value, second))
        dims = Dims(source, self.target.shape, table.d_model, positions=table.positions, second=second_shape)
        instance = self.instances.create(form, bound.args, dims, self.target.name, owner)
        try:
            shape = shape_at(form, bound.args, instance.dims)
        except PlacementError as refusal:
            raise self._refusal(refusal, use, bound.second if refusal.argument == "second" else bound.input) from None
        self.context.check_same_arguments(self.edit, instance, call)
        if instance.owner is not None:
            sizes = form.common_sizes(bound.args, instance.dims)
            self.context.check_common_sizes(instance.owner, sizes, use.span)
        if owner is not None:
            # A form of any shape has parameters for each site, which may use them twice.
            scope = f"{owner} at {self.site.path}" if form.mixes_shapes else owner
            self.context.check_shared_shapes(owner, scope, form, dims, use.span)
        return FormCall(instance, value, second, shape=shape, source=use)

    def _refusal(self, refusal: PlacementError, call: ast.Call, value: ast.Expr | None) -> PeftcError:
        """The refusal of a form, at the argument that it blames, with shapes and states."""
        keyword = next((k for k in call.kwargs if k.name == refusal.argument), None)
        reads = refusal.argument in ("input", "second")
        span = keyword.span if keyword else value.span if reads and value else call.span
        assert self.target is not None
        notes = [*refusal.notes, f"`{self.target.name}` of `{self.site.path}` is {self.target.shape}"]
        if isinstance(value, ast.Name) and value.id in self.site.states and value.id != self.target.name:
            notes.append(f"`{value.id}` of `{self.site.path}` is {self.site.states[value.id].shape}")
        code, message, related = refusal.code, refusal.message, refusal.related
        return error(code, message, span, notes=tuple(notes), help=refusal.help, related=related)


def constant(value: float, source: ast.Expr) -> Constant:
    return Constant(value, shape=Scalar(), source=source)


def quote(source: ast.Expr) -> str:
    text = print_expression(source)
    return text if len(text) <= MAX_QUOTE else f"{text[: MAX_QUOTE - 1]}…"


def error(
    code: str,
    message: str,
    span: Span,
    *,
    label: str = "",
    notes: tuple[str, ...] = (),
    help: str | None = None,
    related: tuple[Related, ...] = (),
) -> PeftcError:
    return PeftcError(Diagnostic(code, message, span, label=label, notes=notes, help=help, related=related))


def _as_weight(name: str, site: Site) -> str | None:
    """How to write an edit of `h` at one of stacked experts, whose `x` and `h` are in no graph."""
    weight = site.states.get("w")
    if name not in ("x", "h") or weight is None or weight.weight is None or weight.weight.stacked_slice is None:
        return None
    return "the experts are one parameter: write `w += lowrank(r=8, alpha=16)`, which is `h += lora(x, r=8, alpha=16)`"
