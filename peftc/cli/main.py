"""The command line. Exit codes: 0 success, 1 findings, 2 wrong usage or environment.

The module of a command is imported when it runs: `check` takes less time than importing torch, or
pydantic.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from peftc import __version__
from peftc.cli.output import report_error
from peftc.cli.spec_files import Unusable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.render import FOR_PEOPLE, FORMATS

Run = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. A mistake of the user ends in a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    args = parser().parse_args(argv)
    try:
        for name in getattr(args, "forms", ()):
            import_module("peftc.forms").register_entry_point(name)
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
        last = import_module("traceback").extract_tb(error.__traceback__)[-1]
        summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        note = f"in {last.name}, line {last.lineno} of {last.filename}"
        help_ = "please report it, with the command, the spec and what PEFTC_TRACEBACK=1 shows"
        bug = Diagnostic("P900", f"this is a bug in peftc: {summary}", notes=(note,), help=help_)
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
FORMS = argument(
    "--forms",
    action="append",
    default=[],
    metavar="NAME",
    help="a Python form that an installed package offers as an entry point; its code runs (repeatable)",
)
FORMAT = argument("--output-format", choices=FORMATS, default="text", help="how diagnostics are printed")
MODEL_FORMAT = argument("--output-format", choices=("text", "json"), default="text", help="how diagnostics are printed")
MODEL = argument("--model", required=True, metavar="MODEL", help="a hub id, a folder, or a config.json")
BASE_MODEL = argument("--model", metavar="MODEL", help="the base (default: the one that the adapter names)")
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
CODE = argument("code", nargs="?", metavar="CODE|FORM", help="for example P101, or lora")
OF_SPEC = argument("spec", nargs="?", metavar="SPEC", help="the spec that defines the form, if it is not built in")
UPGRADE = argument("--upgrade", action="store_true", help="write specs of version 1 of the language as version 2")
NO_CACHE = argument(
    "--no-cache", dest="cache", action="store_false", help="trace the model, and keep nothing of it for the next time"
)
JSON = argument("--json", action="store_true", help="print the result as JSON")
STRICT = argument("--strict", action="store_true", help="exit 1 if there are warnings")
ON_MODEL = (SPEC, MODEL, REMOTE_CODE, SET, INCLUDE, FORMS, TASKS)
VERIFY = (
    argument(
        "--sites",
        choices=("sample", "all"),
        default="sample",
        help="the sites to change one by one: the first, a middle and the last of each kind, or all",
    ),
    argument("--seed", type=int, default=0, metavar="N", help="seed of initial values and of missing weights"),
)
OPTIONAL_SPEC = argument("spec", nargs="?", metavar="SPEC", help="a spec, or - for standard input")
OPTIONAL_MODEL = argument("--model", metavar="MODEL", help="a hub id, a folder, or a config.json")
MODELS = argument(
    "--model",
    action="append",
    default=[],
    metavar="MODEL",
    help="a hub id, a folder, or a config.json (repeatable; default: those of the configuration)",
)
COMPILE = (
    argument("--plan", metavar="FILE", help="apply the plan of `peftc plan -o FILE`, or say how it would differ now"),
    argument("-o", "--output", metavar="DIR", help="the folder for the generated code, the plan and the spec"),
    argument("--force", action="store_true", help="with -o: overwrite files that were changed since peftc wrote them"),
    argument(
        "--standalone",
        action="store_true",
        help="with -o: write a model that `from_pretrained` loads without peftc, weights included",
    ),
    argument("--seed", type=int, metavar="N", help="seed of the initial values"),
)
PLAN_FILE = argument("-o", "--output", metavar="FILE", help="a JSON file for the plan, as `compile --plan` reads it")
CONFIG = argument("--config", metavar="FILE", help="a peftc.toml or pyproject.toml (default: of the nearest folder)")
ISOLATED = argument("--isolated", action="store_true", help="read no configuration")
CODES = {"type": lambda text: text.split(","), "action": "extend", "metavar": "CODE,…"}
CHECK = (
    PATHS,
    argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="also check on this model: a hub id, a folder, or a config.json (repeatable)",
    ),
    TASKS,
    argument("--locked", action="store_true", help="fail if a plan is another than in SPEC.lock.json"),
    argument("--select", **CODES, help="report only these warnings: codes or beginnings of codes"),
    argument("--ignore", **CODES, default=[], help="do not report these warnings"),
    argument("--statistics", action="store_true", help="print how often each code is there"),
    CONFIG,
    ISOLATED,
    INCLUDE,
    FORMS,
    REMOTE_CODE,
    NO_CACHE,
    FORMAT,
    STRICT,
)
LOCK = (
    PATHS,
    MODELS,
    TASKS,
    CONFIG,
    ISOLATED,
    INCLUDE,
    FORMS,
    REMOTE_CODE,
    NO_CACHE,
    MODEL_FORMAT,
)
SHOW = (
    argument("-o", "--output", required=True, metavar="FILE", help="ends in .svg, .html, .md (Mermaid) or .dot"),
    argument("--width", type=int, metavar="PIXELS", help="of layers side by side (default: 560)"),
)
MODEL_COMMANDS = (
    ("sites", "print the sites of a model, which edits can name", (MODEL, REMOTE_CODE, NO_CACHE, MODEL_FORMAT, JSON)),
    (
        "plan",
        "print what compiling a spec onto a model would do",
        (*ON_MODEL, FORMAT, NO_CACHE, JSON, STRICT, PLAN_FILE),
    ),
    ("show", "draw what a spec adds to the layers of a model", (*ON_MODEL, MODEL_FORMAT, *SHOW, NO_CACHE, STRICT)),
    (
        "verify",
        "compile a spec onto a model and check that it computes what the spec says",
        (*ON_MODEL, MODEL_FORMAT, *VERIFY, JSON),
    ),
    (
        "compile",
        "compile a spec onto a model and write the generated code",
        (OPTIONAL_SPEC, OPTIONAL_MODEL, *ON_MODEL[2:], FORMAT, *COMPILE, STRICT),
    ),
)
MERGE = (
    argument("base", metavar="BASE", help="a folder with safetensors, or a hub id"),
    argument(
        "adapters", nargs="+", metavar="ADAPTER", help="a folder that `peftc.save` wrote; several act in this order"
    ),
    argument("-o", "--output", metavar="DIR", help="a new folder for the merged checkpoint"),
    argument("--partial", action="store_true", help="keep edits that do not fold, as an adapter in DIR/adapter"),
    argument("--widen", action="store_true", help="make bottlenecks beside ffns hidden units of these"),
    argument("--untie", action="store_true", help="make two matrices of a tied embedding and head, so that edits fold"),
    argument("--dequantize", action="store_true", help="write the weights of a quantised base out in full"),
    argument("--other-weights", action="store_true", help="expect a base with other weights than the adapter's"),
    argument("--dry-run", action="store_true", help="say what would be merged, and write nothing"),
    argument("--verify", action="store_true", help="read the new files again, and compare, before they appear"),
    argument("--jobs", type=int, default=1, metavar="N", help="processes on this machine"),
    argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where sums are computed (default: auto)"
    ),
    REMOTE_CODE,
    FORMS,
    MODEL_FORMAT,
    JSON,
)
DIFF = (
    argument("old", metavar="OLD", help="a spec, git:REVISION:PATH, an adapter's folder, or a file of plans"),
    argument("new", metavar="NEW", help="the same"),
    argument("--model", metavar="MODEL", help="compare sites, shapes and counts on this model, too"),
    argument("--format", choices=("text", "markdown", "json"), default="text", help="of the difference"),
    argument("--exit-code", action="store_true", help="exit 1 if there is a difference"),
    REMOTE_CODE,
    INCLUDE,
    FORMS,
    NO_CACHE,
    MODEL_FORMAT,
)
INSPECT = (
    argument("adapter", metavar="ADAPTER", help="a folder that `peftc.save` wrote"),
    BASE_MODEL,
    REMOTE_CODE,
    FORMS,
    MODEL_FORMAT,
    JSON,
)
EXPORT = (
    argument("adapter", metavar="ADAPTER", help="a folder that `peftc.save` wrote"),
    argument("--to", choices=("peft", "vllm", "adapterhub"), default="peft", help="the format (default: peft)"),
    argument("--max-rank", type=int, metavar="N", help="the highest rank that the other program takes"),
    argument("--svd", action="store_true", help="write the nearest change of this rank, where none is exact"),
    argument("-o", "--output", required=True, metavar="DIR", help="a new folder"),
    BASE_MODEL,
    argument("--other-weights", action="store_true", help="expect a base with other weights than the adapter's"),
    REMOTE_CODE,
    FORMS,
    MODEL_FORMAT,
    JSON,
)
IMPORT = (
    argument("source", metavar="DIR|HUB_ID", help="a folder that PEFT or AdapterHub wrote, or a hub id"),
    argument("-o", "--output", required=True, metavar="ADAPTER", help="a new folder for the adapter"),
    BASE_MODEL,
    REMOTE_CODE,
    MODEL_FORMAT,
)
CONVERT = (
    argument("adapter", metavar="ADAPTER", help="a folder that `peftc.save` wrote"),
    argument("--to", choices=("lora",), default="lora", help="the form (default: lora)"),
    argument("--rank", type=int, required=True, metavar="R", help="of each LoRA, at most"),
    argument("-o", "--output", required=True, metavar="DIR", help="a new folder for the adapter"),
    BASE_MODEL,
    argument("--other-weights", action="store_true", help="expect a base with other weights than the adapter's"),
    REMOTE_CODE,
    FORMS,
    MODEL_FORMAT,
)
HOMES = {
    "check": "check.command",
    "expand": "expand_command",
    "fmt": "fmt_command",
    "explain": "explain_command",
    **dict.fromkeys(("sites", "plan"), "plan_commands"),
    **dict.fromkeys(("compile", "verify"), "model_commands"),
    "show": "show_command",
    "merge": "merge_command",
    **dict.fromkeys(("export", "import", "convert", "inspect"), "exchange_commands"),
    **dict.fromkeys(("diff", "lock"), "comparison_commands"),
}


class HelpFormatter(argparse.HelpFormatter):
    """The usual one, which would import archivers to ask for the width of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns() - 2)


