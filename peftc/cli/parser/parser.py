"""The parser of the command line. What is misspelled has the nearest name beside it."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from peftc import __version__
from peftc.cli.parser.arguments import Argument
from peftc.cli.parser.command import COMMON, Command
from peftc.cli.parser.commands import COMMANDS
from peftc.diagnostics.activity import activity
from peftc.diagnostics.suggestions import did_you_mean
from peftc.models.names import with_task

_TOP_OPTIONS = ("-h", "--help", "--version")
DESCRIPTION = "A model-surgery compiler: PEFT methods as equations, on any model."


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


class Parser(argparse.ArgumentParser):
    """The usual one, which would say of a misspelled value only which values there are."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            help_ = did_you_mean(str(value), map(str, choices)) or f"choose from {', '.join(map(str, choices))}"
            raise argparse.ArgumentError(action, f"there is no value `{value}`; {help_}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command. Exits with 2 for wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    name = next((word for word in argv if not word.startswith("-")), None)
    before = argv if name is None else argv[: argv.index(name)]
    if unknown := next((word for word in before if not any(one.startswith(word) for one in _TOP_OPTIONS)), None):
        near = did_you_mean(unknown.lstrip("-"), (one.lstrip("-") for one in _TOP_OPTIONS))
        help_ = f"did you mean `--{near.new}`?" if near else "options stand behind the command"
        _fail("peftc", f"there is no option `{unknown}` before a command", help_)
    if name is not None and name not in COMMANDS:
        _fail("peftc", f"there is no command `{name}`", did_you_mean(name, COMMANDS) or "`peftc --help` lists all")
    if name is not None:
        _check_options(name, argv[argv.index(name) + 1 :])
    args = parser(name).parse_args(argv)
    _add_task(args, f"peftc {name}")
    return args


def _add_task(args: argparse.Namespace, program: str) -> None:
    """Makes `--task` a part of the names of the models."""
    if (task := getattr(args, "task", None)) is None:
        return
    if not args.model:
        _fail(program, "`--task` says the class of a model", "name it: `--model`")
    args.model = (
        with_task(args.model, task) if isinstance(args.model, str) else [with_task(m, task) for m in args.model]
    )


def _check_options(name: str, words: Sequence[str]) -> None:
    """Fails for an option that there is not, before others may be missing for its sake."""
    options = [one for own in COMMANDS[name].every_argument if own.is_option for one in own.names]
    options += ["-h", "--help"]
    for word in words:
        if word == "--":
            return
        if not word.startswith("-") or word == "-" or " " in word or _is_number(word):
            continue
        option = word.partition("=")[0]
        known = option[:2] in options if option[1] != "-" else any(one.startswith(option) for one in options)
        if not known:
            near = did_you_mean(option.lstrip("-"), (one.lstrip("-") for one in options if len(one) > 2))
            help_ = f"did you mean `--{near.new}`?" if near else f"`peftc {name} --help` lists all"
            _fail(f"peftc {name}", f"there is no option `{option}`", help_)


def _is_number(word: str) -> bool:
    with suppress(ValueError):
        float(word)
        return True
    return False


def _fail(program: str, message: str, help_: str) -> NoReturn:
    print(f"{program}: {message}; {help_}", file=sys.stderr)
    sys.exit(2)


def parser(command: str | None = None) -> Parser:
    """The parser. `command`: the one whose arguments are needed; the others have none then."""
    top = Parser(prog="peftc", description=DESCRIPTION, formatter_class=HelpFormatter)
    top.add_argument("--version", action="version", version=f"peftc {__version__}")
    # With `prog`, argparse formats no usage for it, which imports archivers.
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="peftc")
    for name, one in COMMANDS.items():
        own = commands.add_parser(name, help=one.help, formatter_class=HelpFormatter)
        if command in (None, name):
            _add(own, one)
            own.set_defaults(run=_Run(name))
    return top


def _add(own: argparse.ArgumentParser, command: Command) -> None:
    _add_all(own, (*command.arguments, *command.json_alias))
    for group in (command.exclusive, COMMON):
        if group:
            _add_all(own.add_mutually_exclusive_group(), group)


def _add_all(own: argparse._ActionsContainer, arguments: Iterable[Argument]) -> None:  # pyright: ignore[reportPrivateUsage]
    for one in arguments:
        own.add_argument(*one.names, **one.options)


class _Run:
    """The function of a command, whose module is imported when it runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, args: argparse.Namespace) -> int:
        with activity(f"importing what {self.name} needs"):
            module = import_module(f"peftc.cli.{COMMANDS[self.name].module}")
        return getattr(module, f"run_{self.name}")(args)
