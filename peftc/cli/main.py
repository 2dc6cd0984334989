"""The command line. Each command is an `add_…` (its arguments) and a `run_…` (what it does, ending in an exit code).

Exit codes: 0 all well, 1 findings, 2 wrong usage or environment. What needs torch is imported by the commands that need it:
those about a model are in `peftc.cli.model_commands`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TextIO

from peftc import __version__
from peftc.cli.spec_files import Unusable, read, spec_files
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.formats import render_github, render_json
from peftc.diagnostics.render import render_text, wants_color
from peftc.diagnostics.suggestions import did_you_mean

Run = Callable[[argparse.Namespace], int]
FORMATS = ("text", "json", "github")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; everything that is wrong with the user's input ends in a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except PeftcError as error:
        return failed(error, getattr(args, "output_format", "text"))
    except Unusable as error:
        if getattr(args, "output_format", "text") == "json":
            failed(PeftcError(Diagnostic("P112", str(error))), "json")
        print(f"peftc: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `peftc … | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
            print(f"peftc: {error}; TMPDIR names one", file=sys.stderr)
            return 2
        if os.environ.get("PEFTC_TRACEBACK"):
            raise
        failed(PeftcError(unexpected(error)), getattr(args, "output_format", "text"))
        return 2


def unexpected(error: Exception) -> Diagnostic:
    """What is said of a bug."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Diagnostic(
        "P900",
        f"this is a bug in peftc: {what}",
        notes=(f"in {last.name}, line {last.lineno} of {last.filename}",),
        help="please report it, with the command, the spec and what PEFTC_TRACEBACK=1 shows",
    )


def script() -> int:
    """The installed command: `main` in a process that ends with it, so that nothing needs collecting.

    Importing torch and transformers allocates hundreds of thousands of objects that stay; searching them for garbage, then
    and at exit, takes a second, half of what planning may take.
    """
    gc.disable()
    try:
        return main()
    finally:
        gc.freeze()


def failed(error: PeftcError, output_format: str) -> int:
    """Reports what ended a command: records on stdout where a program reads them, else text on stderr."""
    stream = sys.stderr if output_format == "text" else sys.stdout
    stream.write(rendered(error.diagnostics, output_format, stream))
    return 1


def rendered(diagnostics: Iterable[Diagnostic], output_format: str, stream: TextIO) -> str:
    if output_format == "json":
        return render_json(diagnostics)
    if output_format == "github":
        return render_github(diagnostics)
    return render_text(diagnostics, wants_color(stream))


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="peftc", description="A model-surgery compiler: methods as equations, on any model."
    )
    whole.add_argument("--version", action="version", version=f"peftc {__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_check(commands.add_parser("check", help="what is wrong with specs, as far as it shows without a model"))
    add_fmt(commands.add_parser("fmt", help="rewrite specs in the one layout"))
    add_expand(commands.add_parser("expand", help="print a spec with its methods and constants put in"))
    add_explain(commands.add_parser("explain", help="what a diagnostic code means; without one, list them"))
    add_sites(commands.add_parser("sites", help="print the places of a model that an edit can name"))
    add_plan(commands.add_parser("plan", help="print what compiling a spec onto a model would do"))
    add_verify(
        commands.add_parser("verify", help="compile a spec onto a model and show that it computes what the spec says")
    )
    add_compile(commands.add_parser("compile", help="compile a spec onto a model and write what was generated"))
    return whole


def add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="PATH", help="a spec, a folder of specs, or - for standard input")
    add_include(command)
    command.add_argument("--output-format", choices=FORMATS, default="text")
    command.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    from peftc.semantics.checks.spec_file import check_file
    from peftc.syntax.parser import parse_text

    found: list[Diagnostic] = []
    files = spec_files(args.paths)
    for path in files:
        try:
            found += check_file(parse_text(read(path), shown(path)), args.include)
        except PeftcError as error:
            found += error.diagnostics
    found = list(dict.fromkeys(found))  # a file that several others use is told about once
    errors = sum(error.severity == "error" for error in found)
    sys.stdout.write(rendered(found, args.output_format, sys.stdout))
    if args.output_format == "text":
        blank = "\n" if found else ""
        print(blank + summary(errors, len(found) - errors, len(files)))
    return 1 if errors else 0


def summary(errors: int, warnings: int, files: int) -> str:
    """2 errors and 1 warning in 3 files"""
    counted = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    return f"{' and '.join(counted) or 'nothing wrong'} in {files} file{'s' * (files != 1)}"


