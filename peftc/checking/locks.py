"""Locks: what specs do to the models that they are for, as it was when it was last looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peftc.checking.models import plan_target
from peftc.checking.targets import Target
from peftc.comparison.difference import SpecDifference, difference
from peftc.comparison.plan_file import PlanFile, lock_path, plan_file, read_plan_file
from peftc.comparison.record import plan_record, spec_record
from peftc.comparison.report import edit_lines, plain_lines
from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.syntax import ast


class Options(NamedTuple):
    """As in `peftc.plan`."""

    trust_remote_code: bool = False
    cache: bool = True


def make_lock(flat: ast.Spec, path: str, targets: Sequence[Target], options: Options) -> PlanFile:
    """The lock of an expanded spec.

    Raises: as a plan; P853 for models with different tasks, and what expectations say that fail.
    """
    results = [plan_target(flat, target, *options) for target in targets]
    if failed := [diagnostic for result in results for diagnostic in result.failed_expectations]:
        raise PeftcError(failed)
    tasks = {target.tasks or () for target in targets}
    if len(tasks) > 1:  # a lock has the tasks of one
        message = f"the models of {path} have different tasks"
        raise PeftcError(Diagnostic("P853", message, source=Source(path, ""), help="give them the same tasks"))
    return plan_file(path, flat, map(plan_record, results), *tasks)


def check_lock(flat: ast.Spec, path: str, targets: Sequence[Target], options: Options) -> list[Diagnostic]:
    """What differs from the lock beside the spec: P850, P851; P853 for what is not locked."""
    target_file, source = lock_path(path), Source(path, "")
    try:
        lock = read_plan_file(target_file)
    except FileNotFoundError:
        return [Diagnostic("P853", f"{path} has no lock {target_file}", source=source, help=_HELP)] if targets else []
    except OSError as error:
        return [Diagnostic("P851", f"cannot read {target_file}: {error.strerror}", source=source)]
    except PeftcError as error:
        return list(error.diagnostics)
    locked = {plan.model.id for plan in lock.plans}
    missing = [target.model for target in targets if target.model not in locked]
    errors = [
        Diagnostic("P853", f"{target_file} has no plan on {model}", source=source, help=_HELP) for model in missing
    ]
    tasks = {target.model: target.tasks for target in targets}
    for plan in lock.plans:
        target = Target(plan.model.id, tasks.get(plan.model.id, lock.tasks or None))
        try:
            now = plan_record(plan_target(flat, target, *options))
        except PeftcError as error:
            errors += error.diagnostics
            continue
        texts = (spec_record(lock.parsed()), spec_record(flat))
        drift = difference((str(target_file), path), texts, (plan, now))
        if not drift.is_empty:
            errors.append(drift_diagnostic(drift, source))
    return errors


_HELP = "write it by `peftc lock`, and commit it"


def drift_diagnostic(drift: SpecDifference, source: Source | None = None) -> Diagnostic:
    """A difference as one diagnostic: a note for each line."""
    lines = [line for edit in drift.edits for line in edit_lines(edit)]
    lines = lines or [line for line in list(plain_lines(drift))[2:] if line]
    message = f"the plan on {drift.model} is another than that in {drift.old}"
    help_ = "look at what changed, and write the file again"
    return Diagnostic("P850", message, source=source, notes=tuple(lines), help=help_)
