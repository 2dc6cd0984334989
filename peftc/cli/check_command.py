"""The command `check`. It imports torch only where it must trace a model."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from peftc.checking.policy import Policy
from peftc.checking.run import Checker
from peftc.checking.targets import Target
from peftc.cli.output import write_report
from peftc.cli.spec_files import Unusable, display_path, find_specs, try_read
from peftc.diagnostics import PeftcError
from peftc.diagnostics.formats.report import Report
from peftc.diagnostics.render import FOR_PEOPLE
from peftc.diagnostics.suggestions import did_you_mean, plural


def run_check(args: Namespace) -> int:
    """Exit 1 for errors, and for warnings with `--strict`; 2 if a path or the configuration cannot
    be read.
    """
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
    unreadable = len(missing)
    for error in missing:
        checker.add(error.source.path if error.source else "", (error,))
    for path in files:
        try:
            text = try_read(path)
        except PeftcError as error:
            unreadable += error.diagnostics[0].code == "P112"
            checker.add(display_path(path), error.diagnostics)
            continue
        checker.check(text, display_path(path))
    report = checker.report(args.strict or (configuration is not None and configuration.options.strict))
    write(report, args, len(files))
    return 2 if unreadable else int(any(map(report.fails, report.diagnostics)))


def find_configuration(args: Namespace) -> Any:
    """The one of `--config`, or of the nearest folder. Raises: PeftcError P130, P131, P132."""
    if args.isolated:
        return None
    if args.config is not None:
        return import_module("peftc.checking.configuration").read_configuration(Path(args.config))
    here = Path.cwd()
    names = (folder / name for folder in (here, *here.parents) for name in ("peftc.toml", "pyproject.toml"))
    if not any(path.is_file() for path in names):  # pydantic is not imported for nothing
        return None
    return import_module("peftc.checking.configuration").find_configuration(here)


def checker_of(args: Namespace, configuration: Any) -> Checker:
    """What the command line says, else the configuration."""
    check_codes("--select", args.select or ())
    check_codes("--ignore", args.ignore)
    policy, include, targets = Policy(args.select, args.ignore), args.include, targets_of(args)
    if configuration is not None:
        options = configuration.options
        select = options.select if args.select is None else args.select
        errors = [code for code, value in options.severity.items() if value == "error"]
        policy = Policy(select, [*options.ignore, *args.ignore], errors)
        include = [*include, *configuration.include]
        targets = targets if args.model else configuration.targets
    return Checker(targets, include, policy, args.trust_remote_code, args.cache, args.locked)


def targets_of(args: Namespace) -> Callable[[str], Sequence[Target]]:
    tasks = None if args.tasks is None else tuple(args.tasks)
    targets = [Target(model, tasks) for model in dict.fromkeys(args.model)]
    return lambda path: targets


def check_codes(option: str, names: Sequence[str]) -> None:
    """Raises: Unusable for codes that there are not."""
    if not names:
        return
    codes = import_module("peftc.diagnostics.codes").CODES
    for name in names:
        if not name or not any(code.startswith(name) for code in codes):
            help_ = did_you_mean(name, codes)
            raise Unusable(f"{option}: no code begins with `{name}`" + (f"; {help_}" if help_ else ""))


def write(report: Report, args: Namespace, files: int) -> None:
    write_report(report, args.output_format, sys.stdout)
    if args.output_format in FOR_PEOPLE:
        separator = "\n" if report.diagnostics and args.output_format == "text" else ""
        hidden = len(report.suppressed)
        note = f"; {plural(hidden, 'warning')} suppressed" if hidden else ""
        print(f"{separator}{summary(report)} in {plural(files, 'file')}{note}")


def summary(report: Report) -> str:
    """How many errors and warnings there are."""
    errors = sum(one.severity == "error" for one in report.diagnostics)
    totals = ((errors, "error"), (len(report.diagnostics) - errors, "warning"))
    return " and ".join(plural(number, word) for number, word in totals if number) or "nothing wrong"
