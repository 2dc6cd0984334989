"""The commands that read specs alone: `check` and `expand`. They import no more than they need."""

import sys
from argparse import Namespace

from peftc.cli.spec_files import parse_file, spec_files
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.render import render
from peftc.semantics.expand import check_file, expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax.printer import print_spec


def run_check(args: Namespace) -> int:
    diagnostics: list[Diagnostic] = []
    files = spec_files(args.paths)
    for path in files:
        try:
            diagnostics += check_file(parse_file(path), args.include)
        except PeftcError as error:
            diagnostics += error.diagnostics
    diagnostics = list(dict.fromkeys(diagnostics))  # several specs may use one file
    errors = sum(d.severity == "error" for d in diagnostics)
    sys.stdout.write(render(diagnostics, args.output_format, sys.stdout))
    if args.output_format == "text":
        totals = ((errors, "error"), (len(diagnostics) - errors, "warning"))
        counts = " and ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in totals if n) or "nothing wrong"
        print(("\n" if diagnostics else "") + f"{counts} in {len(files)} file{'s' * (len(files) != 1)}")
    return 1 if errors else 0


def run_expand(args: Namespace) -> int:
    sys.stdout.write(print_spec(expand(parse_file(args.spec), parse_settings(args.set), args.include)))
    return 0
