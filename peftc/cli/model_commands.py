"""The commands that change a model: `compile` and `verify`. They import torch."""

import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from torch import nn

from peftc.checking.suppressions import unsuppressed
from peftc.cli.comparison_commands import planned_side, require_equal
from peftc.cli.console import is_report, prose, report, show
from peftc.cli.output import tell
from peftc.cli.spec_files import Unusable, parse_file
from peftc.comparison.sides import Side
from peftc.compiler import compile
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_mode
from peftc.filesystem.atomic import write_folder
from peftc.filesystem.bounded_read import printable_path
from peftc.forms.module import checked_seed
from peftc.installation.compiled_model import CompiledModel, analyse_base, plan_on
from peftc.installation.record import InstalledSpec, installation_of
from peftc.installation.spec_names import require_tasks, task_names
from peftc.models.sources import load_model, load_or_initialize, resolve
from peftc.observation.own_source import own_source
from peftc.planning.planner import PlanResult
from peftc.planning.report.plan import percent, render_plan
from peftc.recognition.analysis import Analysis
from peftc.runtime import respecialize
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import default_name, parse_settings
from peftc.specialization.generated_class import GeneratedClass
from peftc.specialization.variants import captions
from peftc.standalone import save_standalone
from peftc.syntax import ast
from peftc.verification.report import render_verification
from peftc.verification.verify import duplicate, verify


def run_compile(args: Namespace) -> int:
    """Compiles onto a skeleton, without weights. Raises: as `run_plan`; P304, P4xx, P850."""
    if args.plan is not None:
        return run_planned(args)
    if args.spec is None or args.model is None:
        raise Unusable("name a SPEC and a --model, or a --plan")
    spec = parse_file(args.spec)
    if args.standalone:
        return run_standalone(args, spec)
    flat = expand(spec, parse_settings(args.set), args.include)
    return write_compiled(args, flat, default_name(spec))


def run_planned(args: Namespace) -> int:
    """Compiles the plan of a file, if it is the same now. Raises: P850, P851."""
    if args.spec is not None or args.model is not None or args.set or args.tasks or args.standalone:
        raise Unusable("a --plan has its spec, model, settings and tasks: name none of them, nor --standalone")
    file, side = planned_side(args.plan)
    args.model, args.tasks = file.plans[0].model.id, file.tasks or None
    return write_compiled(args, side.spec, default_name(file.path), side)


def write_compiled(args: Namespace, flat: ast.Spec, name: str, side: Side | None = None) -> int:
    """Compiles an expanded spec, and writes the files. `side`: with the plan that it must have."""
    analysis = analyse_base(args.model, trust_remote_code=args.trust_remote_code)
    result, files = compile_skeleton(flat, name, analysis, args.seed, args.tasks)
    if side is not None:
        require_equal(side, result, flat)
    show(lambda _: render_plan(result.plan, result.site_edits.representatives), args)
    warnings = unsuppressed(result.warnings)
    fails = args.strict and warnings
    if fails or not is_report(args):
        report(warnings, args)
    if not fails:
        write(files, args)
        if is_report(args):  # after what may still be refused: stdout is one report
            report(warnings, args)
    return int(bool(fails))


def write(files: dict[str, str], args: Namespace) -> None:
    """Writes the generated files, if there is a folder for them. Raises: P420, P55x."""
    stream = prose(args)
    if args.output is None:
        tell(args, "\nnothing was written: name a folder with -o", stream)
        return
    changes = write_folder(Path(args.output), files, args.force)
    tell(args, f"\nwrote {', '.join(changes.written)} to {changes.folder}", stream)
    if changes.removed:
        tell(args, f"removed {', '.join(changes.removed)}, of an earlier run", stream)
    if changes.modified:
        changed = ", ".join(changes.modified)
        tell(args, f"did not remove {changed}: written by an earlier run, and changed since", stream)


def run_standalone(args: Namespace, spec: ast.Spec) -> int:
    """Compiles onto a model with weights, and saves it. Raises: P505, P545, P570."""
    if args.output is None:
        raise PeftcError(Diagnostic("P545", "`--standalone` writes a model", help="name its folder with -o"))
    model = load_model(resolve(args.model, args.trust_remote_code))
    compile(spec, model, args.seed, settings=parse_settings(args.set), include=args.include, tasks=args.tasks)
    show(lambda _: render_plan(installation_of(model).planned.plan), args)
    folder = save_standalone(model, args.output)
    report((), args)
    tell(args, f"\nwrote a model that loads without peftc to {folder}", prose(args))
    return 0


def run_verify(args: Namespace) -> int:
    """Compiles and verifies; exit 1 on findings. Raises: as `run_compile`; P505, P507, P601."""
    spec = parse_file(args.spec)
    model, weights = load_or_initialize(resolve(args.model, args.trust_remote_code), args.seed)
    base = duplicate(model)
    compile(spec, model, args.seed, settings=parse_settings(args.set), include=args.include, tasks=args.tasks)
    result = verify(model, sites=args.sites, base=base, weights=weights)
    records_only = not result.ok and args.output_format == "json" and not args.json
    if args.json:
        print(result.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_verification(result))
    if records_only or (args.json and not result.ok):
        report(result.diagnostics, args, to_stdout=records_only)
    return 0 if result.ok else 1


