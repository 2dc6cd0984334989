"""What to write in the place of a name or a function that a form does not have."""

from collections.abc import Sequence

from peftc.diagnostics import Suggestion
from peftc.diagnostics.suggestions import did_you_mean, instead_of, join_names, nearest
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.words import NUMBERS, OUT, SIZES

_SIMILAR = 0.7  # a function: `conv1d` is no `counted`
_TRANSPOSES = ("T", "mT", "H", "mH")


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


def function_help(function: str, known: Sequence[str]) -> str:
    """A function with a similar name, or where all functions are."""
    similar = nearest(function, known, _SIMILAR)
    if similar is not None:
        return instead_of(function, similar)
    return "docs/language.md has tables of the functions and of the sizes, below Forms of your own"
