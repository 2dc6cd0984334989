"""The command line. Exit codes: 0 success, 1 findings, 2 wrong usage or environment.

The module of a command is imported when it runs: `check` takes less time than importing torch, or
pydantic.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from peftc.cli.output import report_error
from peftc.cli.parser.parser import parse_arguments
from peftc.cli.progress import progress_of
from peftc.cli.spec_files import Unusable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.render import FOR_PEOPLE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. A mistake of the user ends in a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["__complete"]:
        return import_module("peftc.cli.completion.command").answer(words[1:])
    args = parse_arguments(words)
    try:
        for name in getattr(args, "forms", ()):
            import_module("peftc.forms").register_entry_point(name)
        with progress_of(args):
            code = args.run(args)
        sys.stdout.flush()
        return code
    except PeftcError as error:
        return report_error(error, args)
    except Unusable as error:
        if getattr(args, "output_format", "text") not in FOR_PEOPLE:
            report_error(PeftcError(Diagnostic("P112", str(error))), args)
        print(f"peftc: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `peftc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
            print(f"peftc: {error}; set TMPDIR to one", file=sys.stderr)
            return 2
        if os.environ.get("PEFTC_TRACEBACK"):
            raise
        bug = import_module("peftc.diagnostics.bugs").bug_of(error)
        report_error(PeftcError(bug), args)
        return 2


def script() -> int:
    """The installed command: `main` without garbage collection, since the process ends with it.

    Torch and transformers allocate hundreds of thousands of objects that stay. Traversing them
    takes a second, half of what planning may take.
    """
    gc.disable()
    try:
        return main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(script())
