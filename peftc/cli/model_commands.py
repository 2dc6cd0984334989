"""The commands that need a model: `sites`, `plan`, `compile`, `verify`. They import torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType

from peftc.cli.output import compile_skeleton
from peftc.cli.spec_files import parse_file
from peftc.compiler import compile, plan_edits, sites
from peftc.diagnostics import Diagnostic
from peftc.diagnostics.render import render_json, render_text, wants_color
from peftc.filesystem.output_folder import write_folder
from peftc.installation.compiled_model import analyse_base
from peftc.models.load import load_or_initialize
from peftc.models.resolve import resolve
from peftc.planning.report.plan import render_plan
from peftc.planning.report.site_tree import render_sites
from peftc.planning.report.text import plain_text
from peftc.planning.selection.untraced import reason_lines
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import default_name, parse_settings
from peftc.verification.preparation import duplicate
from peftc.verification.report import render_verification
from peftc.verification.verify import verify


def run_sites(args: Namespace) -> int:
    """Prints the sites of a model. Raises: P2xx, P5xx (the model)."""
    table = sites(args.model, trust_remote_code=args.trust_remote_code)
    show(lambda width: render_sites(table, width))
    for warning in (*table.warnings, *(f"cannot be traced: {line}" for line in reason_lines(table.untraced))):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_plan(args: Namespace) -> int:
    """Prints the plan; exit 1 if an expectation fails. Raises: P0xx–P3xx (the spec), P5xx."""
    spec = parse_file(args.spec)
    flat = expand(spec, parse_settings(args.set), args.include)
    result = plan_edits(flat, args.model, tasks=args.tasks, trust_remote_code=args.trust_remote_code)
    records_only = bool(result.failed_expectations) and args.output_format == "json" and not args.json
    if args.json:
        print(result.plan.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_plan(result.plan, result.site_edits))
    report((*result.failed_expectations, *result.warnings), args, to_stdout=records_only)
    return 1 if result.failed_expectations else 0


def run_compile(args: Namespace) -> int:
    """Compiles onto a skeleton, without weights. Raises: as `run_plan`; P304, P4xx."""
    spec = parse_file(args.spec)
    flat = expand(spec, parse_settings(args.set), args.include)
    analysis = analyse_base(args.model, trust_remote_code=args.trust_remote_code)
    result, files = compile_skeleton(flat, default_name(spec), analysis, args.seed, args.tasks)
    show(lambda _: render_plan(result.plan, result.site_edits))
    report(result.warnings, args)
    if args.output is None:
        print("\nnothing was written: name a folder with -o")
        return 0
    changes = write_folder(Path(args.output), files, args.force)
    print(f"\nwrote {', '.join(changes.written)} to {changes.folder}")
    if changes.removed:
        print(f"removed {', '.join(changes.removed)}, of an earlier run")
    if changes.modified:
        print(f"did not remove {', '.join(changes.modified)}: written by an earlier run, and changed since")
    return 0


def run_verify(args: Namespace) -> int:
    """Compiles and verifies; exit 1 on findings. Raises: as `run_compile`; P505, P507, P601."""
    spec = parse_file(args.spec)
    model, weights = load_or_initialize(resolve(args.model, args.trust_remote_code), args.seed)
    base = duplicate(model)
    settings = parse_settings(args.set)
    compile(spec, model, args.seed, settings=settings, include=args.include, tasks=args.tasks)
    result = verify(model, sites=args.sites, base=base, weights=weights)
    records_only = not result.ok and args.output_format == "json" and not args.json
    if args.json:
        print(result.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_verification(result))
    if records_only or (args.json and not result.ok):
        report(result.diagnostics, args, to_stdout=records_only)
    return 0 if result.ok else 1


def report(diagnostics: Sequence[Diagnostic], args: Namespace, *, to_stdout: bool = False) -> None:
    """Writes diagnostics to stderr; to stdout if they are all there is to print."""
    if not diagnostics:
        return
    stream = sys.stdout if to_stdout else sys.stderr
    if args.output_format == "json":
        stream.write(render_json(diagnostics))
    else:
        stream.write(("" if to_stdout else "\n") + render_text(diagnostics, wants_color(stream)))


def show(make: Callable[[int], RenderableType]) -> None:
    """Prints the rendering for the width of the terminal; plain text in a pipe or with NO_COLOR."""
    console = Console(file=sys.stdout, highlight=False)
    if wants_color(sys.stdout):
        console.print(make(console.width))
    else:
        sys.stdout.write(plain_text(make(console.width), console.width))
