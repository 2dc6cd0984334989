"""Errors of selectors that match nothing, with what exists there and the nearest name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from peftc.addressing.paths import BRANCHES, SitePaths, StepList, glob_pattern, stack_steps
from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import join_names, nearest
from peftc.planning.messages import plural
from peftc.semantics.vocabulary import STACK_CHOICE_HELP
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast
from peftc.syntax.printer import print_index, print_selector, print_step

MAX_NAMES = 8  # in a note
MAX_SUGGESTIONS = 12

NamesBelow = Mapping[str, tuple[int, tuple[str, ...]]]  # name -> (how many, the steps that lead to it)


def no_match(path: ast.Path, steps: Sequence[ast.Step], paths: SitePaths) -> Diagnostic:
    """P201 at the first step that matches nothing."""
    steps = [step for i, step in enumerate(steps) if not selects_stack(steps, i)]
    counts = range(len(steps), 0, -1)
    matched = next((n for n in counts if any(True for _ in paths.matches(steps[:n], whole=False))), 0)
    step = steps[min(matched, len(steps) - 1)]
    below = _names_below(steps[:matched], paths)
    text = ".".join(map(print_step, steps[:matched]))
    help_ = STACK_CHOICE_HELP.get(step.name)
    if help_ is None and matched == len(steps):  # the path stops above a site, as `encoder` does
        help_ = f"to reach every module below, write `{text}.**`"
    help_ = help_ or _suggestion(step, steps[:matched], below)
    message = f"`{print_selector(path)}` matches nothing in {paths.table.model_id}"
    label = f"no such site under `{text}`" if text else "no such site"
    notes = tuple(_notes(text, below, paths.stacks))
    return Diagnostic("P201", message, name_span(step), label=label, notes=notes, help=help_)


def _names_below(steps: Sequence[ast.Step], paths: SitePaths) -> NamesBelow:
    """The names one step below a path, then those further below."""
    direct: dict[str, set[object]] = {}
    indirect: dict[str, tuple[set[object], tuple[str, ...]]] = {}
    for match in paths.matches(steps, whole=False):
        start = match.positions[-1] + 1 if match.positions else 0
        parts = match.site.steps
        stack = stack_steps([name for name, _ in parts])
        for end in range(start + 1, len(parts) + 1):
            name = parts[end - 1][0]
            if end == start + 1 or (start == 0 and end == stack + 1):
                direct.setdefault(name, set()).add(parts[:end])
            else:
                between = tuple(n for n, _ in parts[max(start, stack) : end - 1] if n not in BRANCHES)
                indirect.setdefault(name, (set(), between))[0].add(parts[:end])
    names: dict[str, tuple[int, tuple[str, ...]]] = {name: (len(sites), ()) for name, sites in direct.items()}
    return names | {name: (len(sites), way) for name, (sites, way) in indirect.items() if name not in names}


def _notes(text: str, below: NamesBelow, stacks: Sequence[str]) -> Iterator[str]:
    words = {word for stack in stacks for word in stack.split(".")}
    direct = [(name, count) for name, (count, way) in below.items() if not way and name not in words]
    branches = [(name, count) for name, count in direct if name in BRANCHES]
    if direct:
        yield f"{f'`{text}`' if text else 'the model'} has {_join_counts(branches or direct)}"
    if text and not below:
        yield f"there are no sites below `{text}`"
    if not text and set(stacks) - {"encoder", "decoder"}:
        yield f"its stacks are {join_names(stacks)}"


def _join_counts(names: Sequence[tuple[str, int]]) -> str:
    shown = [f"`{name}` ({plural(count, 'site')})" for name, count in names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"{len(names) - MAX_NAMES} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _suggestion(step: ast.Step, before: Sequence[ast.Step], below: NamesBelow) -> str | None:
    name = step.name if step.name in below else nearest(step.name, below)
    if name is None:
        return f"names that can stand here: {_join(below)}" if below else None
    way = below[name][1]
    if not way:
        return f"did you mean `{name}`?"
    steps = [*map(print_step, before), *(f"{word}[*]" if word == "layer" else word for word in way)]
    return f"did you mean `{'.'.join([*steps, print_step(replace(step, name=name))])}`?"


def _join(names: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:MAX_SUGGESTIONS])


def removes_nothing(selector: ast.Difference, left: Sequence[str], right: Sequence[str]) -> Diagnostic:
    message, label = f"`- {print_selector(selector.right)}` removes nothing", "none of these sites is on the left"
    sides = (("left", left), ("right", right))
    notes = tuple(f"the {side} side has {plural(len(s), 'site')}, such as `{s[0]}`" for side, s in sides)
    return Diagnostic("P203", message, selector.right.span, label=label, notes=notes, help="leave this part out")


def no_such_index(index: ast.Index, step: ast.Step, sizes: Mapping[StepList, int]) -> Diagnostic:
    """P202: no stack has all the numbers of an index."""
    notes = tuple(f"`{steps}` has 0..{size - 1}" for steps, size in sizes.items())
    text = f"`{step.name}[{print_index(index)}]`"
    if index.start is not None and index.stop is not None and 0 <= index.stop < index.start:
        label, help_ = "ends before it starts", f"write `{index.stop}..{index.start}`"
        return Diagnostic("P202", f"{text} is empty", index.span, label=label, notes=notes, help=help_)
    label, help_ = f"the last one is {max(sizes.values()) - 1}", "negative numbers count from the end"
    return Diagnostic("P202", f"{text} does not exist", index.span, label=label, notes=notes, help=help_)


def no_module(glob: ast.Glob, table: SiteTable) -> Diagnostic:
    """P201 at the first segment of a pattern that matches no module."""
    segments = glob.pattern.split(".")
    names = [module.name for module in table.modules]
    count, parents = 0, [""]
    while count + 1 < len(segments):
        pattern = glob_pattern(".".join(segments[: count + 1]))
        matches = [name for name in names if pattern.fullmatch(name)]
        if not matches:
            break
        count, parents = count + 1, matches
    children = dict.fromkeys(_child(name, parent) for parent in parents for name in names if _child(name, parent))
    text = ".".join(segments[:count])
    name = nearest(segments[count], children)
    span = _subspan(glob.span, 1 + sum(len(segment) + 1 for segment in segments[:count]), len(segments[count]))
    message = f'`"{glob.pattern}"` matches no module of {table.model_id}'
    label = f'no such module under `"{text}"`' if text else "no such module"
    notes = (f"there is {_join(children)}",) if children else ()
    help_ = f'did you mean `"{".".join([*segments[:count], name, *segments[count + 1 :]])}"`?' if name else None
    return Diagnostic("P201", message, span, label=label, notes=notes, help=help_)


def _child(name: str, parent: str) -> str:
    if parent and not name.startswith(parent + "."):
        return ""
    return name[len(parent) + bool(parent) :].partition(".")[0]


def name_span(step: ast.Step) -> Span:
    return _subspan(step.span, 0, len(step.name))


def _subspan(span: Span, offset: int, length: int) -> Span:
    start, column = span.start + offset, span.column + offset
    if start + length > span.end:
        return span
    return Span(start, start + length, span.line, column, span.line, column + length)
