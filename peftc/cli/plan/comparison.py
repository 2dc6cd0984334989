"""`plan` of several specs, or on several models: one table, methods × models."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from peftc.checking.models import ModelPlans
from peftc.checking.run import has_plan, merge_models
from peftc.checking.suppressions import unsuppressed
from peftc.cli.console import is_report, show
from peftc.cli.output import write_report
from peftc.cli.plan.comparison_table import Cell, render_comparison
from peftc.cli.spec_files import display_path, parse_file, spec_files
from peftc.diagnostics import PeftcError
from peftc.diagnostics.formats.records import record
from peftc.diagnostics.formats.report import Case, Report
from peftc.diagnostics.render import FOR_PEOPLE
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax import ast

FORMAT = "1.0"


class Comparison(NamedTuple):
    """Plans of all specs on all models: a row for each spec, with a cell for each model."""

    specs: tuple[str, ...]
    models: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def cases(self) -> list[Case]:
        pairs = zip(self.specs, self.rows, strict=True)
        return [
            Case(spec, model, cell.diagnostics)
            for spec, row in pairs
            for model, cell in zip(self.models, row, strict=True)
        ]


def compare_plans(args: Namespace, models: Sequence[str]) -> int:
    """Prints the counts of all plans, and what is wrong with those that there are not."""
    comparison = plan_all(args, models)
    if args.json:
        print(json.dumps(data_of(comparison), indent=2, ensure_ascii=False))
    else:
        show(lambda width: render_comparison(comparison.specs, comparison.models, comparison.rows, width), args)
    report = Report(tuple(merge_models(comparison.cases)), tuple(comparison.cases), strict=args.strict)
    if report.diagnostics or is_report(args):
        stream = sys.stdout if is_report(args) else sys.stderr
        if stream is sys.stderr and args.output_format in FOR_PEOPLE:
            stream.write("\n")
        write_report(report, args.output_format, stream)
    return int(any(map(report.fails, report.diagnostics)))


def plan_all(args: Namespace, models: Sequence[str]) -> Comparison:
    """Each spec on each model. Raises: Unusable for paths that are not there; P110."""
    settings = parse_settings(args.set)
    specs = list(_specs(args, settings))
    plans = [ModelPlans(model, args.trust_remote_code, args.cache) for model in models]
    rows = [tuple(_cell(spec, one, args.tasks) for one in plans) for _, spec in specs]
    return Comparison(tuple(display_path(path) for path, _ in specs), tuple(models), tuple(rows))


def _specs(args: Namespace, settings: Mapping[str, ast.Expr]) -> Iterator[tuple[str, ast.Spec | PeftcError]]:
    """The expanded specs by path, or what is wrong with them. Files of a folder may have none."""
    for path in spec_files(args.specs):
        try:
            spec = parse_file(path)
            if path in args.specs or has_plan(spec):
                yield path, expand(spec, settings, args.include)
        except PeftcError as error:
            yield path, error


def _cell(spec: ast.Spec | PeftcError, plans: ModelPlans, tasks: Sequence[str] | None) -> Cell:
    if isinstance(spec, PeftcError):
        return Cell(None, spec.diagnostics)
    try:
        result = plans.plan(spec, tuple(tasks) if tasks is not None and spec.per_task else None)
    except PeftcError as error:
        return Cell(None, error.diagnostics)
    return Cell(result.plan, (*result.failed_expectations, *unsuppressed(result.warnings)))


def data_of(comparison: Comparison) -> dict[str, Any]:
    """The data that `peftc plan --json` prints for several plans."""
    plans = [
        {
            "spec": spec,
            "model": model,
            "plan": None if cell.plan is None else cell.plan.model_dump(mode="json"),
            "diagnostics": list(map(record, cell.diagnostics)),
        }
        for spec, row in zip(comparison.specs, comparison.rows, strict=True)
        for model, cell in zip(comparison.models, row, strict=True)
    ]
    return {"format_version": FORMAT, "specs": comparison.specs, "models": comparison.models, "plans": plans}
