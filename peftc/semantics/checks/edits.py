"""Checks of edits without a model: defined names, calls that fit forms, names of sites."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equations.primitives import ACTIVATIONS, FUNCTIONS
from peftc.filesystem.resources import recipes
from peftc.forms.form import Form
from peftc.forms.registry import entry_point
from peftc.semantics.arguments import bind, shared_call
from peftc.semantics.checks.definitions import unused
from peftc.semantics.checks.equations import equation_errors, presence_errors, replacement_warnings
from peftc.semantics.layer_values import variants
from peftc.semantics.substitute import constant, is_constant
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import (
    BELOW,
    CONCAT,
    FROZEN_MODULES,
    LAYER,
    LINEAR,
    PARTS,
    SHARED,
    SITES,
    STACK_CHOICE_HELP,
    STATES,
    STATES_AT,
    TOWERS,
    WEIGHT,
)
from peftc.syntax.walk import above_modules, arms, children, differs_by_layer, selects_stack, walk

_WRITTEN = [name for name in STATES if name not in ("x", "res", "c")]
_LINEAR_HELP = f"every Linear below is `**.{LINEAR}`, as in `layer[*].**.{LINEAR}`"
Shared = Mapping[str, ast.Let]
Forms = Mapping[str, Form]
_OWNERS = {  # state -> a site that has it, and an example
    **dict.fromkeys("wb", ("a Linear", "layer[*].attn.q")),
    **dict.fromkeys(("kv", "c"), ("an attention", "layer[*].attn")),
    "z": ("an ffn", "layer[*].ffn"),
}


def check_edit(edit: ast.Edit, shared: Shared, forms: Forms) -> Iterator[Diagnostic]:
    """All errors in the body of an edit, and P320 warnings."""
    yield from _EquationChecker(edit.selector, shared, forms).errors(edit.body)
    yield from replacement_warnings(edit, forms)


class _EquationChecker:
    """Checks the lines of an edit in order, since a `let` is in scope after its line."""

    def __init__(self, selector: ast.Selector, shared: Shared, forms: Forms) -> None:
        self._forms = forms
        self._selector = selector
        self._shared = shared
        self._local: dict[str, ast.Let] = {}
        self._used: set[str] = set()
        self._states: set[str] = set()  # checked ones, each of which is reported once

    def errors(self, body: Iterable[ast.Equation | ast.Let]) -> Iterator[Diagnostic]:
        for line in body:
            wrong = list(equation_errors(line, self._forms)) if isinstance(line, ast.Equation) else []
            whole = {error.span.start for error in wrong if error.code == "P303" and error.span}  # says what is missing
            for error in self._value(line.value):
                if error.code != "P103" or error.span is None or error.span.start not in whole:
                    yield error
            if isinstance(line, ast.Let):
                self._local[line.name] = line
            elif line.target in self._local:
                message = f"`{line.target}` is bound by `let`; an equation assigns a state"
                help_ = f"bind another name: `let {line.target}_1 = …`"
                yield Diagnostic("P107", message, line.target_span, help=help_)
            else:
                yield from self._state(line.target, line.target_span, is_target=True)
                yield from wrong
        yield from (unused(let) for name, let in self._local.items() if name not in self._used)

    def _state(self, name: str, span: Span, is_target: bool) -> Iterator[Diagnostic]:
        if name not in STATES:
            help_ = did_you_mean(name, _WRITTEN if is_target else (*STATES, *self._local))
            if help_ is None and (is_target or not self._local):
                help_ = "`h` is the output of a site, `x` its input, `w` and `b` its weight and bias; "
                help_ += f"others are {join_names(name for name in STATES if name not in 'hxwb')}"
            if name in self._forms or name in self._shared or name in (*FROZEN_MODULES, CONCAT):
                help_ = f"`{name}` is a function: call it, `{name}(…)`"
            yield Diagnostic("P107", f"there is no {'state' if is_target else 'name'} `{name}`", span, help=help_)
        elif name not in self._states:
            self._states.add(name)
            sites = list(dict.fromkeys(sites_without(self._selector, name)))
            if sites:
                verb = "have" if len(sites) > 1 else "has"
                owner, example = _OWNERS.get(name, ("other sites", "layer[*].attn"))
                message = f"{join_names(sites)} {verb} no state `{name}`, {STATES[name]}"
                yield Diagnostic("P205", message, span, help=f"it is a state of {owner}, e.g. of `{example}`")

    def _value(self, value: ast.Expr) -> Iterator[Diagnostic]:
        match value:
            case ast.Name(name) if name in self._local:
                self._used.add(name)
            case ast.Name(name) if name == LAYER:
                pass
            case ast.List(items):
                yield from (error for item in items or (value,) for error in self._item(item))
            case ast.Name(name):
                yield from self._state(name, value.span, is_target=False)
            case ast.Call():
                yield from self._call(value)
            case ast.Binary("@"):
                help_ = "write `form NAME(…) { … }` and call it, or use `lora(x, r=8)`"
                yield Diagnostic("P105", "`@` belongs to the equation of a form", value.span, help=help_)
            case ast.Negative() | ast.Binary():
                yield from (error for operand in children(value) for error in self._value(operand))
            case ast.Item(owner, indices):
                yield from self._value(owner)
                yield from _index_errors(value, indices)
            case ast.Boolean() | ast.String() | ast.Pair() | ast.Attribute() | ast.Binding():
                message = f"expected a hidden state or a number, found `{print_expression(value)}`"
                yield Diagnostic("P105", message, value.span)
            case ast.Number():
                pass

    def _item(self, item: ast.Expr) -> Iterator[Diagnostic]:
        """P105 for a value of a list that is none."""
        if isinstance(item, ast.List) or not is_constant(item):
            message = f"expected a value for each layer, found `{print_expression(item)}`"
            yield Diagnostic("P105", message, item.span, help="e.g. `r=[4, 4, 8]` for three layers")

    def _call(self, call: ast.Call) -> Iterator[Diagnostic]:
        is_weight = call.function == WEIGHT and call.function not in (*self._forms, *self._shared)
        is_known = call.function in (*FROZEN_MODULES, CONCAT) or call.function in self._shared
        is_of_forms = call.function in FUNCTIONS and not is_known and call.function not in self._forms
        for arg in call.args if call.function != SHARED and not is_of_forms and not is_weight else ():
            yield from self._value(arg)
        lists = (part for k in call.kwargs for part in walk(k.value) if isinstance(part, ast.List))
        if wrong := [error for part in lists for error in self._value(part)]:
            yield from dict.fromkeys(wrong)
            return
        if call.function in self._shared:
            yield from self._shared_call(call)
        elif call.function in self._forms:
            yield from bind_errors(call, self._forms)
            yield from presence_errors(call, self._forms[call.function])
        elif is_weight:
            wrong = [arg for arg in call.args if not isinstance(arg, ast.Name)]
            if wrong or call.kwargs or not call.args:
                what = "`weight` takes names of Linears of the sub-layer"
                yield Diagnostic("P108", what, call.span, help="e.g. `weight(k, v)` at `layer[*].attn`")
        elif call.function in (*FROZEN_MODULES, CONCAT):
            for keyword in call.kwargs:
                yield Diagnostic("P102", f"`{call.function}` has no argument `{keyword.name}`", keyword.span)
            is_concat, count = call.function == CONCAT, len(call.args)
            if count < 2 if is_concat else count != 1:
                inputs = "two or more parts" if is_concat else "one input"
                yield Diagnostic("P108", f"`{call.function}` takes {inputs}, found {count or 'none'}", call.span)
        elif call.function == SHARED:
            help_ = "bind it outside: `let NAME = shared(…)`; parameters inside an edit belong to one site"
            yield Diagnostic("P115", "`shared` stands in a `let` outside of edits", call.function_span, help=help_)
        else:
            yield unknown_form(call, self._shared, self._forms)

    def _shared_call(self, call: ast.Call) -> Iterator[Diagnostic]:
        bound = self._shared[call.function].value
        inner = bound.args[0] if isinstance(bound, ast.Call) and bound.args else None
        form = self._forms.get(inner.function) if isinstance(inner, ast.Call) else None
        own = frozenset[str]() if form is None else form.value_arguments
        for keyword in call.kwargs:
            if keyword.name not in own:
                message = f"the arguments of `{call.function}` stand where it is bound"
                others = f"; `{call.function}` takes {join_names(sorted(own))} here" if own else ""
                yield Diagnostic("P102", message, keyword.span, help=f"remove it here{others}")
        if form is not None and len(call.args) != form.takes_input:
            inputs = "one input" if form.takes_input else "no input"
            yield Diagnostic("P108", f"`{call.function}` takes {inputs}, found {len(call.args)}", call.span)
        elif isinstance(inner, ast.Call) and form is not None:
            spans = [keyword.span for keyword in call.kwargs if keyword.name in own]
            for error in bind_errors(shared_call(inner, call), self._forms):
                if error.span and any(span.start <= error.span.start < span.end for span in spans):
                    yield error


def _index_errors(item: ast.Item, indices: Sequence[ast.Expr]) -> Iterator[Diagnostic]:
    """P105 for an index that is not a number: `g[i]`."""
    number = constant(indices[0]) if len(indices) == 1 else None
    if (isinstance(number, int) and number >= 0) or (len(indices) == 1 and differs_by_layer(indices[0])):
        return
    help_ = "`g[0]` is the first feature of `let g = …`; a form has sums over them: `sum(i in n, g[i] * …)`"
    message = f"expected the number of a feature, from 0, in `{print_expression(item)}`"
    yield Diagnostic("P105", message, indices[0].span.until(indices[-1].span), help=help_)


def bind_errors(call: ast.Call, forms: Forms, shared: bool = False) -> Iterator[Diagnostic]:
    """The errors of `bind` for a call of a form."""
    errors: dict[Diagnostic, None] = {}
    for one in variants(call):
        try:
            bind(one, forms[call.function], shared=shared)
        except PeftcError as error:
            errors |= dict.fromkeys(error.diagnostics)
    by_number = [k.value.span for k in call.kwargs if ast.Name(LAYER) in walk(k.value)]  # each layer has its own
    yield from (error for error in errors if error.code != "P106" or error.span not in by_number)


def unknown_form(call: ast.Call, shared: Shared, forms: Forms) -> Diagnostic:
    """P101, with the most similar form."""
    suggestion = did_you_mean(call.function, (*forms, CONCAT, WEIGHT, *FROZEN_MODULES, *shared))
    if (entry := entry_point(call.function)) is not None:
        suggestion = (
            f"{entry} is one: register it with `--forms {call.function}`, or `peftc.forms.register_entry_point`"
        )
    if call.function in recipes():
        suggestion = f"`{call.function}` is a recipe: `use {call.function} from std`, then `apply {call.function}()`"
    elif call.function in ACTIVATIONS:
        suggestion = f"an activation is an argument of a form: `adapter(x, r=8, act={call.function})`"
    elif call.function in FUNCTIONS:
        suggestion = f"`{call.function}` stands in equations of forms: `form NAME(x, …) {{ … f = {call.function}(…) }}`"
    help_ = suggestion or f"the forms are {join_names(sorted(forms))}"
    return Diagnostic("P101", f"there is no form `{call.function}`", call.function_span, help=help_)


# Selectors: the names of sites, and the states of sites


def check_selector(selector: ast.Selector) -> Iterator[Diagnostic]:
    """P208 for an unknown site name, or one that cannot follow the name before it."""
    for arm in arms(selector):
        if isinstance(arm, ast.Path):
            yield from _path(arm)


def _path(path: ast.Path) -> Iterator[Diagnostic]:
    above = ""
    for number, step in enumerate(path.steps):
        if step.name == "**":
            if above_modules(path.steps) != path.steps[:number]:
                help_ = f"`{LINEAR}` alone may follow: `**.{LINEAR}` is every Linear below"
                yield Diagnostic("P208", "`**` must end a path: it is every module below", step.span, help=help_)
            return
        if selects_stack(path.steps, number):
            continue
        if is_tower(path, number):
            above = TOWERS[0]
            continue
        below = BELOW.get(above, ())
        span = step.span.first(len(step.name))
        if step.name not in SITES:
            help_ = _LINEAR_HELP if step.name == LINEAR else STACK_CHOICE_HELP.get(step.name)
            help_ = (
                help_
                or _module_help(path.steps, number)
                or did_you_mean(step.name, below)
                or did_you_mean(step.name, SITES)
            )
            # In one of these parts, any other name may be that of a Linear without a role.
            if help_ or above not in PARTS:
                yield Diagnostic("P208", f"there is no site named `{step.name}`", span, help=help_ or _choices(above))
            return
        if step.name not in below:
            help_ = did_you_mean(step.name, below) or _choices(above)
            yield Diagnostic("P208", f"`{above}` has no `{step.name}`", span, help=help_)
            return
        above = step.name


def is_tower(path: ast.Path, number: int) -> bool:
    """Whether a step names a tower of only some models, such as `qformer` in `qformer.layer[*]`.

    Such a name resembles no other name, or has several words joined by `_`, and a stack follows.
    """
    name, below = path.steps[number].name, [step.name for step in path.steps[number + 1 : number + 2]]
    is_outer = number == 0 or path.steps[number - 1].name in TOWERS
    is_new = name not in SITES and ("_" in name or not did_you_mean(name, SITES))
    return is_outer and is_new and below in (["layer"], ["encoder"], ["decoder"])


def _module_help(steps: Sequence[ast.Step], number: int) -> str | None:
    """For `model.layers[0].mlp` and `layers[*].q_proj`: names of modules without quotes.

    `number`: of the first step that is no site. The last one is none either.
    """
    last = steps[-1].name
    if last in SITES or last == LINEAR or number == len(steps) - 1:
        return None
    numbers = [_module_number(step) for step in steps]
    is_whole = None not in numbers and any(numbers)  # `self_attn.q_proj` is the end of a name
    text = ".".join(f"{step.name}{n}" for step, n in zip(steps, numbers, strict=True)) if is_whole else f"**.{last}"
    return f'the name of a module stands in quotes: "{text}"'


def _module_number(step: ast.Step) -> str | None:
    """`.0` of `layers[0]`, nothing of a step without indices; None of several layers."""
    match step.indices:
        case None:
            return ""
        case (ast.Index(int(start), stop),) if start == stop:
            return f".{start}"
        case _:
            return None


def _choices(above: str) -> str:
    if not above:
        return 'a module is also named by a pattern: "model.layers.*.mlp"'
    names = BELOW.get(above, ())
    return f"below `{above}` there are {join_names(names)}" if names else f"nothing is below `{above}`"


def sites_without(selector: ast.Selector, state: str) -> Iterator[str]:
    """The site names in `selector` that never have `state`."""
    match selector:
        case ast.Union(parts):
            yield from (name for part in parts for name in sites_without(part, state))
        case ast.Difference(left, _):
            yield from sites_without(left, state)
        case ast.Path(steps) if state not in STATES_AT.get(steps[-1].name, (state,)):
            yield steps[-1].name
        case _:
            pass
