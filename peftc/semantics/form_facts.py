"""What a form is, in words and numbers, for the manual and `peftc explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from peftc.diagnostics.suggestions import join_names
from peftc.forms import Args, Argument, ArgumentValue, Count, Dims, Form, PlacementError
from peftc.forms.form import Spot
from peftc.forms.shapes import Heads, KeyValue, Rows, Scalar, Shape, Tokens, Vector, Weight
from peftc.semantics.arguments import interval, signature

D, HEADS, SITES = 768, 12, 12
GIVEN: dict[str, ArgumentValue] = {
    "r": 8,
    "len": 20,
    "n": 4,
    "d": 1000,
    "density": 0.005,
    "block": 32,
}  # what examples take
OTHER = 8  # and what they take for arguments of other names


def facts_of(form: Form) -> dict[str, str]:
    """Shapes, the value at first, whether it folds, and counts, for d = 768 and 12 sites."""
    if next(stands(form), None) is None:
        return {"Shapes": "none of those of the manual, such as […, 768] to […, 3072], with r=8"}
    facts = {"Shapes": shapes_of(form), "At first": first_of(form), "Folds": folds_of(form), "Costs": costs_of(form)}
    flops = form.flops(example_args(form), next(stands(form))[0])
    if flops is not None:
        facts["Computes"] = f"{flops:,} FLOPs for one token"
    return facts


def example_args(form: Form) -> Args:
    """The defaults, with what has none: a width, and what is required."""
    width = form.argument("reduction") is not None
    taken = [p.name for p in form.arguments if p.required or (width and p.name == "r")]
    return form.fill({name: GIVEN.get(name, OTHER) for name in taken})


def said_args(form: Form) -> str:
    """`with r=8`, what an example takes beside the defaults."""
    args = example_args(form)
    arguments = [f"{p.name}={args[p.name]}" for p in form.arguments if args[p.name] != p.default]
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
        except PlacementError:
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
    if form.keeps_base(example_args(form), next(stands(form))[0]):
        return "what it reads, where that is the base's own value"
    dims, _ = next(stands(form))
    value = form.initial(example_args(form), dims)
    if value is not None:
        return f"{value:g}, so that what it {'multiplies' if value else 'is added to'} stays as it is"
    with_ = [text for text, args in variants(form) if form.initial(args, dims) == 0]
    return "not a constant" + (f"; 0 with {join_names(with_)}" if with_ else "")


def folds_of(form: Form) -> str:
    """Whether its edits fold with the defaults, else why not; and which argument changes that."""
    places = [dims for dims, _ in stands(form)]
    if all(isinstance(dims.target, Weight | Vector) for dims in places):
        return "yes, it is a change of the weight"
    (dims, *_) = places
    reason = form.not_affine(example_args(form), dims)
    reasons = {text: form.not_affine(args, dims) for text, args in variants(form)}
    if reason is None:
        return "; ".join(["yes", *(f"not with `{text}`: {why}" for text, why in reasons.items() if why)])
    with_ = [text for text, why in reasons.items() if why is None]
    return f"no: {reason}" + (f"; yes with {join_names(with_)}" if with_ else "")


def variants(form: Form) -> Iterator[tuple[str, Args]]:
    """An example with one argument at another value, where the form can have it."""
    args, dims = example_args(form), next(stands(form))[0]
    for p in form.arguments:
        values: tuple[ArgumentValue, ...] = (
            p.choices if p.type == "choice" else (True, False) if p.type == "bool" else ()
        )
        values = values or ((1,) if p.type == "int" and p.default is None and not p.required else ())
        for value in values:
            if value != args[p.name] and _fits(form, {**args, p.name: value}, dims):
                yield f"{p.name}={str(value).lower()}", {**args, p.name: value}


def _fits(form: Form, args: Args, dims: Dims) -> bool:
    try:
        form.shape(args, dims)
    except PlacementError:
        return False
    return True


def costs_of(form: Form) -> str:
    """`with r=8, 12,288 trained and stored`, and what sites have in common."""
    args, (dims, shape) = example_args(form), next(stands(form))
    together = f"all {SITES} sites" + (" of a task" if form.tasks_module else "")
    counts = [(form.count(args, dims), "each site")]
    if form.has_common_part:
        counts.append((form.common_count(args, dims), together))
    counts.append((form.tasks_count(args, dims), f"all {SITES} sites and all tasks"))
    costs = " and ".join(f"{counted(count)} for {who}" for count, who in counts if count.trained or count.stored)
    saved = form.saved_as(args)
    what = ", ".join(part for part in (said_args(form), mapped(dims, shape)) if part)
    return f"{what}: {costs}" + (f"; saved as `{saved}`" if saved else "")


def counted(count: Count) -> str:
    if count.trained == count.stored:
        return f"{count.trained:,} trained and stored"
    return f"{count.trained:,} trained and {count.stored:,} stored"


def default_of(argument: Argument) -> str:
    if argument.required:
        return "required"
    if argument.default is None:
        return ""
    return f"`{str(argument.default).lower()}`" if isinstance(argument.default, bool) else f"`{argument.default}`"


def form_lines(form: Form) -> Iterator[str]:
    """How a form is called, its equation, its arguments, and what follows from them."""
    yield from (signature(form), "")
    yield from [form.equation if form.text is None else form.text]
    yield ""
    for param in form.arguments:
        values = f": {', '.join(param.choices)}" if param.choices else ""
        limits = f", {interval(param)}" if not values and (param.low, param.high) != (None, None) else ""
        default = default_of(param).strip("`")
        yield f"  {param.name:10} {param.doc}{values}{limits}{f' ({default})' if default else ''}"
    yield ""
    yield from (f"  {name:10} {fact.replace('`', '')}" for name, fact in facts_of(form).items())
    if form.text is None:
        yield f"  {'Source':10} {form.paper}"
