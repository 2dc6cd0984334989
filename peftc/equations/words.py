"""The words of equations beside the primitives: functions of numbers and sizes, first values,
arguments such as `none`, an activation, or what lines compare them with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, cast

from peftc.equations.primitives import ACTIVATIONS
from peftc.equations.transforms.filters import WAVELETS
from peftc.equations.values import TOP
from peftc.forms.arguments import SEED
from peftc.forms.form import Argument
from peftc.syntax import ast
from peftc.syntax.numbers import numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import STATES, state_name
from peftc.syntax.walk import children, names_in, values, walk

NONE = "none"  # an argument without a value
BUFFER = "buffer"  # a first value of what a command fills
PERMUTATION = "permutation"  # a first value that is an order of entries
CHOICE = "choice"  # `fixed places[k] = choice(n)`: k of the numbers 0, 1, … n - 1, which an adapter keeps
TAIL = "tail"  # `fixed places[k] = tail(n)`: the last k of them
BUDGET = "budget"  # `budget(v, target, total, …)`: v, of which training gives up entries
OUT = "out"  # the name of the state that the equation writes, in sizes
POSITIONS = "positions"  # `positions(x, first, last, token)`
ATTENTION = "causal_attention"  # `causal_attention(q, k, v, heads)`
OVER_SITES = "over_sites"  # `over_sites(n)`: the sum of n over the sites that have parameters in common
SELECTION, SCATTER = "selection", "scatter"  # `fixed places[k] = selection(select)`, and values at these places
ROWS_AT = "rows_at"  # `rows_at(w, places)`: what these places have
MEANS = {"tokens": "token_mean", "batch": "batch_mean"}  # primitives of `mean(x, tokens)`, and of `mean(x, batch)`
# By what rows or entries are selected: of weights that a form changes, or of its own parameters.
CRITERIA, OWN_CRITERIA = ("fisher", "change", "magnitude", "random"), ("snip", "magnitude", "random")
BELOW, HISTORY = "below", "history"  # a value at the site below, and the values up to this site
CROSS_LAYER = (BELOW, HISTORY, TOP)
SITE, LAYER = "site", "layer"
PRUNED = "pruned"  # `pruned(v, z, n)`: v z, of which `peftc.calibrate` keeps the n largest of all sites
KEPT = "kept"  # which entries are kept, of a site
PRUNED_PARTS = ("values", "places")  # `pruned(v, z, n).values`: what is kept of all sites, in order
GATHER = "gather"  # `gather(v, places)`
WAVELET = "wavelet"  # `wavelet(A, db2)`
COUNTED = "counted"  # `counted(rows)`: keys that positions of the text count
RANDOM = "random"  # `let i = random(n)`: one of 0, 1, … n - 1, in each forward while training
Ends = Literal["", "low", "high", "both"]
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OF_WHOLE_NUMBERS = (
    "power",
    "pad",
    "top_k",
    "softmax",
    "corner",
    "svd",
    POSITIONS,
    "reshape",
    "narrow",
    "shuffle",
    SCATTER,
)


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


# Functions of numbers, and of the shapes of inputs and of `out`, the state that is written.
NUMBERS: Mapping[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "abs": abs,
    "floor": math.floor,
    "round": round,
    "power": lambda a, n: _whole(math.pow(a, n)),
    "log": math.log,
    OVER_SITES: lambda n: n,  # where the others are not known
    "power_of_two": lambda n: 1 << (n - 1).bit_length(),
    "root_divisor": lambda n: max(m for m in range(1, math.isqrt(n) + 1) if n % m == 0),
}
SIZES: Mapping[str, str] = {
    "d": "the features of hidden states, or of a vector",
    "rows": "the outputs of a weight",
    "cols": "the inputs of a weight",
    "heads": "the heads of an attention's states",
    "d_head": "the features of a head; of keys and values, those of a key",
    "d_value": "the features of a head of values",
    "widest": "the most features that any site of the edit has there",
    "d_model": "the features of the residual stream",
    "sites": "the sites that have parameters in common",
    SITE: "the number of this site among them, from 0",
    "layers": "the layers of these sites, and the modules outside of layers",
    LAYER: "the number of this site's layer among them, from 0",
    "stack": "the number of this site's stack of layers among those of these sites, from 0",
    "parts": "the places in a layer that these sites are at",
    "part": "the number of this site's place in a layer among them, from 0",
    "stack_parts": "the places in a layer that the sites of this site's stack are at",
    "stack_part": "the number of this site's place in a layer among them, from 0",
    TOP: "whether this is the last of the sites that have parameters in common",
    "entries": "the entries of a weight, or of a vector",
}
NEEDS: Mapping[str, str] = {  # what has a size
    **dict.fromkeys(("d", "widest"), "hidden states or a vector"),
    **dict.fromkeys(("rows", "cols"), "a weight matrix"),
    **dict.fromkeys(("heads", "d_head", "d_value"), "states of an attention, in heads"),
    "entries": "a weight or a vector",
}


def mean_over(call: ast.Call) -> str:
    """`tokens` or `batch`, which a mean is over; empty for other calls."""
    match call:
        case ast.Call("mean", (_, ast.Name(word))) if word in MEANS:
            return word
        case _:
            return ""


def owner_of(name: str) -> str:
    """An input of a form, or what its equation writes, in a message."""
    return "what the equation writes" if name == OUT else f"its input `{name}`"


def input_help(name: str) -> str | None:  # for a number in the place of an input
    return f"{state_name(name)}, so it is an input: write a state, or rename it in the form" if name in STATES else None


def without_size(function: str, name: str, kind: str) -> str:
    """The message for a size that a state of another kind does not have."""
    return f"`{function}({name})` needs {NEEDS[function]}, and {owner_of(name)} is {kind}"


INITIAL_VALUES: Mapping[str, str] = {
    "zeros": "0",
    "ones": "1",
    "kaiming": "uniform in ±1/√(last size), as nn.Linear",
    "normal": "normal, normal(std) with a standard deviation other than 1",
    "truncated": "normal, cut at two deviations: truncated(std)",
    "uniform": "uniform in ±bound: uniform(bound)",
    "orthogonal": "orthonormal rows, or columns if there are more rows",
    "identity": "ones on the diagonal, identity(x) with x beside it",
    "signs": "1 or -1, each as likely",
    BUFFER: "0, of a `fixed` tensor that a command fills and an adapter keeps, as `peftc.fuse` does",
    SELECTION: "of a `fixed` vector the numbers of what `peftc.calibrate` selects: selection(select)",
    PERMUTATION: "0, 1, … n - 1 in any order, of a `fixed` vector",
    CHOICE: "of a `fixed` vector, numbers below n in any order, each as often as another, or once more: choice(n)",
    TAIL: "of a `fixed` vector, the last numbers below n, in their order: tail(n)",
}


def function_of(param: ast.FormParam) -> str | None:
    """The function of which an argument is a call, `mlp` of `reparam = mlp(none)`.

    In the equation, the argument is the number in the call.
    """
    match param.default:
        case ast.Call(function, (ast.Name("none"),), ()):
            return function
        case _:
            return None


@lru_cache(maxsize=1_000)
def words_of(form: ast.Form) -> Mapping[str, tuple[str, ...]]:
    """The words that an argument can be, by the argument; the default is among them.

    `init = bert` has the words `bert` and `lora` if a line has the condition `if init == lora`.
    """
    defaults = {param.name: param.default for param in form.params}
    words: dict[str, dict[str, None]] = {}
    calls = [part for value in values(form) for part in walk(value) if isinstance(part, ast.Call)]
    functions = {call.function for call in calls}
    for name, default in defaults.items():
        if isinstance(default, ast.Name) and default.id in ACTIVATIONS and name in functions:
            words[name] = dict.fromkeys(ACTIVATIONS)
        elif default == ast.Name(NONE):
            words[name] = {NONE: None}
    has_inputs = any(name in STATES and default is None for name, default in defaults.items())
    for line in form.body:
        if isinstance(line, ast.Parameter) and (name := criterion_of(line)) in defaults:
            words[name] = dict.fromkeys(OWN_CRITERIA if has_inputs else CRITERIA)
    for call in calls:
        if call.function == WAVELET and isinstance(name := call.args[-1], ast.Name) and name.id in defaults:
            words[name.id] = dict.fromkeys(WAVELETS)
    for left, right in _equalities(form):
        if left.id in defaults and right.id not in defaults:
            default = defaults[left.id]
            first = [default.id] if isinstance(default, ast.Name) and default.id not in defaults else []
            words.setdefault(left.id, {}).update(dict.fromkeys((*first, right.id)))
    return {name: tuple(own) for name, own in words.items()}


def criterion_of(line: ast.Parameter) -> str:
    """The argument by which a line selects; empty if it does not."""
    match line.value:
        case ast.Call(function, (ast.Name(name),), ()) if function == SELECTION:
            return name
        case _:
            return ""


def is_drawn(value: ast.Expr) -> bool:
    """Whether a first value is a call such as `normal(0.02)`."""
    return isinstance(value, ast.Call) and value.function in INITIAL_VALUES


def is_choice_of_numbers(line: ast.Parameter) -> bool:
    """Whether a line is `fixed places[k] = choice(n)`, or `tail(n)`."""
    return isinstance(line.value, ast.Call) and line.value.function in (CHOICE, TAIL)


def is_whole(line: ast.Parameter) -> bool:
    """Whether the values of a line are whole numbers."""
    return line.value == ast.Name(PERMUTATION) or bool(criterion_of(line)) or is_choice_of_numbers(line)


def number_of(line: ast.Parameter) -> str:
    """The number of which sites with the same one have a parameter in common: `per NAME`."""
    return "" if line.scope in (None, "", "site", "group", "edit") else line.scope


def scope_of(line: ast.Parameter) -> str:
    """Who has a parameter: each "site", those of an attention "group", or of the "edit"."""
    return "edit" if number_of(line) else line.scope or "site"


def is_of_task(line: ast.Parameter) -> bool:
    """Whether a parameter that sites have in common is another one for each task."""
    return bool(line.scope) and not line.fixed and not line.common


def is_random(value: ast.Expr | None) -> bool:
    """Whether a value is `random(n)`."""
    return isinstance(value, ast.Call) and value.function == RANDOM


def is_choice(form: ast.Form, name: str) -> bool:
    """Whether an argument is one of several words, not a number that may be missing."""
    return words_of(form).get(name, (NONE,)) != (NONE,)


def _equalities(form: ast.Form) -> Iterator[tuple[ast.Name, ast.Name]]:
    """The names that lines compare by `==` and `!=`, both ways round."""
    for line in form.body:
        comparisons = [line.condition] if line.condition is not None else []
        for one in (*comparisons, *([line] if isinstance(line, ast.Require) else [])):
            if one.op in ("==", "!=") and isinstance(one.left, ast.Name) and isinstance(one.right, ast.Name):
                yield one.left, one.right
                yield one.right, one.left


# Arguments


def inputs_of(form: ast.Form) -> tuple[str, ...]:
    """The parameters of a form that are inputs: those that have the name of a state."""
    inputs = (param for param in form.params if param.name in STATES)
    return tuple(param.name for param in inputs if param.default in (None, ast.Name(NONE)))


def optional_inputs_of(form: ast.Form) -> tuple[str, ...]:
    """The inputs that a call may leave out: those with the default `none`."""
    inputs = inputs_of(form)
    return tuple(param.name for param in form.params if param.name in inputs and param.default is not None)


def arguments_of(form: ast.Form) -> Iterator[Argument]:
    """The arguments of a call. Those that sizes are computed from are whole numbers."""
    whole, ids, words, inputs = _names_in_sizes(form), _names_of_ids(form), words_of(form), inputs_of(form)
    for param in form.params:
        if param.name in inputs:
            continue
        name, is_whole = param.name, param.name in whole
        doc = (param.trailing or f"an argument of `{form.name}`").lstrip("# ")
        low, high, open_ends = _range(form, name, int(name not in ids) if is_whole else None)
        kind = "int" if is_whole else "float"
        match param.default:
            case None:
                yield Argument(name, kind, doc, None, True, low, high, open_ends)
            case ast.Call() if (function := function_of(param)) is not None:
                yield Argument(name, "call", doc, choices=(function,))
            case ast.Boolean(value):
                yield Argument(name, "bool", doc, value)
            case ast.Name(word) if word in words.get(name, ()) and is_choice(form, name):
                yield Argument(name, "choice", doc, word, choices=words[name])
            case ast.Number() as number:
                value = numeric_value(number)
                yield Argument(name, kind, doc, value if is_whole else float(value), False, low, high, open_ends)
            case ast.Negative(ast.Number() as number) if not is_whole:
                yield Argument(name, kind, doc, -float(numeric_value(number)), False, low, high, open_ends)
            case value:
                doc = doc if param.trailing or value == ast.Name(NONE) else f"{doc}; {print_expression(value)}"
                yield Argument(name, kind, doc, None, False, low, high, open_ends)
    if any(line.fixed and line.value != ast.Name(BUFFER) for line in _parameters(form)):
        yield SEED


def _parameters(form: ast.Form) -> list[ast.Parameter]:
    return [line for line in form.body if isinstance(line, ast.Parameter)]


def _range(form: ast.Form, name: str, low: float | None) -> tuple[float | None, float | None, Ends]:
    """The least and the most that lines require of an argument, and which end is excluded."""
    high: float | None = None
    ends: set[str] = set()
    for line in form.body:
        if not isinstance(line, ast.Require) or line.condition is not None or line.op not in _SWAPPED:
            continue
        left, op, right = line.left, line.op, line.right
        if isinstance(left, ast.Number):
            left, op, right = right, _SWAPPED[op], left
        if left != ast.Name(name) or not isinstance(right, ast.Number):
            continue
        value = float(numeric_value(right))
        if op[0] == ">":
            low = value
        else:
            high = value
        (ends.add if len(op) == 1 else ends.discard)("low" if op[0] == ">" else "high")
    return low, high, "both" if len(ends) == 2 else cast(Ends, "".join(ends))


def _names_of_ids(form: ast.Form) -> set[str]:
    """The names of ids of tokens, which begin with 0; sizes and counts begin with 1."""
    calls = [part for value in values(form) for part in walk(value) if isinstance(part, ast.Call)]
    ids = [arg for call in calls if call.function == POSITIONS for arg in call.args[3:]]
    return {name for arg in ids for name in names_in(arg)}


def _names_in_sizes(form: ast.Form) -> set[str]:
    """The names that sizes, numbers of terms and indices depend on."""
    lets = [line for line in form.body if isinstance(line, ast.Let)]
    sizes = [size for line in _parameters(form) for size in line.sizes]
    sizes += [ast.Name(number) for line in _parameters(form) if (number := number_of(line))]
    sizes += [number for value in values(form) for part in walk(value) for number in whole_numbers(part)]
    names = {name for size in sizes for name in names_of_whole(size)}
    while more := {inner for let in lets if let.name in names for inner in names_of_whole(let.value)} - names:
        names |= more
    return names


def whole_numbers(node: ast.Expr) -> tuple[ast.Expr, ...]:
    """The parts of an expression that are whole numbers, whatever they are."""
    match node:
        case ast.Binding(_, count) | ast.Call("random" | "choice" | "tail", (count,)):
            return (count,)
        case ast.Item(_, indices):
            return indices
        case ast.Call(function, (_, *numbers)) if function == BUDGET:
            return tuple(numbers[:5])
        case ast.Call(function, (_, _, _, heads)) if function == ATTENTION:
            return (heads,)
        case ast.Call(function, (_, *numbers)) if function in _OF_WHOLE_NUMBERS:
            return tuple(numbers)
        case _:
            return ()


def is_attention(value: ast.Expr) -> bool:
    """Whether a part of a value reads other tokens, which have a place in a cache."""
    return any(isinstance(part, ast.Call) and part.function == ATTENTION for part in walk(value))


def names_of_whole(node: ast.Expr) -> set[str]:
    """The names in a whole number that are whole numbers.

    What is rounded need not be one; `floor(a / b)` is the division of two.
    """
    match node:
        case ast.Call("floor", (ast.Binary("/", _, _),)):
            is_rounded = False
        case _:
            is_rounded = isinstance(node, ast.Call) and node.function in ("round", "floor")
    inner = [] if is_rounded else map(names_of_whole, children(node))
    return {node.id} if isinstance(node, ast.Name) else set[str]().union(*inner)


def frozen_parameters(form: ast.Form) -> list[str]:
    """The parameters that equations have in `frozen(…)` alone: no gradient reaches them."""
    reached, moving = (_names_in_equations(form, through) for through in (True, False))
    own = {line.name: line for line in _parameters(form)}
    return [name for name, line in own.items() if not line.fixed and name in reached - moving]


def _names_in_equations(form: ast.Form, through_frozen: bool) -> set[str]:
    """The names that the value and the terms of the loss depend on."""
    lets = [line for line in form.body if isinstance(line, ast.Let)]
    names, todo = set[str](), [line.value for line in form.body if isinstance(line, ast.Equation)]
    while todo:
        match node := todo.pop():
            case ast.Name(name) if name not in names:
                names.add(name)
                todo += [let.value for let in lets if let.name == name]
            case ast.Call("frozen") if not through_frozen:
                pass
            case _:
                todo += children(node)
    return names