def columns() -> int:
    """The width of the terminal, as `shutil.get_terminal_size` finds it."""
    with suppress(ValueError):
        if (width := int(os.environ.get("COLUMNS", ""))) > 0:
            return width
    with suppress(AttributeError, ValueError, OSError):
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # pyright: ignore[reportOptionalMemberAccess]
    return 80


def parser() -> argparse.ArgumentParser:
    description = "A model-surgery compiler: PEFT methods as equations, on any model."
    top = argparse.ArgumentParser(prog="peftc", description=description, formatter_class=HelpFormatter)
    top.add_argument("--version", action="version", version=f"peftc {__version__}")
    # With `prog`, argparse formats no usage for it, which imports archivers.
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="peftc")

    def add(name: str, help: str, *arguments: Argument) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, formatter_class=HelpFormatter)
        for names, options in arguments:
            command.add_argument(*names, **options)
        command.set_defaults(run=run_of(name))
        return command

    fixes = add(
        "check", "report errors and warnings in specs, alone or on models", *CHECK
    ).add_mutually_exclusive_group()
    fixes.add_argument("--fix", action="store_true", help="correct what is safe to correct, and report the rest")
    fixes.add_argument("--diff", action="store_true", help="write nothing; print what --fix would change")
    fixes.add_argument("--watch", action="store_true", help="check again whenever a file changes")
    modes = add("fmt", "format specs", PATHS, UPGRADE).add_mutually_exclusive_group()
    modes.add_argument("--check", action="store_true", help="write nothing; list the files that would change")
    modes.add_argument("--diff", action="store_true", help="write nothing; print the changes")
    add("expand", "print a spec with its methods and constants expanded", SPEC, SET, INCLUDE, FORMS, FORMAT)
    add("explain", "explain a diagnostic code or a form; without one, list all codes", CODE, OF_SPEC, FORMS)
    for name, help, arguments in MODEL_COMMANDS:
        add(name, help, *arguments)
    add("lock", "write what specs do to their models to SPEC.lock.json, for `check --locked`", *LOCK)
    add("diff", "print what differs between two specs, revisions, adapters or plans", *DIFF)
    add("inspect", "print a saved adapter: its spec, base and counts, and how much each edit changes", *INSPECT)
    add("merge", "merge saved adapters into a safetensors checkpoint, tensor by tensor", *MERGE)
    add("export", "write an adapter in the format of another program", *EXPORT)
    add("convert", "write an adapter as one of LoRA alone", *CONVERT)
    add("import", "make an adapter of one of another program", *IMPORT)
    return top


def run_of(command: str) -> Run:
    """The function of a command."""
    module = f"peftc.cli.{HOMES[command]}"
    return lambda args: getattr(import_module(module), f"run_{command}")(args)


if __name__ == "__main__":
    sys.exit(script())