# What `peftc compile -o DIR` writes: generated forwards, their diffs, plan, spec and README

PLAN, SPEC, README = "plan.json", "spec.peft", "README.md"


def compile_skeleton(
    flat: ast.Spec, name: str, analysis: Analysis, seed: int | None, tasks: Sequence[str] | None
) -> tuple[PlanResult, dict[str, str]]:
    """Compiles without weights: the plan, and each file by its name. Raises: as `peftc.compile`."""
    names = task_names(tasks)
    result = plan_on(analysis, flat, names)
    require_tasks(tasks, result)
    if result.failed_expectations:
        raise PeftcError(result.failed_expectations)
    skeleton = analysis.structure.model
    with fake_mode(skeleton):
        installed = InstalledSpec(name, flat, result.deferred_plan, 0 if seed is None else checked_seed(seed))
        CompiledModel(skeleton, analysis=analysis).add(installed, result, tasks=names)
    files = {PLAN: result.plan.model_dump_json(indent=2) + "\n", SPEC: installed.text, README: readme(installed, names)}
    return result, files | forwards(skeleton)


def forwards(model: nn.Module) -> dict[str, str]:
    """The generated code and its diff from the model's code, for each kind of region."""
    groups: dict[int, tuple[GeneratedClass, list[str]]] = {}
    for name, kind in installation_of(model).regions:
        groups.setdefault(id(kind), (kind, []))[1].append(name)
    files: dict[str, str] = {}
    for kind, modules in groups.values():
        base = "forward_" + snake_case(kind.name)
        stems = (base if n == 1 else f"{base}_{n}" for n in count(1))
        stem = next(stem for stem in stems if f"{stem}.py" not in files)
        files[f"{stem}.py"] = forward_file(kind, modules)
        if difference := forward_diff(kind, f"{stem}.py"):
            files[f"{stem}.diff"] = difference
    return files


def snake_case(name: str) -> str:
    """A class's name as part of a file name, safe for any file system."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()[:100]


def forward_file(kind: GeneratedClass, modules: list[str]) -> str:
    edits = dict.fromkeys(f"{e.edit} at {e.slug.replace('_', '.')}" for e in kind.edits)
    listed = modules if len(modules) <= 6 else [*modules[:3], f"… ({len(modules)} in all)", modules[-1]]
    lines = [f"{kind.name}, as rewritten by peftc.", "", "Edits: " + ", ".join(edits) + ".", "Modules:"]
    lines += [f"    {m}" for m in listed]
    lines += ["", "For reading: `peftc.compile` generates this code again from the spec.", ""]
    escaped = (line.replace("\\", r"\\").replace('"', r"\"") for line in lines)  # none ends the docstring, or its line
    docstring = '"""' + "\n".join(map(printable_path, escaped)) + '"""'
    if kind.inline:
        kind.names.of(respecialize)
    return "\n".join([docstring, "", *kind.names.lines(), "", "", kind.source, ""])


def forward_diff(kind: GeneratedClass, file: str) -> str:
    """A unified diff from the model's own forward to each variant; empty without its source."""
    own, before = own_source(kind.base).lines, own_source(kind.base).name
    if not own:
        return ""
    lines: list[str] = []
    for caption, variant in zip(captions(kind.variants), kind.variants, strict=True):
        after = f"{file} {variant.name} ({caption})"
        lines += difflib.unified_diff(own, variant.source.splitlines(), before, after, lineterm="", n=len(own))
    return "\n".join(map(printable_path, lines)) + "\n"


def readme(installed: InstalledSpec, tasks: Sequence[str]) -> str:
    plan = installed.plan
    total, base = plan.totals, plan.totals.base
    rows = [
        f"| {e.name} | {len(e.sites)} | {e.trained:,} | {e.stored:,} | {'yes' if e.foldable else 'no'} | {e.reason} |"
        for e in plan.edits
    ]
    edits = f"{len(plan.edits)} edit{'s' * (len(plan.edits) != 1)}"
    return f"""# {Path(plan.spec.path).stem} on {plan.model.id}

{edits} of {plan.model.id} ({plan.model.type}, {base:,} parameters), compiled by
peftc. Trained: {total.trained:,} parameters ({percent(total.trained, base)} of the base). Stored:
{total.stored:,}.

| edit | sites | trained | stored | folds | why |
|---|---|---|---|---|---|
{chr(10).join(rows)}

    import peftc
    peftc.compile("{SPEC}", model, seed={installed.seed}{f", tasks={list(tasks)}" if tasks else ""})

* `{SPEC}`: the expanded spec, with every default written out.
* `{PLAN}`: the plan, with every site.
* `forward_*.py`: the generated forwards, one file for each kind of region. Each edit stands under its equation.
* `forward_*.diff`: what they change, as a diff against the model's own forward.
"""
