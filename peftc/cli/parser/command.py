"""What a command is."""

from dataclasses import dataclass

from peftc.cli.parser.arguments import QUIET, VERBOSE, Argument


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
        return (*self.arguments, *self.exclusive, *COMMON)


COMMON = (QUIET, VERBOSE)  # of all commands; not both
