"""The command `check`. It imports torch only where it must trace a model."""

import sys
from argparse import Namespace

from peftc.cli.output import write_report
from peftc.cli.spec_files import display_path, find_specs, try_read
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.formats.report import Case, Report
from peftc.diagnostics.suggestions import plural
from peftc.semantics.expand import check_file
from peftc.syntax.parser import parse_text


def run_check(args: Namespace) -> int:
    """Exit 1 for errors, and for warnings with `--strict`; 2 if a path cannot be read."""
    files, missing = find_specs(args.paths)
    cases = [Case(error.source.path if error.source else "", None, (error,)) for error in missing]
    unreadable = len(missing)
    for path in files:
        try:
            text = try_read(path)
        except PeftcError as error:
            unreadable += error.diagnostics[0].code == "P112"
            cases.append(Case(display_path(path), None, error.diagnostics))
            continue
        cases.append(Case(display_path(path), None, tuple(_check(text, display_path(path), args))))
    # Several specs may use one file.
    diagnostics = tuple(dict.fromkeys(one for case in cases for one in case.diagnostics))
    report = Report(diagnostics, tuple(cases), strict=args.strict)
    write_report(report, args.output_format, sys.stdout)
    if args.output_format in ("text", "concise"):
        separator = "\n" if diagnostics and args.output_format == "text" else ""
        print(f"{separator}{summary(report)} in {plural(len(files), 'file')}")
    return 2 if unreadable else int(any(map(report.fails, diagnostics)))


def _check(text: str, path: str, args: Namespace) -> list[Diagnostic]:
    try:
        return check_file(parse_text(text, path), args.include)
    except PeftcError as error:
        return list(error.diagnostics)


def summary(report: Report) -> str:
    """How many errors and warnings there are."""
    errors = sum(one.severity == "error" for one in report.diagnostics)
    totals = ((errors, "error"), (len(report.diagnostics) - errors, "warning"))
    return " and ".join(plural(number, word) for number, word in totals if number) or "nothing wrong"
