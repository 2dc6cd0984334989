"""The commands about a model, as the command line runs them: `sites`, `plan`, `compile`, `verify`. They import torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType

from peftc.cli.output import compile_skeleton, write
from peftc.cli.spec_files import read
from peftc.compiler import compile, plan_edits, sites
from peftc.diagnostics import Diagnostic
from peftc.diagnostics.formats import render_json
from peftc.diagnostics.render import render_text, wants_color
from peftc.models.load import load_or_initialize
from peftc.models.resolve import resolve
from peftc.planning.planner import PlanResult
from peftc.planning.report.plan import render_plan
from peftc.planning.report.site_tree import render_sites
from peftc.planning.report.text import plain_text
from peftc.planning.selection.untraced import reason_lines
from peftc.semantics.expand import expand
from peftc.semantics.settings import parse_settings
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.verification.preparation import duplicate
from peftc.verification.report import render_verification
from peftc.verification.verify import verify


def run_sites(args: Namespace) -> int:
    """`peftc sites --model M`: the tree of places. Raises: P5xx, P2xx for a model whose layers are not understood."""
    table = sites(args.model, trust_remote_code=args.trust_remote_code)
    show(lambda width: render_sites(table, width))
    for warning in (*table.warnings, *(f"cannot be traced: {line}" for line in reason_lines(table.untraced))):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_plan(args: Namespace) -> int:
    """`peftc plan SPEC --model M`: exit 1 where an expectation does not hold. Raises: everything wrong with the spec."""
    spec = parsed(args)
    flat = expand(spec, parse_settings(args.set), args.include)
    found = plan_edits(flat, args.model, tasks=args.tasks, trust_remote_code=args.trust_remote_code)
    records_only = bool(found.failed_expectations) and args.output_format == "json" and not args.json
    if args.json:
        print(found.plan.model_dump_json(indent=2))
    elif not records_only:
        show(lambda _: render_plan(found.plan, found.site_edits))
    report((*found.failed_expectations, *found.warnings), args, to_stdout=records_only)
    return exit_code(found)


def run_compile(args: Namespace) -> int:
    """`peftc compile SPEC --model M [-o DIR]`: on a skeleton, so that no weights are needed.

    Raises: everything wrong with the spec, P304 for expectations that do not hold, P4xx.
    """
    spec = parsed(args)
    settings = parse_settings(args.set)
    compiled = compile_skeleton(
        spec,
        args.model,
        args.seed,
        settings=settings,
        include=args.include,
        tasks=args.tasks,
        trust_remote_code=args.trust_remote_code,
    )
    show(lambda _: render_plan(compiled.planned.plan, compiled.planned.site_edits))
    report(compiled.planned.warnings, args)
    if args.output is None:
        print("\nnothing was written: give a directory with -o")
        return 0
    done = write(compiled, args.output, args.force)
    print(f"\nwrote {', '.join(done.written)} to {done.folder}")
    if done.removed:
        print(f"removed {', '.join(done.removed)}, of an earlier run")
    if done.modified:
        print(f"left {', '.join(done.modified)}, of an earlier run and changed since")
    return 0


def run_verify(args: Namespace) -> int:
    """`peftc verify SPEC --model M`: exit 1 where something was found.

    Raises: everything wrong with the spec, P304 for expectations that do not hold, P4xx; P507 and P601 for a model that cannot
    be run or copied.
    """
    spec = parsed(args)
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


def parsed(args: Namespace) -> ast.Spec:
    return parse_text(read(args.spec), "<stdin>" if args.spec == "-" else args.spec)


def exit_code(planned: PlanResult) -> int:
    """0 all well, 1 an expectation that does not hold."""
    return 1 if planned.failed_expectations else 0


def report(found: Sequence[Diagnostic], args: Namespace, *, to_stdout: bool = False) -> None:
    """What was found beside the result: on stderr, unless there is no other result to print."""
    if not found:
        return
    stream = sys.stdout if to_stdout else sys.stderr
    if args.output_format == "json":
        stream.write(render_json(found))
    else:
        stream.write(("" if to_stdout else "\n") + render_text(found, wants_color(stream)))


def show(result: Callable[[int], RenderableType]) -> None:
    """Prints what `result` makes for the width of the terminal; plain text, 80 wide, into a pipe or under NO_COLOR."""
    if wants_color(sys.stdout):
        console = Console(file=sys.stdout, highlight=False)
        console.print(result(console.width))
    else:
        width = Console(file=sys.stdout).width
        sys.stdout.write(plain_text(result(width), width))