def add_fmt(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="PATH", help="a spec, a folder of specs, or - for standard input")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="write nothing; name the files that would change")
    how.add_argument("--diff", action="store_true", help="write nothing; print what would change")
    command.set_defaults(run=run_fmt)


def run_fmt(args: argparse.Namespace) -> int:
    from peftc.cli.spec_files import difference, write
    from peftc.syntax import parse_text, print_spec

    code = 0
    for path in spec_files(args.paths):
        text = read(path)
        try:
            done = print_spec(parse_text(text, shown(path)))
        except PeftcError as error:
            code = failed(error, "text")
            continue
        if args.diff:
            sys.stdout.write(difference(text, done, shown(path)))
        elif args.check and done != text:
            print(f"would be formatted: {shown(path)}")
        elif not args.check and path == "-":
            sys.stdout.write(done)
        elif not args.check and done != text:
            write(path, done)
            print(f"formatted {path}", file=sys.stderr)
        code = 1 if (args.check or args.diff) and done != text else code
    return code


def shown(path: str) -> str:
    return "<stdin>" if path == "-" else path


def add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a parameter of the method (repeatable)",
    )


def add_include(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder from which `use` may read, beside that of the spec (repeatable)",
    )


def add_expand(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC")
    add_settings(command)
    add_include(command)
    command.add_argument("--output-format", choices=FORMATS, default="text", help="of diagnostics")
    command.set_defaults(run=run_expand)


def run_expand(args: argparse.Namespace) -> int:
    from peftc.semantics.expand import expand
    from peftc.semantics.settings import parse_settings
    from peftc.syntax import parse_text, print_spec

    spec = parse_text(read(args.spec), shown(args.spec))
    sys.stdout.write(print_spec(expand(spec, parse_settings(args.set), args.include)))
    return 0


def add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("code", nargs="?", metavar="CODE")
    command.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    if args.code is None:
        print("\n".join(f"{code}  {info.title}" for code, info in sorted(CODES.items())))
        return 0
    info = CODES.get(args.code.upper())
    if info is None:
        near = did_you_mean(args.code.upper(), CODES) or "`peftc explain` lists all codes"
        raise Unusable(f"there is no code {args.code}; {near}")
    print(f"{args.code.upper()}: {info.title}\n\n{info.explanation.rstrip()}")
    return 0


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, metavar="MODEL", help="a hub id, a folder, or a config.json")
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files that the model's configuration brings along; they never are otherwise",
    )


def add_tasks(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        metavar="NAME,…",
        help="those that edits `per task` have parameters for; one without it",
    )


def add_sites(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument("--output-format", choices=("text", "json"), default="text", help="of diagnostics")
    command.set_defaults(run=about_a_model("run_sites"))


def add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC")
    add_model(command)
    add_settings(command)
    add_include(command)
    add_tasks(command)
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.add_argument("--output-format", choices=("text", "json"), default="text", help="of diagnostics")
    command.set_defaults(run=about_a_model("run_plan"))


def add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC")
    add_model(command)
    add_settings(command)
    add_include(command)
    add_tasks(command)
    command.add_argument(
        "--sites",
        choices=("sample", "all"),
        default="sample",
        help="which ones are changed alone: the first, a middle and the last of each kind, or all",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of initial values, and of weights that are missing"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.add_argument("--output-format", choices=("text", "json"), default="text", help="of diagnostics")
    command.set_defaults(run=about_a_model("run_verify"))


def add_compile(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC")
    add_model(command)
    add_settings(command)
    add_include(command)
    add_tasks(command)
    command.add_argument(
        "-o", "--output", metavar="DIR", help="where to write the generated code, the plan and the spec"
    )
    command.add_argument(
        "--force", action="store_true", help="with -o: overwrite files that were changed since peftc wrote them"
    )
    command.add_argument("--seed", type=int, metavar="N", help="of the initial values")
    command.add_argument("--output-format", choices=("text", "json"), default="text", help="of diagnostics")
    command.set_defaults(run=about_a_model("run_compile"))


def about_a_model(name: str) -> Run:
    """A command of `peftc.cli.model_commands`, which is imported when it runs."""
    return lambda args: getattr(import_module("peftc.cli.model_commands"), name)(args)


if __name__ == "__main__":
    sys.exit(script())
