"""What to write in the place of a name or a function that a form does not have."""

from collections.abc import Callable, Container, Mapping, Sequence

from peftc.diagnostics import Diagnostic, Suggestion
from peftc.diagnostics.suggestions import did_you_mean, instead_of, join_names, nearest
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.table import FORMS
from peftc.equations.words import NUMBERS, OUT, SIZES
from peftc.syntax import ast
from peftc.syntax.walk import names_in

_SIMILAR = 0.7  # a function: `conv1d` is no `counted`
_TRANSPOSES = ("T", "mT", "H", "mH")
_INSTEAD = {  # of functions and methods of PyTorch
    "the product is `A @ x`": "matmul mm bmm mv dot einsum",
    "write `concat(u, v, …)`": "cat hstack vstack stack",
    "write `t(A)`": "transpose permute swapaxes",
    "write `reshape(A, rows, columns)`": "view flatten unflatten",
    "a vector as a matrix of one column is `column(v)`": "unsqueeze outer",
    "write `narrow(A, start, count)`": "chunk split slice",
    "there is no power: write a product, `x * x`": "pow square",
    "`fixed A[r, d(x)] = normal` is drawn once, `normal_noise` in each forward": "randn rand randn_like",
    "a diagonal matrix times x is `v * x`, times a matrix `column(v) * A`": "diag",
    "write `frozen(x)`": "detach",
    "write `inverse(A)`": "inv",
}
_OF_TORCH = {word: text for text, words in _INSTEAD.items() for word in words.split()}
_DIMENSIONS = ("dim", "axis", "keepdim", "dims")


def name_help(name: str, inputs: Sequence[str], known: Sequence[str]) -> str:
    """For `A.T`, `d_model`, `relu` and misspelled names."""
    owner, _, attribute = name.partition(".")
    if attribute in _TRANSPOSES:
        return Suggestion(f"the transpose is `t({owner})`", name, f"t({owner})", "unsafe")
    if attribute:
        sizes = " or ".join(f"`d({state})`" for state in (*inputs[:1], OUT))
        return f"a name has no attributes in an equation; a size is {sizes}"
    if name in SIZES:
        calls = " or ".join(f"`{name}({state})`" for state in (OUT, *inputs[:1]))
        return f"it is a size of a state: write {calls}"
    if name in FUNCTIONS or name in NUMBERS:
        return f"it is a function: write `{name}(…)`"
    return did_you_mean(name, known) or f"known here: {join_names(known)}"


def function_help(function: str, known: Sequence[str], names: Container[str], forms: Container[str]) -> str:
    """What to write for a form, for `x.mean()` and for functions of PyTorch, a function with a
    similar name, or where all functions are.

    Args:
        names: those that are known in the form.
        forms: the names of those of its file.
    """
    if function in FORMS or function in forms:
        return "a form is called in an edit; write its equation here"
    owner, _, method = function.rpartition(".")
    if owner in names and method in known:
        return f"a function has its value in parentheses: `{method}({owner})`"
    if (other := _OF_TORCH.get(method)) is not None:
        return other
    similar = nearest(function, known, _SIMILAR)
    if similar is not None:
        return instead_of(function, similar)
    return "docs/language.md has tables of the functions and of the sizes, below Forms of your own"


def unknown_argument(function: str) -> Callable[[ast.Keyword], Diagnostic]:
    """P102 of an argument of a function, which has none by name."""

    def diagnostic(argument: ast.Keyword) -> Diagnostic:
        is_dimension = argument.name in _DIMENSIONS
        help_ = "a function is of each entry, or over the features of each token" if is_dimension else None
        return Diagnostic("P102", f"`{function}` has no argument `{argument.name}`", argument.span, help=help_)

    return diagnostic


def names_behind(name: str, lets: Mapping[str, ast.Expr]) -> set[str]:
    """The names in what `let` names so, and in what it names with these."""
    behind, new = set[str](), {name} & lets.keys()
    while new:
        parts = {part for one in new for part in names_in(lets[one])}
        new = (parts - behind) & lets.keys()
        behind |= parts
    return behind
