"""`diff` and `lock`. They import torch only where no cached table of sites serves."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from peftc.cli.console import report
from peftc.cli.planning import plan_of
from peftc.cli.spec_files import Unusable, parse_file
from peftc.comparison.difference import SpecDifference, difference
from peftc.comparison.plan_file import PlanFile, lock_path, plan_file, read_plan_file, write_plan_file
from peftc.comparison.record import PlanRecord, plan_record, spec_record
from peftc.comparison.report import edit_lines, markdown, plain_lines
from peftc.comparison.sides import Side, of_plan_file, open_side
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.planner import PlanResult
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax import ast


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


def run_lock(args: Namespace) -> int:
    """Writes `SPEC.lock.json`. Raises: as `run_plan`."""
    if args.spec == "-":
        raise Unusable("a lock stands beside its spec: name a file")
    flat = expand(parse_file(args.spec), parse_settings(args.set), args.include)
    options = {"trust_remote_code": args.trust_remote_code, "cache": args.cache}
    results = [plan_of(flat, model, args.tasks, **options) for model in args.model]
    failed = [diagnostic for result in results for diagnostic in result.failed_expectations]
    report((*failed, *(warning for result in results for warning in result.warnings)), args)
    if failed:
        return 1
    target = lock_path(args.spec)
    _write(target, plan_file(args.spec, flat, map(plan_record, results), args.tasks or ()))
    print(f"wrote {target}: {', '.join(args.model)}")
    return 0


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
        raise PeftcError(drift_diagnostic(old.label, drift))


def drift_diagnostic(label: str, drift: SpecDifference) -> Diagnostic:
    """A difference as one diagnostic: a note for each line."""
    lines = [line for edit in drift.edits for line in edit_lines(edit)]
    lines += [line for line in list(plain_lines(drift))[2:] if line and not drift.edits]
    message = f"the plan on {drift.model} is another than that in {label}"
    return Diagnostic("P850", message, notes=tuple(lines), help="look at what changed, and write the file again")
