"""The design dimensions of an edit, from its equations: Table 1 of He et al. 2022."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from peftc.forms.shapes import KeyValue, Tokens
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
    subterms,
)

Insertion = Literal["sequential", "parallel", "weight", "scaling", "tokens"]
FACTORS = {"scalar": "s", "gate": "g", "vector": "l"}  # forms that only scale, with the symbols of the paper
OPERATORS = {"+": "+", "-": "−", "*": "·", "/": "/"}
ROLES = {"q": "query", "k": "key", "v": "val", "o": "output", "up": "up", "down": "down", "gate": "gate"}
COLUMNS = ("method", "Δh functional form", "insertion form", "modified representation", "composition function")


@dataclass(frozen=True)
class Design:
    """One edit in the dimensions of He et al. 2022, section 3.2.

    Attributes:
        edit: its name.
        functional: the functional form: what Δh is.
        insertion: the insertion form: "sequential" if Δh reads `h`, "parallel" if it reads `x`;
            "weight", "scaling" and "tokens" for what the paper does not have.
        modified: the modified representation, in the words of the paper.
        composition: how Δh is joined to the representation.
    """

    edit: str
    functional: str  # what Δh is
    insertion: Insertion  # sequential: Δh reads `h`; parallel: `x`
    modified: str  # representation
    composition: str  # of Δh with the representation


def design_of(site_edits: Sequence[SiteEdit]) -> Design:
    """The design of an edit; that of the last equation if there are several."""
    site_edit = site_edits[0]
    assign = site_edit.assigns[-1]
    value, state, name = assign.value, assign.state, site_edit.edit
    modified = representation(site_edits)
    calls = [term for term in subterms(value) if isinstance(term, FormCall)]
    insertion = insertion_of(assign)
    if isinstance(value, Concat):
        functional = calls[0].instance.form.shown("x W_q", calls[0].instance.args, calls[0].instance.dims)
        if insertion == "tokens":
            return Design(name, functional, insertion, modified, "h ← [Δh; h]")
        return Design(name, functional, insertion, modified, "h ← (1 − λ)h + λΔh")  # Eq. 7-10
    main = _main(value)
    if main is None:
        functional = FACTORS.get(calls[0].instance.form.name, "Δh") if calls else show_composition(value, None)
        return Design(name, functional, insertion, modified, f"{state} ← {show_composition(value, None)}")
    source = "" if main.input is None else show_composition(main.input, None)
    composition = f"{state} ← {show_composition(value, main, f'Δ{state}')}"
    instance = main.instance
    functional = instance.form.shown(source, instance.args, instance.dims)
    return Design(name, functional, insertion, modified, composition)


def insertion_of(assign: Assign) -> Insertion:
    """How one equation inserts what it adds."""
    value, main = assign.value, _main(assign.value)
    if isinstance(value, Concat):
        return "tokens" if isinstance(value.shape, Tokens) else "parallel"
    if main is None:
        return "scaling"
    if assign.state in ("w", "b"):
        return "weight"
    reads_h = any(isinstance(term, Read) and term.state == "h" for term in subterms(main))
    return "sequential" if reads_h else "parallel"


def _main(value: Term) -> FormCall | None:
    """The first form that does more than scale."""
    calls = (term for term in subterms(value) if isinstance(term, FormCall))
    return next((call for call in calls if call.instance.form.name not in FACTORS), None)


def table(designs: Iterable[tuple[str, Design]]) -> str:
    """Rows (name, design) as Markdown, with the headings of the paper."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {d.functional} | {d.insertion} | {d.modified} | {d.composition} |" for name, d in designs]
    return "\n".join(lines)


def representation(site_edits: Sequence[SiteEdit]) -> str:
    """The sites in the words of the paper, in order: `ffn/attn`, `attn key/val`, `head attn`."""
    words = dict.fromkeys(map(_words, site_edits))
    whole = [word for word in words if " " not in word or word == "head attn"]
    parts: dict[str, list[str]] = {}
    for word in words:
        if word not in whole:
            owner, part = word.split()
            parts.setdefault(owner, []).append(part)
    return "/".join([*whole, *(f"{owner} {'/'.join(names)}" for owner, names in parts.items())])


def _words(site_edit: SiteEdit) -> str:
    names = [name for name, _ in site_edit.site.steps]
    last = names[-1]
    if last == "heads" or isinstance(site_edit.site.states[site_edit.assigns[-1].state].shape, KeyValue):
        return "head attn"
    if last in ROLES and len(names) > 1:
        return f"{'ffn' if 'ffn' in names else 'attn'} {ROLES[last]}"
    if last in ("self", "cross"):
        return "attn"
    return f"{names[-2]} hidden" if last == "hidden" and len(names) > 1 else last


def show_composition(term: Term, main: FormCall | None, change: str = "Δh") -> str:
    """A term with Δh for the main form, s for numbers, g for gates and l for vectors."""
    if term is main and main is not None:
        return f"s · {change}" if main.instance.args.get("alpha") is not None else change
    match term:
        case Read(state=state):
            return state
        case Constant(value=value):
            return "1" if value == 1 else "s"
        case FormCall(instance=instance):
            return FACTORS.get(instance.form.name, instance.form.name)
        case FrozenCall(function=function, input=value):
            return f"{function}({show_composition(value, main, change)})"
        case Feature(input=value, index=index):
            return f"{show_composition(value, main, change)}[{index}]"
        case Arithmetic(op=op, left=left, right=right):
            sides = [show_composition(side, main, change) for side in (left, right)]
            if op in ("*", "/"):
                sides = [f"({text})" if " + " in text or " − " in text else text for text in sides]
            if op == "*" and sides[0] == "s" and sides[1].startswith("s · "):
                return sides[1]
            return f" {OPERATORS[op]} ".join(sides)
        case Concat(parts=parts):
            return f"[{'; '.join(show_composition(part, main, change) for part in parts)}]"
