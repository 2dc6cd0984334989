"""What a command is."""

from dataclasses import dataclass

from peftc.cli.parser.arguments import QUIET, VERBOSE, Argument, argument


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: what it does.
        module: the one of `peftc.cli` with its function, `run_NAME`.
        arguments: all that may be there together.
        exclusive: of which one may be there.
    """

    help: str
    module: str
    arguments: tuple[Argument, ...]
    exclusive: tuple[Argument, ...] = ()

    @property
    def every_argument(self) -> tuple[Argument, ...]:
        return (*self.arguments, *self.json_alias, *self.exclusive, *COMMON)

    @property
    def json_alias(self) -> tuple[Argument, ...]:
        """`--json` of a command that has it by another name, `--format json`."""
        own = {name: one for one in (*self.arguments, *self.exclusive) for name in one.names}
        option = next((name for name in _FORMATS if name in own), None)
        if option is None or "--json" in own:
            return ()
        default, dest = own[option].options["default"], option.lstrip("-").replace("-", "_")
        help_ = f"the same as `{option} json`"
        return (argument("--json", action="store_const", const="json", dest=dest, default=default, help=help_),)


_FORMATS = ("--format", "--output-format")  # of a result, before that of diagnostics
COMMON = (QUIET, VERBOSE)  # of all commands; not both
