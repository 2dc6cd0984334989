"""`sites` and `plan`. They import torch only where no cached table of sites serves."""

import json
import sys
from argparse import Namespace
from importlib import import_module

from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.cli.console import report, show
from peftc.cli.spec_files import parse_file
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.planner import PlanResult
from peftc.planning.report.plan import render_plan
from peftc.planning.report.site_tree import render_sites
from peftc.planning.report.sites_json import sites_data
from peftc.planning.selection.selector_errors import reason_lines
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax import ast


def run_sites(args: Namespace) -> int:
    """Prints the sites of a model. Raises: P2xx, P5xx (the model)."""
    options = {"trust_remote_code": args.trust_remote_code}
    table = _cached(args) or import_module("peftc.compiler").sites(args.model, cache=args.cache, **options)
    if args.json:
        print(json.dumps(sites_data(table), indent=2, ensure_ascii=False))
        return 0
    show(lambda width: render_sites(table, width))
    untraced = (f"cannot be traced: {line}" for line in reason_lines(table.untraced))
    unplaced = (f"has weights without a role: {line}" for line in reason_lines(table.unplaced))
    for warning in (*table.warnings, *untraced, *unplaced):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_plan(args: Namespace) -> int:
    """Prints the plan; exit 1 if an expectation fails, or for warnings with `--strict`. Raises:
    P0xx–P3xx (the spec), P5xx.
    """
    flat = expand(parse_file(args.spec), parse_settings(args.set), args.include)
    result = _plan(flat, args)
    records_only = bool(result.failed_expectations) and args.output_format == "json" and not args.json
    if args.json:
        print(result.plan.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_plan(result.plan, result.site_edits.representatives), args)
    report((*result.failed_expectations, *result.warnings), args, to_stdout=records_only)
    return 1 if result.failed_expectations or (args.strict and result.warnings) else 0


def _plan(flat: ast.Spec, args: Namespace) -> PlanResult:
    # Names of tasks are checked by torch's rules for names of modules.
    if args.tasks is None and (table := _cached(args)) is not None:
        result = plan_on_table(table, flat)
        if not needs_graphs(result.site_edits):
            return result
    options = {"tasks": args.tasks, "trust_remote_code": args.trust_remote_code}
    return import_module("peftc.compiler").plan_edits(flat, args.model, cache=args.cache, **options)


def _cached(args: Namespace) -> SiteTable | None:
    return cached_table(args.model, args.trust_remote_code) if args.cache else None
