"""What selectors name on a model, for texts that are being written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from peftc.addressing.paths import align, paths_of
from peftc.addressing.selection import Selection
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import PeftcError
from peftc.diagnostics.suggestions import plural
from peftc.planning.selection.selectors import select
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.vocabulary import BELOW, EVERY_MODULE, LINEAR, STACK_CHOICES, STATES, STATES_AT, TOWERS
from peftc.syntax.walk import arms

_NUMBERED = "layer"  # a step that a selector writes with `[*]`
_MOST_NAMES = 300  # of modules
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


class StepChoice(NamedTuple):
    """A step that may follow in a path.

    Attributes:
        name: of the step.
        text: what to write.
        detail: how many sites the path then names.
    """

    name: str
    text: str
    detail: str


def parse_selector(text: str) -> ast.Selector | None:
    """A selector of version 2; None for a text that is none."""
    try:
        (edit,) = parse_text(f"peft 2 edit e at {text} {{ h = h }}").statements
    except (PeftcError, ValueError):
        return None
    return edit.selector if isinstance(edit, ast.Edit) else None


def selection_of(text: str, table: SiteTable) -> Selection | None:
    """What a selector names; None if it names nothing."""
    selector = parse_selector(text)
    try:
        return None if selector is None else select(selector, table)
    except PeftcError:
        return None


def next_steps(written: str, tables: Sequence[SiteTable]) -> list[StepChoice]:
    """The steps that may follow in a path of which some are written: `encoder.layer[*].`.

    Those of the models, if there are any, else of the language.
    """
    path = parse_selector(f"{written}{EVERY_MODULE}")
    paths = [] if path is None else [arm.steps[:-1] for arm in arms(path) if isinstance(arm, ast.Path)]
    choices = (choice for steps in paths or [()] for choice in _choices(steps, written, tables))
    return list({choice.name: choice for choice in choices}.values())


def _choices(steps: Sequence[ast.Step], written: str, tables: Sequence[SiteTable]) -> list[StepChoice]:
    if steps and steps[-1].name == EVERY_MODULE:
        selections = [selection_of(f"{written}{LINEAR}", table) for table in tables]
        return [StepChoice(LINEAR, LINEAR, _sites([0 if one is None else len(one) for one in selections]))]
    if not tables:
        above = [step.name for step in steps if step.name not in TOWERS]
        names = BELOW.get(above[-1], ()) if above else BELOW[TOWERS[0]]
        choices = [StepChoice(name, _with_index(name), "") for name in names]
        return [*choices, *_stack_choices(steps)]
    counts: dict[str, list[int]] = {}
    for table in tables:
        for name in dict.fromkeys(_names_after(tuple(step.name for step in steps), table)):
            selection = selection_of(f"{written}{_with_index(name)}", table)
            counts.setdefault(name, []).append(0 if selection is None else len(selection))
    choices = [StepChoice(name, _with_index(name), _sites(numbers)) for name, numbers in counts.items()]
    return [*choices, *_stack_choices(steps)]


def _stack_choices(steps: Sequence[ast.Step]) -> Iterator[StepChoice]:
    """`input.embed` and `output.layer[*]`, which begin a path."""
    for name, follows in STACK_CHOICES.items() if not steps else ():
        yield StepChoice(name, f"{name}.{_with_index(follows)}", "the stack by its role")


def _with_index(name: str) -> str:
    return f"{name}[*]" if name == _NUMBERED else name


def _sites(counts: Sequence[int]) -> str:
    return " · ".join(plural(number, "site") for number in counts) if any(counts) else ""


def _names_after(written: tuple[str, ...], table: SiteTable) -> Iterator[str]:
    """The names of steps with which a path goes on."""
    paths = paths_of(table)
    for block in paths.sites.blocks:
        for item in block.template.items:
            names = tuple(name for name, _ in item.site.steps)
            start = align(written, names, whole=False)
            for name in dict.fromkeys(names) if start is not None else ():
                longer = (*written, name)
                if align(longer, names, whole=False) is not None or align(longer, names) is not None:
                    yield name


def sites_of(selector: str, table: SiteTable) -> list[Site]:
    """A site of each kind that a selector names."""
    if (selection := selection_of(selector, table)) is None:
        return []
    sites = selection.sites
    items = (sites.blocks[block].template.items[item].site for block, item in selection.items)
    return [*items, *selection.others.values()]


def states_of(selector: str, tables: Sequence[SiteTable]) -> Mapping[str, str]:
    """The states that the sites of a selector have, each with what it is."""
    shapes: dict[str, dict[str, None]] = {}
    for table in tables:
        for site in sites_of(selector, table):
            for name, state in site.states.items():
                shapes.setdefault(name, {})[str(state.shape)] = None
    if shapes:
        names = (*(name for name in STATES if name in shapes), *(name for name in shapes if name not in STATES))
        return {name: f"{STATES.get(name, name)}: {', '.join(shapes[name])}" for name in names}
    parsed = parse_selector(selector)
    last = [arm.steps[-1].name for arm in arms(parsed) if isinstance(arm, ast.Path)] if parsed is not None else []
    names = [name for name in STATES if any(name in STATES_AT.get(step, STATES) for step in last)]
    return {name: STATES[name] for name in names or STATES}


def module_names(tables: Iterable[SiteTable]) -> list[str]:
    """The names of modules, numbers as `*`: patterns of selectors."""
    names = (_INDEX.sub("*", module.name) for table in tables for module in table.modules if module.name)
    return list(dict.fromkeys(names))[:_MOST_NAMES]
