"""Errors of selectors that match nothing, or that name what an untraced module may contain."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from peftc.addressing.paths import BRANCHES, SitePaths, StepList, compress_paths, glob_pattern, stack_steps
from peftc.addressing.selection import Selection
from peftc.addressing.sites import SiteTable, Steps, UnplacedModule, UntracedModule
from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import first_names, join_names, nearest, plural
from peftc.syntax import ast
from peftc.syntax.printer import print_index, print_selector, print_step
from peftc.syntax.vocabulary import STACK_CHOICE_HELP
from peftc.syntax.walk import above_modules, selects_stack, spell_out

MAX_NAMES = 8  # in a note
MAX_SUGGESTIONS = 12

NamesBelow = Mapping[str, tuple[int, tuple[str, ...]]]  # name -> (how many, the steps that lead to it)
UntracedModules = tuple[UntracedModule, ...]


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
        if below and stack_steps([step.name for step in steps]) < len(steps) - 1:  # `experts`
            help_ += f"; for one of these, `{text}.{next(iter(below))}`"
    unplaced = _without_role(steps, paths.table)
    if unplaced and help_ is None:
        glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", unplaced[0].module)
        help_ = f'name the module by a pattern in quotes, such as `"{glob}"`'
    help_ = help_ or _suggestion(step, steps[:matched], below) or _of_modules(paths.table)
    message = f"`{print_selector(path)}` matches nothing in {paths.table.model_id}"
    label = f"no such site under `{text}`" if text else "no such site"
    if matched == len(steps):
        label = "names what is below it, and is no site itself"
    notes = (*_notes(text, below, paths.stacks), *reason_lines(unplaced))
    return Diagnostic("P201", message, name_span(step), label=label, notes=notes, help=help_)


def _without_role(steps: Sequence[ast.Step], table: SiteTable) -> list[UnplacedModule]:
    """The modules whose role is not known, and may be that which a path ends with."""
    names = [step.name for step in steps]
    below = names[names.index("layer") + 1 :] if "layer" in names else []
    role = ".".join(name for name in below if name not in BRANCHES)
    return [module for module in table.unplaced if role in module.roles]


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
        counts = branches or direct
        shown = [f"`{name}` ({plural(count, 'site')})" for name, count in counts[:MAX_NAMES]]
        shown += [f"{len(counts) - MAX_NAMES} more"] if len(counts) > MAX_NAMES else []
        names = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
        yield f"{f'`{text}`' if text else 'the model'} has {names}"
    if text and not below:
        yield f"there are no sites below `{text}`"
    if not text and set(stacks) - {"encoder", "decoder"}:
        yield f"its stacks are {join_names(stacks)}"


def _suggestion(step: ast.Step, before: Sequence[ast.Step], below: NamesBelow) -> str | None:
    name = step.name if step.name in below else nearest(step.name, below)
    if name is None:
        return f"names that can stand here: {_join(below)}" if below else None
    way = below[name][1]
    if not way:
        return f"did you mean `{name}`?"
    steps = [*map(print_step, before), *(f"{word}[*]" if word == "layer" else word for word in way)]
    return f"did you mean `{'.'.join([*steps, print_step(replace(step, name=name))])}`?"


def _of_modules(table: SiteTable) -> str | None:
    """How the modules of a model without layers are named."""
    names = [module.name for module in table.modules if module.name and module.called and len(module.parameters) > 0]
    if not names:
        return None
    return f'name modules: `**.linear` is every Linear, and a pattern in quotes, such as `"{names[0]}"`, some of them'


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
    label, help_ = f"the last one is {max(sizes.values()) - 1}", "`*` is all, `-1` the last one"
    return Diagnostic("P202", f"{text} does not exist", index.span, label=label, notes=notes, help=help_)


def every_arm_optional(selector: ast.Selector, table: SiteTable) -> Diagnostic:
    """P201 for a selector whose arms all end in `?`, where none matches."""
    message = f"`{print_selector(selector)}` matches nothing in {table.model_id}"
    help_ = "an arm with `?` stands beside others: `layer[*].ffn.up | layer[*].ffn.gate?`"
    return Diagnostic("P201", message, selector.span, label="a statement needs a site", help=help_)


def no_linear(path: ast.Path, table: SiteTable) -> Diagnostic:
    """P201 for `**.linear` where there is no Linear below."""
    message = f"`{print_selector(path)}` matches nothing in {table.model_id}"
    label, help_ = "no Linear is below", "`**` is all modules"
    return Diagnostic("P201", message, name_span(path.steps[-1]), label=label, help=help_)


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
    inside = [(n, parent) for parent in parents for n in names if not parent or n.startswith(f"{parent}.")]
    below = (n[len(parent) + bool(parent) :].partition(".")[0] for n, parent in inside)
    children = dict.fromkeys(filter(None, below))
    text = ".".join(segments[:count])
    name = nearest(segments[count], children)
    span = _subspan(glob.span, 1 + sum(len(segment) + 1 for segment in segments[:count]), len(segments[count]))
    message = f'`"{glob.pattern}"` matches no module of {table.model_id}'
    label = f'no such module under `"{text}"`' if text else "no such module"
    notes = (f"there is {_join(children)}",) if children else ()
    corrected = ".".join([*segments[:count], name, *segments[count + 1 :]]) if name else None
    wider = f"**.{glob.pattern.removeprefix('*.')}", re.sub(r"(?<!\*)\*(?!\*)", "**", glob.pattern)
    anywhere = next((one for one in wider if any(map(glob_pattern(one).fullmatch, names))), None)
    if anywhere is not None:
        corrected = anywhere
        notes = (*notes, "`*` is within one part of a name, `**` is any parts") if "*" in glob.pattern else notes
    help_ = "`layer[*].attn.q` is in any model; `peftc sites` prints the names of this one"
    if corrected:
        help_ = f'did you mean `"{corrected}"`?'
    if (other := _other_notation(glob.pattern, names)) is not None:
        notes, help_ = (), other
    return Diagnostic("P201", message, span, label=label, notes=notes, help=help_)


def _other_notation(pattern: str, names: Sequence[str]) -> str | None:
    """What to write for a pattern in the notation of shells or of regular expressions."""
    choice = re.search(r"\{([^{}]*)\}|\(([^()]*)\)", pattern)
    if choice is not None:
        words = [word.strip() for word in re.split(r"[,|]", choice[1] or choice[2] or "")]
        ends = pattern[: choice.start()], pattern[choice.end() :]
        if all(len(word) == 1 for word in words):
            return f'one of some characters is written in brackets: `"{ends[0]}[{"".join(words)}]{ends[1]}"`'
        arms = " | ".join(f'"{ends[0]}{word}{ends[1]}"' for word in words)
        return f"a pattern has no alternatives; selectors are joined by `|`: `{arms}`"
    if "|" in pattern:
        arms = " | ".join(f'"{word.strip()}"' for word in pattern.split("|"))
        return f"selectors are joined by `|`, patterns are not: `{arms}`"
    if pattern.count("[") != pattern.count("]"):
        return "a bracket is closed: `[qv]_proj` is `q_proj` or `v_proj`"
    if re.search(r"^\^|\$$|\\|\+|^\.", pattern) is None:
        return None
    plain = re.sub(r"^\^|\$$", "", pattern).replace("\\.", "\0")
    plain = re.sub(r"\.[*+]", "**", plain)
    plain = re.sub(r"\\d\+?|\[0-9\]\+", "*", plain).replace("\0", ".")
    matches = any(map(glob_pattern(plain).fullmatch, names))
    return "a pattern is no regular expression" + (f': write `"{plain}"`' if matches else "")


def name_span(step: ast.Step) -> Span:
    return _subspan(step.span, 0, len(step.name))


def _subspan(span: Span, offset: int, length: int) -> Span:
    start, column = span.start + offset, span.column + offset
    if start + length > span.end:
        return span
    return Span(start, start + length, span.line, column, span.line, column + length)


def untraced_errors(selector: ast.Selector, paths: SitePaths) -> list[Diagnostic]:
    """P214, one for each arm that names what untraced modules may contain."""
    arms = [(arm, is_positive, _candidates(arm, paths)) for arm, is_positive in signed_arms(selector)]
    excluded = {module for _, is_positive, modules in arms if not is_positive for module in modules}
    named = [(arm, tuple(m for m in ms if m not in excluded)) for arm, is_positive, ms in arms if is_positive]
    return [_error(arm, modules, paths) for arm, modules in named if modules]


def signed_arms(selector: ast.Selector) -> Iterator[tuple[ast.Path, bool]]:
    """The paths of a selector; False for those that a difference removes."""
    match selector:
        case ast.Path():
            yield selector, True
        case ast.BracedPath():
            yield from signed_arms(spell_out(selector))
        case ast.Union(arms):
            for arm in arms:
                yield from signed_arms(arm)
        case ast.Difference(left, right):
            yield from signed_arms(left)
            yield from ((path, False) for path, is_positive in signed_arms(right) if is_positive)
        case ast.Glob():
            pass


def _candidates(path: ast.Path, paths: SitePaths) -> UntracedModules:
    """The untraced modules that may contain some of what a path names."""
    names = [step.name for i, step in enumerate(path.steps) if not selects_stack(path.steps, i)]
    if "layer" not in names or above_modules(path.steps) is not None or not paths.table.untraced:
        return ()
    layer = names.index("layer")
    stack, below = names[:layer], names[layer + 1 :]
    steps = path.steps[: len(path.steps) - len(below)]
    layers = {match.site.steps for match in paths.matches(steps) if paths.has_indices(match, steps)}

    def may_contain(module: UntracedModule) -> bool:
        if "layer" in module.roles:  # a whole layer: does the path name its stack?
            words = iter(name for name, _ in module.steps)
            return all(name in words for name in stack)
        if module.steps not in layers or not below or below[0] not in module.roles:
            return False
        # a path that names `self` or `cross` means a traced one, if the module's layer has it
        prefix = (*module.steps, *((name, None) for name in below[:2]))
        is_branch = len(below) > 1 and below[1] in BRANCHES
        return not (is_branch and any(site.steps[: len(prefix)] == prefix for site in paths.table.sites))

    return tuple(filter(may_contain, paths.table.untraced))


def _error(arm: ast.Path, modules: UntracedModules, paths: SitePaths) -> Diagnostic:
    names = [step.name for step in arm.steps]
    layer = names.index("layer")
    step = arm.steps[min(layer + 1, len(arm.steps) - 1)]
    pattern = compress_paths([module.module for module in modules])[0][0]
    glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", modules[0].module)
    traced = [f"`attn.{branch}`" for branch in _traced_branches(names[layer + 1 :], modules, paths)]
    message = f"`{print_selector(arm)}` may name sites in `{pattern}`, which cannot be traced"
    help_ = f'name its modules by a pattern in quotes, such as `"{glob}.**"`'
    help_ += f", or write {' or '.join(traced)} for what is traced" if traced else ""
    label, notes = f"some `{step.name}` may be left out", (*reason_lines(modules), *_traced_layers(modules, paths))
    return Diagnostic("P214", message, name_span(step), label=label, notes=notes, help=help_)


def _traced_layers(modules: UntracedModules, paths: SitePaths) -> list[str]:
    """A note of the layers that have none of these modules, by their names in the model."""
    hidden = {module.steps for module in modules}
    layers = [s.module for s in paths.table.sites if s.steps[-1][0] == "layer" and s.steps not in hidden]
    return [f"traced whole: {first_names([path for path, _ in compress_paths(layers)])}"] if layers else []


def _traced_branches(below: Sequence[str], modules: UntracedModules, paths: SitePaths) -> list[str]:
    """Those of `self` and `cross` that the layers have, if a path does not say which it means."""
    if below[:1] != ["attn"] or BRANCHES.intersection(below):
        return []
    layers = {module.steps for module in modules}
    sites = [site.steps for site in paths.table.sites if len(site.steps) > 2]
    attentions = [steps for steps in sites if steps[:-2] in layers]
    branches = (steps[-1][0] for steps in attentions if steps[-2][0] == "attn")
    return list(dict.fromkeys(name for name in branches if name in BRANCHES))


def reason_lines(modules: Iterable[UntracedModule | UnplacedModule]) -> list[str]:
    """Each module with its reason; names that differ in a number, in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        groups.setdefault((module.type, module.reason), []).append(module.module)
    return [
        f"`{pattern}` ({type_}): {reason}"
        for (type_, reason), names in groups.items()
        for pattern, _ in compress_paths(names)
    ]


def untraced_in_layers(selection: Selection, table: SiteTable) -> UntracedModules:
    layers = selection.layers() if table.untraced else set[Steps]()
    return tuple(module for module in table.untraced if module.steps in layers)


def untraced_warning(selector: ast.Selector, modules: Sequence[UntracedModule]) -> Diagnostic:
    """P215 for untraced modules in the layers of a selector that names nothing in them."""
    message = f"{plural(len(modules), 'module')} of these layers cannot be traced"
    label = f"there are no sites in {'them' if len(modules) > 1 else 'it'}"
    notes = tuple(reason_lines(modules))
    return Diagnostic("P215", message, selector.span, label=label, notes=notes, severity="warning")
