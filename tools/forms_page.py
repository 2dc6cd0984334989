"""The page of forms and recipes, `docs/forms.md`, made of the rows of the forms and the recipes.

python -m tools.forms_page > docs/forms.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from peftc.diagnostics.suggestions import join_names
from peftc.filesystem import resources
from peftc.forms import FORMS, Args, Count, Dims, Form, Illegal, Param, Value
from peftc.forms.registry import Spot
from peftc.forms.shapes import Heads, KeyValue, Rows, Scalar, Shape, Tokens, Vector, Weight
from peftc.semantics.arguments import interval, signature
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_expression

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

D, HEADS, SITES = 768, 12, 12
GIVEN: dict[str, Value] = {"r": 8, "len": 20, "n": 4, "d": 1000, "density": 0.005, "block": 32}  # what examples take


def examples() -> str:
    return "\n".join(
        f"{meaning[0].upper()}{meaning[1:]}:\n\n```peft\n{text}\n```\n" for text, meaning in EXAMPLES.items()
    )


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD.format(examples=examples(), d=D, sites=SITES)]
    parts += [form_section(FORMS[name]) for name in sorted(FORMS)]
    parts.append(RECIPES)
    parts += [recipe_section(name, path) for name, path in sorted(resources.recipes().items())]
    return "\n".join(parts)


def form_section(form: Form) -> str:
    """One form: how it is called, its equation, its arguments, its paper."""
    lines = [f"### `{form.name}`", "", f"`{signature(form)}`", "", f"{form.equation}", ""]
    lines += ["| argument | | default |", "|---|---|---|", *map(argument_row, form.params), ""]
    facts = {"Shapes": shapes_of(form), "At first": first_of(form), "Folds": folds_of(form), "Costs": costs_of(form)}
    lines += [*(f"- {name}: {fact}" for name, fact in facts.items()), ""]
    return "\n".join([*lines, f"Source: {form.paper}", ""])


def example_args(form: Form) -> Args:
    """The defaults, with what has none: a width, and what is required."""
    width = form.param("reduction") is not None
    return form.fill({p.name: GIVEN[p.name] for p in form.params if p.required or (width and p.name == "r")})


def said_args(form: Form) -> str:
    """`with r=8`, what an example takes beside the defaults."""
    args = example_args(form)
    arguments = [f"{p.name}={args[p.name]}" for p in form.params if args[p.name] != p.default]
    return f"with {join_names(arguments)}" if arguments else ""


def dims_of(source: Shape | None, target: Shape, form: Form) -> Dims:
    """The last of so many sites that are alike, one in each layer."""
    features = [shape.d if isinstance(shape, Tokens | Vector) else 0 for shape in (source, target)]
    spots = tuple(Spot(f"layer[{i}]", "ffn", features[0], features[1]) for i in range(SITES))
    dims = Dims(source, target, D, SITES, (features[0], features[1]), spots=spots, index=SITES - 1, depth=SITES)
    return replace(dims, spread=(0, SITES * form.entries(example_args(form), dims)))


def stands(form: Form, wide: int = D) -> Iterator[tuple[Dims, Shape]]:
    """Where a form can stand, one place of a kind, and what it gives there.

    `wide`: features that a map writes.
    """
    heads: list[Shape] = [kind(HEADS, D // HEADS) for kind in (Heads, Rows, KeyValue)]
    weights: list[Shape] = [Weight(wide, D), Vector(D)]
    places: list[tuple[Shape | None, Shape]] = [(None, state) for state in (Tokens(D), *heads, *weights)]
    if form.takes_input:
        places = [(Tokens(D), Tokens(wide)), *((state, state) for state in heads), *((weights[0], w) for w in weights)]
    for source, target in places:
        try:
            dims = dims_of(source, target, form)
            shape = form.shape(example_args(form), dims)
        except Illegal:
            continue
        if isinstance(shape, Scalar | type(target)):
            yield dims, shape


def mapped(dims: Dims, shape: Shape) -> str:
    return f"`{dims.input}` to `{shape}`" if dims.input else f"`{shape}`"


def shapes_of(form: Form) -> str:
    """What it reads and gives, for each kind of state that it can stand at."""
    places = list(stands(form, 4 * D)) or list(stands(form))
    return "; ".join(dict.fromkeys(mapped(*one) for one in places))


def first_of(form: Form) -> str:
    """What it equals before any training, with the defaults or with another argument."""
    if form.passes:
        return "what it reads, where that is the base's own weight"
    value = form.at_init(example_args(form))
    if value is not None:
        return f"{value:g}, so that what it {'multiplies' if value else 'is added to'} stays as it is"
    with_ = [text for text, args in variants(form) if form.at_init(args) == 0]
    return "not a constant" + (f"; 0 with {join_names(with_)}" if with_ else "")


def folds_of(form: Form) -> str:
    """Whether its edits fold with the defaults, else why not; and which argument changes that."""
    if all(isinstance(dims.target, Weight | Vector) for dims, _ in stands(form)):
        return "yes, it is a change of the weight"
    reason = form.affine(example_args(form))
    if reason is None:
        against = [f"not with `{text}`: {why}" for text, args in variants(form) if (why := form.affine(args))]
        return "; ".join(["yes", *against])
    with_ = [text for text, args in variants(form) if form.affine(args) is None]
    return f"no: {reason}" + (f"; yes with {join_names(with_)}" if with_ else "")


def variants(form: Form) -> Iterator[tuple[str, Args]]:
    """An example with one argument at another value."""
    args = example_args(form)
    for p in form.params:
        values: tuple[Value, ...] = p.choices if p.type == "choice" else (True, False) if p.type == "bool" else ()
        values = values or ((1,) if p.type == "int" and p.default is None and not p.required else ())
        for value in values:
            if value != args[p.name]:
                yield f"{p.name}={str(value).lower()}", {**args, p.name: value}


def costs_of(form: Form) -> str:
    """`with r=8, 12,288 trained and stored`, and what sites have in common."""
    args, (dims, shape) = example_args(form), next(stands(form))
    together = f"all {SITES} sites" + (" of a task" if form.all_count else "")
    counts = [
        (count(args, dims), who)
        for count, who in (
            (form.count, "each site"),
            (form.common_count, together),
            (form.all_count, f"all {SITES} sites and all tasks"),
        )
        if count
    ]
    costs = " and ".join(f"{counted(count)} for {who}" for count, who in counts if count.trained or count.stored)
    saved = form.collapses(args)
    what = ", ".join(part for part in (said_args(form), mapped(dims, shape)) if part)
    return f"{what}: {costs}" + (f"; saved as `{saved}`" if saved else "")


def counted(count: Count) -> str:
    if count.trained == count.stored:
        return f"{count.trained:,} trained and stored"
    return f"{count.trained:,} trained and {count.stored:,} stored"


def argument_row(param: Param) -> str:
    """`| r | width of the bottleneck; at least 1 | |`"""
    cells = [param.doc]
    if param.choices:
        cells.append(" or ".join(f"`{choice}{'(…)' if param.type == 'call' else ''}`" for choice in param.choices))
    elif param.low is not None or param.high is not None:
        cells.append(interval(param))
    return f"| `{param.name}` | {'; '.join(cells)} | {default_of(param)} |"


def default_of(param: Param) -> str:
    if param.required:
        return "required"
    if param.default is None:
        return ""
    return f"`{str(param.default).lower()}`" if isinstance(param.default, bool) else f"`{param.default}`"


def recipe_section(name: str, path: Path) -> str:
    """One recipe: what its file says of it, and the parameters of its method."""
    text = path.read_text(encoding="utf-8")
    method = next(s for s in parse_text(text, str(path)).statements if isinstance(s, ast.Method))
    parameters = ", ".join(f"{p.name} = {print_expression(p.default)}" for p in method.params)
    return "\n".join([f"### `{name}`", "", *comment_of(text), "", f"`method {method.name}({parameters})`", ""])


def comment_of(text: str) -> Iterator[str]:
    """The comment at the head of a file, which says what the recipe is and where it comes from."""
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            yield line.removeprefix("#").strip()
        elif line.strip():
            return


if __name__ == "__main__":
    print(page(), end="")
