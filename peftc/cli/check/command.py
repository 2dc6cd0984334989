"""The command `check`. It imports torch only where it must trace a model."""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Container
from importlib import import_module
from typing import NamedTuple, TextIO

from peftc.checking.run import Checker
from peftc.cli.check.options import checker_of, find_configuration
from peftc.cli.output import tell, write_report
from peftc.cli.spec_files import Unusable, display_path, find_specs, try_read
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.formats.report import Report
from peftc.diagnostics.render import FOR_PEOPLE
from peftc.diagnostics.suggestions import plural


def run_check(args: Namespace) -> int:
    """Exit 1 for errors, and for warnings with `--strict`; 2 if a path or the configuration cannot
    be read.
    """
    if args.statistics and args.output_format not in (*FOR_PEOPLE, "json"):
        raise Unusable("--statistics are text or json")
    if args.watch:
        if "-" in args.paths or args.output_format not in FOR_PEOPLE:
            raise Unusable("--watch reads files, and prints text")
        return import_module("peftc.cli.check.watch").watch(args, check)
    return check(args)


class Fixes(NamedTuple):
    """What `--fix` and `--diff` change in all files."""

    number: int = 0
    files: int = 0
    unwritten: int = 0

    def sentence(self, verb: str) -> str:
        parts = [f"{verb} {plural(self.number, 'error')} in {plural(self.files, 'file')}"] if self.number else []
        if self.unwritten:
            parts.append(f"left out {self.unwritten}: a text that still does not parse is not written")
        return "; ".join(parts) or "nothing to fix"


def check(args: Namespace) -> int:
    """One check of all paths."""
    try:
        configuration = find_configuration(args)
    except PeftcError as error:
        path = next((one.source.path for one in error.diagnostics if one.source), "peftc.toml")
        checker = Checker()
        checker.add(path, error.diagnostics)
        write_report(checker.report(), args.output_format, sys.stdout)
        return 2
    files, missing = find_specs(args.paths, lambda path: configuration is None or not configuration.excludes(path))
    checker = checker_of(args, configuration)
    unreadable, fixes = len(missing), Fixes()
    for error in missing:
        checker.add(error.source.path if error.source else "", (error,))
    for path in files:
        try:
            text = try_read(path)
        except PeftcError as error:
            unreadable += error.diagnostics[0].code == "P112"
            checker.add(display_path(path), error.diagnostics)
            continue
        if args.fix or args.diff:
            text, fixes = fix(path, text, checker, args, fixes)
        if not args.diff:
            checker.check(text, display_path(path))
    if args.diff:
        tell(args, fixes.sentence("would fix"))
        return 2 if unreadable else int(fixes.number > 0)
    report = checker.report(args.strict or (configuration is not None and configuration.options.strict))
    stream = sys.stderr if args.fix and "-" in files else sys.stdout
    if args.fix:
        tell(args, fixes.sentence("fixed"), stream if args.output_format in FOR_PEOPLE else sys.stderr)
    write(report, args, len(files), stream)
    return 2 if unreadable else int(any(map(report.fails, report.diagnostics)))


def fix(path: str, text: str, checker: Checker, args: Namespace, fixes: Fixes) -> tuple[str, Fixes]:
    """Writes the fixed text of a file, or prints its changes. Raises: Unusable."""
    shown = display_path(path)
    fixed = import_module("peftc.checking.fixes").fix_text(text, shown, lambda new: checker.alone(new, shown))
    if args.diff:
        sys.stdout.write(import_module("peftc.cli.fmt_command").format_diff(text, fixed.text, shown, "fixed"))
    elif path == "-":
        sys.stdout.write(fixed.text)
    elif fixed.number:
        import_module("peftc.cli.fmt_command").write(path, fixed.text)
    files = fixes.files + (fixed.number > 0)
    return fixed.text, Fixes(fixes.number + fixed.number, files, fixes.unwritten + fixed.unwritten)


def write(report: Report, args: Namespace, files: int, stream: TextIO) -> None:
    paths = {case.path for case in report.cases}
    if args.statistics:
        write_statistics(report, args.output_format, stream, paths)
    else:
        write_report(report, args.output_format, stream)
    if args.output_format in FOR_PEOPLE and not args.quiet:
        separator = "\n" if report.diagnostics and (args.output_format == "text" or args.statistics) else ""
        hidden, fixable = len(report.suppressed), sum(is_fixable(one, paths) for one in report.diagnostics)
        notes = f"; {plural(hidden, 'warning')} suppressed" if hidden else ""
        notes += f"; `--fix` corrects {fixable}" if fixable else ""
        print(f"{separator}{summary(report)} in {plural(files, 'file')}{notes}", file=stream)


def is_fixable(diagnostic: Diagnostic, paths: Container[str]) -> bool:
    """Whether `--fix` corrects it: in a file that was named, not in one that is only used."""
    is_here = diagnostic.source is not None and diagnostic.source.path in paths
    return is_here and diagnostic.fix is not None and diagnostic.fix.applicability == "safe"


def write_statistics(report: Report, output_format: str, stream: TextIO, paths: Container[str]) -> None:
    """How often each code is there."""
    codes = import_module("peftc.diagnostics.codes").CODES
    counts = Counter(one.code for one in report.diagnostics)
    fixable = Counter(one.code for one in report.diagnostics if is_fixable(one, paths))
    rows = [(code, number, codes[code].title) for code, number in counts.most_common()]
    if output_format == "json":
        data = [{"code": c, "title": title, "count": n, "fixable": fixable[c]} for c, n, title in rows]
        stream.write(json.dumps(data, indent=2) + "\n")
        return
    width = max((len(str(number)) for _, number, _ in rows), default=0)
    for code, number, title in rows:
        note = f" ({fixable[code]} with --fix)" if fixable[code] else ""
        stream.write(f"{number:>{width}}  {code}  {title}{note}\n")


def summary(report: Report) -> str:
    """How many errors and warnings there are."""
    errors = sum(one.severity == "error" for one in report.diagnostics)
    totals = ((errors, "error"), (len(report.diagnostics) - errors, "warning"))
    return " and ".join(plural(number, word) for number, word in totals if number) or "nothing wrong"
