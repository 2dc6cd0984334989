"""The shortest names by which PEFT finds just these modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", int, float)


def target_names(targets: Collection[str], modules: Collection[str]) -> list[str] | str:
    """`target_modules`: ends of names that fit the targets alone, or a regular expression.

    PEFT takes a module whose name is one of them, or ends with a point and one of them.
    """
    own, names = set(targets), list[str]()
    for target in targets:
        if any(_fits(target, name) for name in names):
            continue
        ends = (target.split(".", i)[-1] for i in range(target.count("."), -1, -1))
        fitting = (end for end in ends if all(module in own for module in modules if _fits(module, end)))
        end = next(fitting, None)
        if end is None:
            return "|".join(f"(?:{re.escape(one)})" for one in targets)
        names.append(end)
    return names


def _fits(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def saved_names(chosen: Iterable[str], modules: Collection[str]) -> list[str] | None:
    """`modules_to_save`: names that no other module's name ends with. None where there are none."""
    own = list(chosen)
    names = list[str]()
    for target in own:
        ends = (target.split(".", i)[-1] for i in range(target.count("."), -1, -1))
        end = next((one for one in ends if all(m in own for m in modules if m.endswith(one))), None)
        if end is None:
            return None
        names.append(end)
    return list(dict.fromkeys(names))


def pattern_of(values: Mapping[str, T]) -> tuple[T, dict[str, T]]:
    """The commonest value, and `rank_pattern` or `alpha_pattern` for modules with others.

    Keys are the last part of a name where all targets that end so agree, else `^` and the name.
    """
    default = Counter(values.values()).most_common(1)[0][0]
    ends: dict[str, set[T]] = {}
    for name, value in values.items():
        ends.setdefault(name.rpartition(".")[2], set()).add(value)
    others = ((name, value) for name, value in values.items() if value != default)
    pattern = {
        (end if len(ends[end := name.rpartition(".")[2]]) == 1 else f"^{re.escape(name)}"): value
        for name, value in others
    }
    return default, pattern


def largest_owners(parameters: Collection[str], every: Sequence[str]) -> dict[str, list[str]] | None:
    """Modules, as large as may be, of which all parameters are among these; None if some are left.

    Args: `every`: the names of all parameters of the model.
    """
    left, owners = set(parameters), dict[str, list[str]]()
    for name in parameters:
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1) if name in left else ():
            owner = ".".join(parts[:depth])
            own = [one for one in every if one.startswith(f"{owner}.")]
            if all(one in parameters for one in own):
                owners[owner] = own
                left -= set(own)
                break
    return None if left else owners
