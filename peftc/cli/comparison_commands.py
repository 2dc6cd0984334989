"""`diff`, `breaking` and `lock`. They import torch only where no cached table of sites serves."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from peftc.checking.locks import Options, drift_diagnostic, make_lock
from peftc.checking.run import has_plan
from peftc.cli.check.options import find_configuration, targets_of
from peftc.cli.output import report_error, tell
from peftc.cli.plan.planning import plan_of
from peftc.cli.spec_files import Unusable, find_specs, parse_file
from peftc.comparison import breaking_text
from peftc.comparison.breaking import breaking, gone
from peftc.comparison.difference import SpecDifference, difference
from peftc.comparison.findings import BreakingReport, Comparison, OnModel
from peftc.comparison.plan_file import PlanFile, lock_path, plan_file, read_plan_file, write_plan_file
from peftc.comparison.record import PlanRecord, plan_record, spec_record
from peftc.comparison.report import markdown, plain_lines
from peftc.comparison.sides import (
    Side,
    expand_below,
    is_adapter,
    is_folder_of_specs,
    of_plan_file,
    open_side,
    repository,
    revision_of,
    specs_of,
)
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.planner import PlanResult
from peftc.semantics.expand import expand
from peftc.semantics.export_forms import stored_statements
from peftc.semantics.files import read_text
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


def run_diff(args: Namespace) -> int:
    """Prints what differs. Raises: P0xx–P1xx (specs), P2xx–P3xx, P5xx (a model), P851, P852."""
    try:
        old, new = (open_side(name, args.include, parse_file) for name in (args.old, args.new))
    except OSError as error:
        raise Unusable(f"cannot read {error.filename}: {error.strerror}") from None
    options = {"trust_remote_code": args.trust_remote_code, "cache": args.cache}
    result = compare(old, new, args.model, **options)
    if args.format == "json":
        print(result.model_dump_json(indent=2))
    else:
        lines = [markdown(result)] if args.format == "markdown" else plain_lines(result)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if args.exit_code and not result.is_empty else 0


def compare(old: Side, new: Side, model: str | None, **options: bool) -> SpecDifference:
    """The difference of two sides: on a model, or on that of which both have plans."""
    labels, texts = (old.label, new.label), (spec_record(old.spec), spec_record(new.spec))
    if model is not None:
        plans = (_plan_on(old, model, **options), _plan_on(new, model, **options))
        return difference(labels, texts, plans)
    common = [(one, other) for one in old.plans for other in new.plans if one.model.id == other.model.id]
    return difference(labels, texts, common[0] if common else None)


def _plan_on(side: Side, model: str, **options: bool) -> PlanRecord:
    known = next((plan for plan in side.plans if plan.model.id == model), None)
    return known or plan_record(plan_of(side.spec, model, side.tasks or None, **options))


def run_breaking(args: Namespace) -> int:
    """Prints what breaks adapters; exit 1 if anything does, 2 if specs cannot be compared."""
    try:
        report = BreakingReport(comparisons=tuple(_comparisons(args)))
    except OSError as error:
        raise Unusable(f"cannot read {error.filename}: {error.strerror}") from None
    except PeftcError as error:
        report_error(error, args)
        return 2
    if args.format == "json":
        print(report.model_dump_json(indent=2))
    else:
        lines = [breaking_text.markdown(report)] if args.format == "markdown" else breaking_text.plain_lines(report)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if report.is_empty else 1


def _comparisons(args: Namespace) -> Iterator[Comparison]:
    old = args.against
    if (revision := revision_of(old)) is not None:
        with specs_of(revision) as folder:
            yield from _compare_files(args, folder, old, repository())
    elif is_folder_of_specs(old):
        yield from _compare_files(args, Path(old), old.rstrip("/"), None)
    elif len(args.new) > 1 or is_folder_of_specs(args.new[0]):
        raise Unusable("several specs are compared with a folder, or a revision: name one with --against")
    else:
        sides = [open_side(name, args.include, parse_file) for name in (old, args.new[0])]
        yield from _compare_saved(args, *sides)


def _compare_files(args: Namespace, folder: Path, label: str, root: Path | None) -> Iterator[Comparison]:
    """Each spec with that of its path below a folder. A spec that is new there breaks nothing.

    `root`: the folder that corresponds; by default each folder that the command names.
    """
    separator = ":" if root is not None else "/"
    for name in args.new:
        is_folder = is_folder_of_specs(name)
        files = find_files([name])
        base = root or (Path(name) if is_folder else Path(name).parent)
        below = {Path(file).resolve().relative_to(base.resolve()).as_posix(): file for file in files}
        scope = Path(name).resolve().relative_to(base.resolve()) if is_folder else None
        olds = (
            {} if scope is None else {path.relative_to(folder).as_posix() for path in (folder / scope).rglob("*.peft")}
        )
        for path in dict.fromkeys((*below, *sorted(olds))):
            if not (folder / path).is_file() or not has_plan(parse_text(read_text(folder / path), path)):
                continue
            old = Side(f"{label}{separator}{path}", expand_below(folder, f"{label}{separator}", path, args.include))
            if path not in below:
                yield gone(old.label, f"{name}: no {path}")
            elif has_plan(parsed := parse_file(below[path])):
                new = Side(below[path], expand(parsed, include=args.include))
                yield from _compare_saved(args, old, new)


def find_files(paths: Sequence[str]) -> list[str]:
    """The specs of some paths. Raises: Unusable for a path that is wrong."""
    files, errors = find_specs(paths)
    if errors:
        raise Unusable(errors[0].message)
    return files


def saved_spec(side: Side) -> ast.Spec:
    """The expanded spec of what adapters of a side have. Raises: P525, P528, P573."""
    if is_adapter(side.label):
        path = Path(side.label)
        adapter = import_module("peftc.adapters.files").read_description(path)
        return import_module("peftc.adapters.loading").expanded_spec(adapter, path)
    return stored_statements(side.spec)


def _compare_saved(args: Namespace, old: Side, new: Side) -> Iterator[Comparison]:
    """Compares what two specs save, on each model that is named or planned."""
    labels, specs = (old.label, new.label), (saved_spec(old), saved_spec(new))
    models = [args.model] if args.model else [plan.model.id for plan in (old.plans or new.plans)]
    for model in models or [None]:
        on_model = None
        if model is not None:
            plan = partial(_plan_of_tasks, args, model, old.tasks)
            before, after = map(plan, specs)
            failed = plan(new.spec).failed_expectations if _has_expectations(new.spec) else ()
            sizes = import_module("peftc.adapters.expected_tensors").expected_sizes
            on_model = (OnModel(before, sizes(before)), OnModel(after, sizes(after), failed))
        yield breaking(labels, specs, on_model)


def _has_expectations(spec: ast.Spec) -> bool:
    return any(isinstance(statement, ast.Expect) for statement in spec.statements)


def _plan_of_tasks(args: Namespace, model: str, tasks: tuple[str, ...], spec: ast.Spec) -> PlanResult:
    names = (args.tasks or tasks or None) if spec.per_task else None
    return plan_of(spec, model, names, trust_remote_code=args.trust_remote_code, cache=args.cache)


def run_lock(args: Namespace) -> int:
    """Writes `SPEC.lock.json` for each spec, all or none. Raises: as `run_plan`; P130-P132."""
    if "-" in args.paths:
        raise Unusable("a lock stands beside its spec: name a file")
    configuration = find_configuration(args)
    targets_of_path, include = targets_of(args), args.include
    if configuration is not None:
        targets_of_path = targets_of_path if args.model else configuration.targets
        include = [*include, *configuration.include]
    files, missing = find_specs(args.paths, lambda path: configuration is None or not configuration.excludes(path))
    if missing:
        raise Unusable(missing[0].message)
    options = Options(args.trust_remote_code, args.cache)
    locks: dict[Path, PlanFile] = {}
    for path in files:
        spec = parse_file(path)
        targets = targets_of_path(path)
        if targets and has_plan(spec):
            locks[lock_path(path)] = make_lock(expand(spec, {}, include), path, targets, options)
        elif not targets:
            print(f"{path} is for no model: name one with --model, or in the configuration", file=sys.stderr)
    for target, content in locks.items():
        _write(target, content)
        tell(args, f"wrote {target}: {', '.join(plan.model.id for plan in content.plans)}", sys.stdout)
    return 0 if locks else 1


def write_plan(target: str, spec: str, flat: ast.Spec, result: PlanResult, tasks: Sequence[str] | None) -> None:
    """Writes what `compile --plan` reads. Raises: Unusable."""
    _write(Path(target), plan_file(spec, flat, [plan_record(result)], tasks or ()))


def _write(target: Path, content: PlanFile) -> None:
    try:
        write_plan_file(target, content)
    except OSError as error:
        raise Unusable(f"cannot write {target}: {error.strerror}") from None


def planned_side(path: str) -> tuple[PlanFile, Side]:
    """A file of one plan. Raises: P851; Unusable."""
    try:
        file = read_plan_file(Path(path))
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from None
    if len(file.plans) != 1:
        message = f"{path} has plans for {len(file.plans)} models"
        raise PeftcError(Diagnostic("P851", message, help="write one for a single model, by `peftc plan -o`"))
    return file, of_plan_file(path, file)


def require_equal(old: Side, result: PlanResult, spec: ast.Spec) -> None:
    """Raises: P850 if the plan is another now."""
    plans = (old.plans[0], plan_record(result))
    drift = difference((old.label, "now"), (spec_record(old.spec), spec_record(spec)), plans)
    if not drift.is_empty:
        raise PeftcError(drift_diagnostic(drift))
