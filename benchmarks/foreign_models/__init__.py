"""Models that are not transformers', each with the role table that its source code has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

from benchmarks.foreign_models.case import Case


def modules() -> list[str]:
    """The modules of this package that have CASES: "timm", "hand_written.classic"."""
    names = [module.name.removeprefix(f"{__name__}.") for module in walk_packages(__path__, f"{__name__}.")]
    return [name for name in names if name not in ("case", "hand_written")]


def cases(module: str) -> tuple[Case, ...]:
    """The cases of one module. Raises ImportError where it cannot be imported."""
    return tuple(getattr(import_module(f"{__name__}.{module}"), "CASES", ()))


def every() -> Iterator[tuple[str, Case]]:
    """Each case with its module."""
    for module in modules():
        if module not in broken():
            yield from ((module, case) for case in cases(module))


@cache
def broken() -> dict[str, str]:
    """The modules that cannot be imported, with the reason."""
    reasons: dict[str, str] = {}
    for module in modules():
        try:
            cases(module)
        except ImportError as error:
            reasons[module] = str(error)
    return reasons
