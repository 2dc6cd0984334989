"""The command `explain`, which reads the explanations of codes."""

from argparse import Namespace

from peftc.cli.spec_files import Unusable
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.suggestions import did_you_mean


def run_explain(args: Namespace) -> int:
    if args.code is None:
        print("\n".join(f"{code}  {info.title}" for code, info in sorted(CODES.items())))
        return 0
    code = args.code.upper()
    if code not in CODES:
        help_ = did_you_mean(code, CODES) or "`peftc explain` lists all codes"
        raise Unusable(f"there is no code {args.code}; {help_}")
    print(f"{code}: {CODES[code].title}\n\n{CODES[code].explanation.rstrip()}")
    return 0
