"""What `check` is to do: the command line, else the configuration."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from peftc.checking.policy import Policy
from peftc.checking.run import Checker
from peftc.checking.targets import Target
from peftc.cli.spec_files import Unusable
from peftc.diagnostics.suggestions import did_you_mean


def find_configuration(args: Namespace) -> Any:
    """The one of `--config`, or of the nearest folder. Raises: PeftcError P130, P131, P132."""
    if args.isolated:
        return None
    if args.config is not None:
        return import_module("peftc.checking.configuration").read_configuration(Path(args.config))
    here = Path.cwd()
    names = (folder / name for folder in (here, *here.parents) for name in ("peftc.toml", "pyproject.toml"))
    if not any(map(_may_configure, names)):  # pydantic is not imported for nothing
        return None
    return import_module("peftc.checking.configuration").find_configuration(here)


def _may_configure(path: Path) -> bool:
    """Whether a file may have a configuration: a pyproject.toml that names peftc may."""
    if path.name == "peftc.toml":
        return path.is_file()
    try:
        return b"peftc" in path.read_bytes()
    except OSError:
        return False


def checker_of(args: Namespace, configuration: Any) -> Checker:
    """The checker of a run. Raises: Unusable for codes that there are not."""
    check_codes("--select", args.select or ())
    check_codes("--ignore", args.ignore)
    policy, include, targets = Policy(args.select, args.ignore), args.include, targets_of(args)
    if configuration is not None:
        options = configuration.options
        select = options.select if args.select is None else args.select
        errors = [code for code, value in options.severity.items() if value == "error"]
        policy = Policy(select, [*options.ignore, *args.ignore], errors)
        include = [*include, *configuration.include]
        targets = targets if args.model else configuration.targets
    return Checker(targets, include, policy, args.trust_remote_code, args.cache, args.locked)


def targets_of(args: Namespace) -> Callable[[str], Sequence[Target]]:
    tasks = None if args.tasks is None else tuple(args.tasks)
    targets = [Target(model, tasks) for model in dict.fromkeys(args.model)]
    return lambda path: targets


def check_codes(option: str, names: Sequence[str]) -> None:
    """Raises: Unusable for codes that there are not."""
    if not names:
        return
    codes = import_module("peftc.diagnostics.codes").CODES
    for name in names:
        if not name or not any(code.startswith(name) for code in codes):
            help_ = did_you_mean(name, codes)
            raise Unusable(f"{option}: no code begins with `{name}`" + (f"; {help_}" if help_ else ""))
