"""The command `expand`. It imports no more than it needs."""

import sys
from argparse import Namespace

from peftc.cli.spec_files import parse_file
from peftc.semantics.expand import expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax.printer import print_spec


def run_expand(args: Namespace) -> int:
    sys.stdout.write(print_spec(expand(parse_file(args.spec), parse_settings(args.set), args.include)))
    return 0
