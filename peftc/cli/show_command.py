"""`show`: pictures. It imports torch only where `plan` does."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from peftc.cli.console import report
from peftc.cli.output import tell
from peftc.cli.plan.planning import plan_of, table_of
from peftc.cli.spec_files import parse_file
from peftc.diagnostics.activity import activity
from peftc.pictures.code import GeneratedCode
from peftc.pictures.panels import diagram_of
from peftc.pictures.picture import Picture, check_format
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax.printer import print_spec


def run_show(args: Namespace) -> int:
    """Draws what a spec adds to a model; exit 1 as `plan`. Raises: as `run_plan`; P590-P592."""
    target = Path(args.output)
    check_format(target.suffix)
    flat = expand(parse_file(args.spec), parse_settings(args.set), args.include)
    options = {"trust_remote_code": args.trust_remote_code, "cache": args.cache}
    result = plan_of(flat, args.model, args.tasks, **options)
    table = table_of(args.model, **options) or import_module("peftc.compiler").sites(args.model, **options)
    diagram = diagram_of(table, result.plan, result.site_edits, flat, result.warnings)

    def listing() -> Sequence[GeneratedCode]:
        code = import_module("peftc.illustration").generated_code
        return code(flat, args.model, tasks=args.tasks, trust_remote_code=args.trust_remote_code)

    picture = Picture(diagram, result.plan, table, print_spec(flat), listing=listing)
    if args.width is not None:
        picture = replace(picture, width=args.width)
    report((*result.failed_expectations, *result.warnings), args)
    with activity("drawing"):
        path = picture.save(target)
    tell(args, f"wrote {path}", sys.stdout)
    return 1 if result.failed_expectations or (args.strict and result.warnings) else 0
