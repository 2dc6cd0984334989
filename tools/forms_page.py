"""The page of forms and recipes, `docs/forms.md`, made of the rows of the forms and the recipes.

python -m tools.forms_page > docs/forms.md
"""

from __future__ import annotations

from peftc.equations.table import FORMS
from peftc.forms import Argument, Form
from peftc.semantics.arguments import interval, signature
from peftc.semantics.form_facts import SITES, D, default_of, facts_of
from peftc.semantics.recipes import Recipe, recipes

HEAD = """# Forms and recipes

A *form* is a function with trained parameters that equations call. A *recipe* is a published method as a file of
`specs/`. This page is made of both by `make docs`; a test compares. `h`, `x` and the other states are those of the site
at which a form stands. Counts are exact: `peftc plan` prints them for a model.

## Equations

What equations have besides forms:

{examples}
## Forms

Of each form:

- *Shapes*: what it reads and gives (`…` are the batch and the tokens, or queries or keys).
- *At first*: what it is before any training.
- *Folds*: whether an edit with it folds. Edits of `w` and `b` always do. Edits of hidden states do where the form is
  affine in what it reads, with constant coefficients, and the rest of the equation is, too.
- *Costs*: parameters at a width of {d}, and for {sites} sites where these have something in common.

*Trained* parameters have a gradient; *stored* ones are in the saved adapter. The file also has what forms remember
besides, which stored leaves out: the places that were selected for `sparse`, `lines`, `sparse_adapter` and `masked`,
one int64 for each number (for each row or column of `lines`), and which ranks an `svd` has given up.
"""

EXAMPLES = {  # of what equations have besides forms
    "edit e at layer[*].ffn { let g = gate(x)  h = (1 - g) * h + g * adapter(h, r=16) }": (
        "`let` in an edit names a value: it is computed once, and its forms have one set of parameters"
    ),
    "let down = shared(adapter(r=16))\nedit a at layer[*].attn { h += down(h) }\n"
    "edit f at layer[*].ffn { h += down(h) }": (
        "`let … = shared(…)` outside is one set of parameters for all places that call it, which have one shape"
    ),
    "edit e at layer[*].ffn { h += adapter(norm(h + res), r=16) }": (
        "`norm(…)`: the norm of this sub-layer, as it is without edits, of another value; at a final `norm`, that one"
    ),
    "edit e at head { h = head(x + adapter(x, r=16)) }": (
        "`head(…)` at `head`: the head as it is without edits, of another value"
    ),
    "edit m at ** { wb += sparse(density=0.5%) }": (
        "`wb` is each weight and each bias of the modules, as a place of its own. One that several modules are tied to "
        "is one, and changes in all of them. What an edit has in common, such as a `density`, is of all places "
        "together; `let s = shared(sparse(…))` is of several edits"
    ),
    "edit cls at head per task { h = linear(x) }": (
        "A head for each task, in the place of the model's own, as wide as that"
    ),
}

RECIPES = """## Recipes

`use NAME from std`, then `apply NAME(…)`; or `peftc plan specs/NAME.peft --model …`. There are:

- LoRA and its relatives: rsLoRA, DoRA, KronA, LoKr, LoHa, VeRA, GLoRA, AdaLoRA, OFT, SAID, QLoRA;
- adapters: Houlsby, Pfeiffer, parallel, multi-head, Compacter, PHM, AdaMix, SparseAdapter, AdapterFusion, and those
  that a hypernetwork makes; ladder side-tuning, Attention Fusion;
- prefixes (adaptive ones, too) and prompts: prompt tuning, P-tuning, IPT, SPoT; ReFT;
- (IA)³, BitFit, LN tuning, DiffFit, cross-attention tuning;
- sparse fine-tuning: FishMask, LT-SFT, FAR, Diff Pruning;
- combinations in the literature: MAM, UniPELT, S4.
"""


def examples() -> str:
    return "\n".join(
        f"{meaning[0].upper()}{meaning[1:]}:\n\n```peft\n{text}\n```\n" for text, meaning in EXAMPLES.items()
    )


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD.format(examples=examples(), d=D, sites=SITES)]
    parts += [form_section(FORMS[name]) for name in sorted(FORMS)]
    parts.append(RECIPES)
    parts += [recipe_section(recipe) for _, recipe in sorted(recipes().items())]
    return "\n".join(parts)


def form_section(form: Form) -> str:
    """One form: how it is called, its equation, its arguments, its paper."""
    text = form.equation if form.text is None else f"```peft\n{form.text}\n```"
    lines = [f"### `{form.name}`", "", f"`{signature(form)}`", "", text, ""]
    lines += ["| argument | | default |", "|---|---|---|", *map(argument_row, form.arguments), ""]
    lines += [*(f"- {name}: {fact}" for name, fact in facts_of(form).items()), ""]
    return "\n".join([*lines, f"Source: {form.paper}", ""])


def argument_row(argument: Argument) -> str:
    """`| r | width of the bottleneck; at least 1 | |`"""
    cells = [argument.doc]
    if argument.choices:
        cells.append(
            " or ".join(f"`{choice}{'(…)' if argument.type == 'call' else ''}`" for choice in argument.choices)
        )
    elif argument.low is not None or argument.high is not None:
        cells.append(interval(argument))
    return f"| `{argument.name}` | {'; '.join(cells)} | {default_of(argument)} |"


def recipe_section(recipe: Recipe) -> str:
    """One recipe: what its file says of it, and the parameters of its method."""
    parameters = ", ".join(f"{name} = {default}" for name, default in recipe.parameters.items())
    head = f"`method {recipe.method.name}({parameters})`"
    return "\n".join([f"### `{recipe.name}`", "", *recipe.comment, "", head, ""])


if __name__ == "__main__":
    print(page(), end="")
