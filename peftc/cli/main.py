"""The command line. Exit codes: 0 success, 1 findings, 2 wrong usage or environment.

Commands that need a model are in `peftc.cli.model_commands`, which imports torch.
"""

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from peftc import __version__
from peftc.cli.spec_files import Unusable, display_path, format_diff, parse_file, read, spec_files, write
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.render import render
from peftc.diagnostics.suggestions import did_you_mean
from peftc.semantics.expand import check_file, expand
from peftc.semantics.spec_argument import parse_settings
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

Run = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. A mistake of the user ends in a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    args = parser().parse_args(argv)
    output_format = getattr(args, "output_format", "text")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except PeftcError as error:
        return report_error(error, output_format)
    except Unusable as error:
        if output_format == "json":
            report_error(PeftcError(Diagnostic("P112", str(error))), "json")
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
        last = traceback.extract_tb(error.__traceback__)[-1]
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        note = f"in {last.name}, line {last.lineno} of {last.filename}"
        help_ = "please report it, with the command, the spec and what PEFTC_TRACEBACK=1 shows"
        bug = Diagnostic("P900", f"this is a bug in peftc: {summary}", notes=(note,), help=help_)
        report_error(PeftcError(bug), output_format)
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


def report_error(error: PeftcError, output_format: str) -> int:
    """Writes records to stdout if a program reads them, else text to stderr."""
    stream = sys.stderr if output_format == "text" else sys.stdout
    stream.write(render(error.diagnostics, output_format, stream))
    return 1


def argument(*names: str, **options: Any) -> Argument:
    return names, options


PATHS = argument("paths", nargs="+", metavar="PATH", help="a spec, a folder of specs, or - for standard input")
SPEC = argument("spec", metavar="SPEC", help="a spec, or - for standard input")
SET = argument(
    "--set", action="append", default=[], metavar="NAME=VALUE", help="override a parameter of the method (repeatable)"
)
INCLUDE = argument(
    "--include",
    action="append",
    default=[],
    metavar="DIR",
    help="another folder from which `use` may read, besides that of the spec (repeatable)",
)
FORMAT = argument(
    "--output-format", choices=("text", "json", "github"), default="text", help="how diagnostics are printed"
)
MODEL_FORMAT = argument("--output-format", choices=("text", "json"), default="text", help="how diagnostics are printed")
MODEL = argument("--model", required=True, metavar="MODEL", help="a hub id, a folder, or a config.json")
REMOTE_CODE = argument(
    "--trust-remote-code",
    action="store_true",
    help="run the Python files that the model's configuration names; without this option they never run",
)
TASKS = argument(
    "--tasks",
    type=lambda text: text.split(","),
    metavar="NAME,…",
    help="the tasks for which `per task` edits get parameters (default: a single task)",
)
CODE = argument("code", nargs="?", metavar="CODE", help="for example P101")
JSON = argument("--json", action="store_true", help="print the result as JSON")
ON_MODEL = (SPEC, MODEL, REMOTE_CODE, SET, INCLUDE, TASKS, MODEL_FORMAT)
VERIFY = (
    argument(
        "--sites",
        choices=("sample", "all"),
        default="sample",
        help="the sites to change one by one: the first, a middle and the last of each kind, or all",
    ),
    argument("--seed", type=int, default=0, metavar="N", help="seed of initial values and of missing weights"),
)
COMPILE = (
    argument("-o", "--output", metavar="DIR", help="the folder for the generated code, the plan and the spec"),
    argument("--force", action="store_true", help="with -o: overwrite files that were changed since peftc wrote them"),
    argument("--seed", type=int, metavar="N", help="seed of the initial values"),
)
MODEL_COMMANDS = (
    ("sites", "print the sites of a model, which edits can name", (MODEL, REMOTE_CODE, MODEL_FORMAT)),
    ("plan", "print what compiling a spec onto a model would do", (*ON_MODEL, JSON)),
    ("verify", "compile a spec onto a model and check that it computes what the spec says", (*ON_MODEL, *VERIFY, JSON)),
    ("compile", "compile a spec onto a model and write the generated code", (*ON_MODEL, *COMPILE)),
)


def parser() -> argparse.ArgumentParser:
    description = "A model-surgery compiler: PEFT methods as equations, on any model."
    top = argparse.ArgumentParser(prog="peftc", description=description)
    top.add_argument("--version", action="version", version=f"peftc {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Run, help: str, *arguments: Argument) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        for names, options in arguments:
            command.add_argument(*names, **options)
        command.set_defaults(run=run)
        return command

    add("check", run_check, "report errors and warnings in specs, without a model", PATHS, INCLUDE, FORMAT)
    modes = add("fmt", run_fmt, "format specs", PATHS).add_mutually_exclusive_group()
    modes.add_argument("--check", action="store_true", help="write nothing; list the files that would change")
    modes.add_argument("--diff", action="store_true", help="write nothing; print the changes")
    add("expand", run_expand, "print a spec with its methods and constants expanded", SPEC, SET, INCLUDE, FORMAT)
    add("explain", run_explain, "explain a diagnostic code; without one, list all codes", CODE)
    for name, help, arguments in MODEL_COMMANDS:
        add(name, model_command(f"run_{name}"), help, *arguments)
    return top


def model_command(name: str) -> Run:
    """A command of `peftc.cli.model_commands`, imported when it runs: torch takes seconds."""
    return lambda args: getattr(import_module("peftc.cli.model_commands"), name)(args)


def run_check(args: argparse.Namespace) -> int:
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


def run_fmt(args: argparse.Namespace) -> int:
    code = 0
    for path in spec_files(args.paths):
        text = read(path)
        try:
            formatted = print_spec(parse_text(text, display_path(path)))
        except PeftcError as error:
            code = report_error(error, "text")
            continue
        if args.diff:
            sys.stdout.write(format_diff(text, formatted, display_path(path)))
        elif args.check and formatted != text:
            print(f"would be formatted: {display_path(path)}")
        elif not args.check and path == "-":
            sys.stdout.write(formatted)
        elif not args.check and formatted != text:
            write(path, formatted)
            print(f"formatted {path}", file=sys.stderr)
        code = 1 if (args.check or args.diff) and formatted != text else code
    return code


def run_expand(args: argparse.Namespace) -> int:
    sys.stdout.write(print_spec(expand(parse_file(args.spec), parse_settings(args.set), args.include)))
    return 0


def run_explain(args: argparse.Namespace) -> int:
    if args.code is None:
        print("\n".join(f"{code}  {info.title}" for code, info in sorted(CODES.items())))
        return 0
    code = args.code.upper()
    if code not in CODES:
        help_ = did_you_mean(code, CODES) or "`peftc explain` lists all codes"
        raise Unusable(f"there is no code {args.code}; {help_}")
    print(f"{code}: {CODES[code].title}\n\n{CODES[code].explanation.rstrip()}")
    return 0


if __name__ == "__main__":
    sys.exit(script())
