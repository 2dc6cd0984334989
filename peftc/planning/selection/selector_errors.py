"""What to say about a selector that names nothing: how far it got, what is there, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from peftc.addressing.paths import BRANCHES, Family, Paths, glob_pattern, stack_steps
from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import join_names, nearest
from peftc.semantics.vocabulary import STACK_CHOICE_HELP
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_index as show_index
from peftc.syntax.print_expressions import print_selector as show
from peftc.syntax.print_expressions import print_step as show_step

LISTED = 8  # names in a note, at most


def dead_path(path: ast.Path, steps: Sequence[ast.Step], paths: Paths) -> Diagnostic:
    """P201 at the first step that leads nowhere."""
    steps = [step for i, step in enumerate(steps) if not selects_stack(steps, i)]
    reached = _reached(steps, paths)
    step = steps[min(reached, len(steps) - 1)]
    below = _below(steps[:reached], paths)
    text = ".".join(map(show_step, steps[:reached]))
    help_text = STACK_CHOICE_HELP.get(step.name) or _whole(steps, reached) or _suggestion(step, steps[:reached], below)
    return Diagnostic(
        "P201",
        f"`{show(path)}` matches nothing in {paths.table.model_id}",
        name_span(step),
        label=f"no such site under `{text}`" if text else "no such site",
        notes=(*_notes(text, below, stacks := paths.stacks), *_towers(stacks if reached == 0 else ())),
        help=help_text,
    )


def _reached(steps: Sequence[ast.Step], paths: Paths) -> int:
    """How many of the written steps lead to something."""
    for count in range(len(steps), 0, -1):
        if any(True for _ in paths.matches(steps[:count], whole=False)):
            return count
    return 0


Below = Mapping[str, tuple[int, tuple[str, ...]]]  # name -> how many there are, and the steps that lead to it


def _below(steps: Sequence[ast.Step], paths: Paths) -> Below:
    """The names one step below a path, and (after them) those further below."""
    near: dict[str, set[object]] = {}
    far: dict[str, tuple[set[object], tuple[str, ...]]] = {}
    for match in paths.matches(steps, whole=False):
        start = match.positions[-1] + 1 if match.positions else 0
        parts = match.site.steps
        stacked = stack_steps([name for name, _ in parts])
        for end in range(start + 1, len(parts) + 1):
            name = parts[end - 1][0]
            if end == start + 1 or (start == 0 and end == stacked + 1):
                near.setdefault(name, set()).add(parts[:end])
            else:
                between = tuple(n for n, _ in parts[max(start, stacked) : end - 1] if n not in BRANCHES)
                far.setdefault(name, (set(), between))[0].add(parts[:end])
    found = {name: (len(sites), ()) for name, sites in near.items()}
    return found | {name: (len(sites), way) for name, (sites, way) in far.items() if name not in found}


def _towers(stacks: Iterable[str]) -> Iterable[str]:
    """The stacks of a model that has others than an encoder and a decoder."""
    named = list(stacks)
    if set(named) - {"encoder", "decoder"}:
        yield f"its stacks are {join_names(named)}"


def _notes(text: str, below: Below, stacks: Iterable[str]) -> Iterable[str]:
    words = {word for stack in stacks for word in stack.split(".")}
    near = [(name, count) for name, (count, way) in below.items() if not way and name not in words]
    direct = [(name, count) for name, count in near if name in BRANCHES] or near
    if direct:
        subject = f"`{text}`" if text else "the model"
        yield f"{subject} has {_counted(direct)}"
    if text and not below:
        yield f"there are no sites below `{text}`"


def _counted(names: Sequence[tuple[str, int]]) -> str:
    shown = [f"`{name}` ({count} site{'s' * (count != 1)})" for name, count in names[:LISTED]]
    if len(names) > LISTED:
        shown.append(f"{len(names) - LISTED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _suggestion(step: ast.Step, before: Sequence[ast.Step], below: Below) -> str | None:
    meant = step.name if step.name in below else nearest(step.name, below)
    if meant is None:
        return f"names that can stand here: {', '.join(f'`{name}`' for name in list(below)[:12])}" if below else None
    way = below[meant][1]
    if not way:
        return f"did you mean `{meant}`?"
    steps = [*map(show_step, before), *(f"{name}[*]" if name == "layer" else name for name in way)]
    return f"did you mean `{'.'.join([*steps, show_step(replace(step, name=meant))])}`?"


def _whole(steps: Sequence[ast.Step], reached: int) -> str | None:
    """A path that stops above a site (`encoder`): everything below it may be meant."""
    if reached == len(steps):
        return f"to reach every module below, write `{'.'.join(map(show_step, steps))}.**`"
    return None


def empty_choice(path: ast.Path, table: SiteTable) -> Diagnostic:
    """P201 where the words and the numbers exist, but not together."""
    return Diagnostic(
        "P201",
        f"`{show(path)}` matches nothing in {table.model_id}",
        path.span,
        label="there is such a site, but not in these layers",
    )


def not_indexed(step: ast.Step) -> Diagnostic:
    return Diagnostic(
        "P202",
        f"`{step.name}` takes no index here: there is one in each place",
        step.span,
        label="not numbered",
        help=f"write `{step.name}`",
    )


def no_such_index(index: ast.Index, step: ast.Step, sizes: Mapping[Family, int]) -> Diagnostic:
    """P202: no stack has all the numbers that were written."""
    empty = index.start is not None and index.stop is not None and 0 <= index.stop < index.start
    largest = max(sizes.values())
    return Diagnostic(
        "P202",
        f"`{step.name}[{show_index(index)}]` {'is empty' if empty else 'does not exist'}",
        index.span,
        label="ends before it starts" if empty else f"the last one is {largest - 1}",
        notes=tuple(f"`{family}` has 0..{size - 1}" for family, size in sizes.items()),
        help=f"write `{index.stop}..{index.start}`" if empty else "negative numbers count from the end",
    )


def dead_glob(glob: ast.Glob, table: SiteTable) -> Diagnostic:
    """P201 for a pattern, blaming the first segment that matches no module."""
    segments = glob.pattern.split(".")
    names = [module.name for module in table.modules]
    reached, above = 0, [""]
    for count in range(1, len(segments)):
        pattern = glob_pattern(".".join(segments[:count]))
        found = [name for name in names if pattern.fullmatch(name)]
        if not found:
            break
        reached, above = count, found
    children = dict.fromkeys(_child(name, parent) for parent in above for name in names if _child(name, parent))
    text = ".".join(segments[:reached])
    meant = nearest(segments[reached], children)
    return Diagnostic(
        "P201",
        f'`"{glob.pattern}"` matches no module of {table.model_id}',
        _segment_span(glob, segments, reached),
        label=f'no such module under `"{text}"`' if text else "no such module",
        notes=(f"there is {', '.join(f'`{name}`' for name in list(children)[:12])}",) if children else (),
        help=f'did you mean `"{".".join([*segments[:reached], meant, *segments[reached + 1 :]])}"`?' if meant else None,
    )


def _child(name: str, parent: str) -> str:
    if parent and not name.startswith(parent + "."):
        return ""
    return name[len(parent) + bool(parent) :].partition(".")[0]


def _segment_span(glob: ast.Glob, segments: Sequence[str], at: int) -> Span:
    offset = 1 + sum(len(segment) + 1 for segment in segments[:at])
    return _part(glob.span, offset, len(segments[at]))


def name_span(step: ast.Step) -> Span:
    """The word of a step, without its brackets."""
    return _part(step.span, 0, len(step.name))


def _part(span: Span, offset: int, length: int) -> Span:
    start, column = span.start + offset, span.column + offset
    if start + length > span.end:
        return span
    return Span(start, start + length, span.line, column, span.line, column + length)
