"""`sites` and `plan`. They import torch only where no cached table of sites serves."""

import json
import os
import sys
from argparse import Namespace
from importlib import import_module

from peftc.checking.suppressions import unsuppressed
from peftc.cli.console import report, show
from peftc.cli.plan.planning import plan_of, selector_of, table_of
from peftc.cli.spec_files import Unusable, parse_file
from peftc.planning.report.plan import render_plan
from peftc.planning.report.site_selection import render_selection
from peftc.planning.report.site_tree import render_sites
from peftc.planning.report.sites_json import sites_data
from peftc.planning.selection.selector_errors import reason_lines
from peftc.planning.selection.selectors import select
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings


def run_sites(args: Namespace) -> int:
    """Prints the sites of a model, or those of a selector. Raises: P0xx, P2xx, P5xx (the model)."""
    options = {"trust_remote_code": args.trust_remote_code}
    table = table_of(args.model, args.trust_remote_code, args.cache) or import_module("peftc.compiler").sites(
        args.model, cache=args.cache, **options
    )
    selection = None if args.selector is None else select(selector_of(args.selector), table)
    if args.json:
        print(json.dumps(sites_data(table, selection), indent=2, ensure_ascii=False))
        return 0
    if selection is not None:
        show(lambda _: render_selection(table, selection, args.selector))
        return 0
    show(lambda width: render_sites(table, width))
    untraced = (f"cannot be traced: {line}" for line in reason_lines(table.untraced))
    unplaced = (f"has weights without a role: {line}" for line in reason_lines(table.unplaced))
    for warning in (*table.warnings, *untraced, *unplaced):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_plan(args: Namespace) -> int:
    """Prints a plan, or compares several; exit 1 if one fails, or for warnings with `--strict`.

    Raises: P0xx–P3xx (a single spec), P5xx.
    """
    models = list(dict.fromkeys(args.model))
    if len(args.specs) == len(models) == 1 and not os.path.isdir(args.specs[0]):
        args.spec, args.model = args.specs[0], models[0]
        return plan_one(args)
    if args.output is not None:
        raise Unusable("-o writes one plan: name one SPEC and one --model")
    return import_module("peftc.cli.plan.comparison").compare_plans(args, models)


def plan_one(args: Namespace) -> int:
    """Prints the plan of one spec on one model."""
    flat = expand(parse_file(args.spec), parse_settings(args.set), args.include)
    result = plan_of(flat, args.model, args.tasks, trust_remote_code=args.trust_remote_code, cache=args.cache)
    records_only = bool(result.failed_expectations) and args.output_format == "json" and not args.json
    if args.json:
        print(result.plan.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_plan(result.plan, result.site_edits.representatives), args)
    warnings = unsuppressed(result.warnings)
    report((*result.failed_expectations, *warnings), args, to_stdout=records_only)
    if args.output is not None and not result.failed_expectations:
        write = import_module("peftc.cli.comparison_commands").write_plan
        write(args.output, args.spec, flat, result, args.tasks)
    return 1 if result.failed_expectations or (args.strict and warnings) else 0
