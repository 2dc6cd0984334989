"""The design dimensions of an edit, read off its equations: Table 1 of He et al. 2022."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from peftc.forms.shapes import KeyValue, Tokens
from peftc.planning.ir import Arithmetic, Assign, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term, subterms

Insertion = Literal["sequential", "parallel", "weight", "scaling", "tokens"]
FACTORS = {"scalar": "s", "gate": "g", "vector": "l"}  # forms that multiply what is composed, as the paper writes them
ROLES = {"q": "query", "k": "key", "v": "val", "o": "output", "up": "up", "down": "down", "gate": "gate"}
COLUMNS = ("method", "Δh functional form", "insertion form", "modified representation", "composition function")


@dataclass(frozen=True)
class Design:
    """One edit along the dimensions of He et al. 2022, section 3.2: what Δh is, whether it reads `h` (sequential) or `x` (parallel),
    which representation is changed, and how Δh is put together with it.
    """

    edit: str
    functional: str
    insertion: Insertion
    modified: str
    composition: str


def design_of(places: Sequence[SiteEdit]) -> Design:
    """The design of an edit, from its equations at its sites; of several equations, the last."""
    placed = places[0]
    assign = placed.assigns[-1]
    modified = representation(places)
    if isinstance(assign.value, Concat):
        return _joined(placed, assign, assign.value, modified)
    main = _main(assign.value)
    if main is None:
        factor = next((p for p in subterms(assign.value) if isinstance(p, FormCall)), None)
        functional = FACTORS.get(factor.instance.form.name, "Δh") if factor else said(assign.value, None)
        return Design(placed.edit, functional, "scaling", modified, f"{assign.state} ← {said(assign.value, None)}")
    change = f"Δ{assign.state}"
    composed = said(assign.value, main, change)
    insertion: Insertion = "weight" if assign.state in ("w", "b") else _insertion(main)
    return Design(placed.edit, _functional(main), insertion, modified, f"{assign.state} ← {composed}")


def table(designs: Iterable[tuple[str, Design]]) -> str:
    """Rows (name, design) as Markdown, with the headings of the paper."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {d.functional} | {d.insertion} | {d.modified} | {d.composition} |" for name, d in designs]
    return "\n".join(lines)


def representation(places: Sequence[SiteEdit]) -> str:
    """`ffn/attn`, `attn key/val`, `head attn`: the sites in the words of the paper, in the order of the text."""
    found = dict.fromkeys(map(_word, places))
    whole = [word for word in found if " " not in word or word == "head attn"]
    parts = [word for word in found if word not in whole]
    owners = dict.fromkeys(word.split()[0] for word in parts)
    grouped = [f"{owner} {'/'.join(w.split()[1] for w in parts if w.split()[0] == owner)}" for owner in owners]
    return "/".join([*whole, *grouped])


def _word(placed: SiteEdit) -> str:
    names = [name for name, _ in placed.site.steps]
    last = names[-1]
    if last == "heads" or isinstance(placed.site.states[placed.assigns[-1].state].shape, KeyValue):
        return "head attn"
    if last in ROLES and len(names) > 1:
        owner = "ffn" if "ffn" in names else "attn"
        return f"{owner} {ROLES[last]}"
    if last in ("self", "cross"):
        return "attn"
    return f"{names[-2]} hidden" if last == "hidden" and len(names) > 1 else last


def _joined(placed: SiteEdit, assign: Assign, value: Concat, modified: str) -> Design:
    rows = next(p for p in subterms(value) if isinstance(p, FormCall))
    functional = rows.instance.form.shown("x W_q", rows.instance.args)
    if isinstance(value.shape, Tokens):
        return Design(placed.edit, functional, "tokens", modified, "h ← [Δh; h]")
    return Design(placed.edit, functional, "parallel", modified, "h ← (1 − λ)h + λΔh")  # Eq. 7-10


def _main(value: Term) -> FormCall | None:
    """What Δh is: the outermost form that is no mere factor."""
    found = [p for p in subterms(value) if isinstance(p, FormCall) and p.instance.form.name not in FACTORS]
    return found[0] if found else None


def _functional(main: FormCall) -> str:
    source = "" if main.input is None else said(main.input, None)
    return main.instance.form.shown(source, main.instance.args)


def _insertion(main: FormCall) -> Insertion:
    reads = {p.state for p in subterms(main) if isinstance(p, Read)}
    return "sequential" if "h" in reads else "parallel"


def said(term: Term, main: FormCall | None, change: str = "Δh") -> str:
    """A term with Δh in the place of the main form, s for numbers, g for gates, l for vectors."""
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
            return f"{function}({said(value, main, change)})"
        case Arithmetic(op=op, left=left, right=right):
            sides = [said(side, main, change) for side in (left, right)]
            if op in ("*", "/"):
                sides = [f"({text})" if " + " in text or " − " in text else text for text in sides]
            if op == "*" and sides[0] == "s" and sides[1].startswith("s · "):
                return sides[1]
            return f" {dict(zip('+-*/', '+−·/', strict=True))[op]} ".join(sides)
        case Concat(parts=parts):
            return f"[{'; '.join(said(part, main, change) for part in parts)}]"
