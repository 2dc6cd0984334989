"""The command `fmt`, which writes files."""

import sys
from argparse import Namespace
from difflib import unified_diff
from pathlib import Path

from peftc.cli.output import report_error, tell
from peftc.cli.spec_files import Unusable, display_path, read, spec_files
from peftc.diagnostics import PeftcError
from peftc.filesystem.atomic import replace_text
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from peftc.syntax.upgrade import upgraded


def run_fmt(args: Namespace) -> int:
    code = 0
    for path in spec_files(args.paths):
        text = read(path)
        try:
            spec = parse_text(text, display_path(path))
            formatted = print_spec(upgraded(spec) if args.upgrade else spec)
        except PeftcError as error:
            code = report_error(error, args)
            continue
        if args.diff:
            sys.stdout.write(format_diff(text, formatted, display_path(path)))
        elif args.check and formatted != text:
            print(f"would be formatted: {display_path(path)}")
        elif not args.check and path == "-":
            sys.stdout.write(formatted)
        elif not args.check and formatted != text:
            write(path, formatted)
            tell(args, f"formatted {path}")
        code = 1 if (args.check or args.diff) and formatted != text else code
    return code


def write(path: str, text: str) -> None:
    """Replaces the whole file or nothing. Raises: Unusable if it cannot be written."""
    try:
        replace_text(Path(path).resolve(), text)
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}") from None


def format_diff(before: str, after: str, path: str, what: str = "formatted") -> str:
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, f"{path} ({what})")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
