"""The spec of an adapter that comes in: its equations, at the modules that have them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.selector_text import Selectors

_WIDTH = 110  # of a line of the text


@dataclass(frozen=True, eq=False)
class ModulePart:
    """What an adapter has at a module. `tensors`: by `form.parameter`; others as in `PeftRow`.

    `place`: the selector of the place where it stands instead, whose module has no name here.
    `by_site`: the tensors by the path of a site, where the module has several.
    `group`: of parts that are one edit, where others have the same equation. `tasks`: how many have
    parameters of their own, which are the first dimension of the tensors `by_task`.
    """

    module: str
    equation: str
    tensors: Mapping[str, Tensor]
    step: str = ""
    form: str = ""
    place: str = ""
    by_site: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict[str, Mapping[str, Tensor]])
    group: tuple[Hashable, ...] = ()
    tasks: int = 0
    by_task: Collection[str] = ()

    @property
    def count(self) -> int:
        """How many tensors it has."""
        return len(self.tensors) + sum(map(len, self.by_site.values()))


@dataclass(frozen=True, eq=False)
class IncomingEdit:
    """An edit of the spec, with its parts by module; or parameters of the base that it trains."""

    name: str
    text: str
    parts: Mapping[str, ModulePart]


def edits_of(parts: Iterable[ModulePart], selectors: Selectors, name: str) -> list[IncomingEdit]:
    """One edit for each equation. Raises: P804 for a module that no selector selects alone."""
    groups: dict[tuple[str, str, tuple[Hashable, ...]], dict[str, ModulePart]] = {}
    for part in parts:
        groups.setdefault((part.equation, part.step, part.group), {})[part.module] = part
    edits = list[IncomingEdit]()
    for number, ((equation, step, _), own) in enumerate(groups.items(), 1):
        (place, *_) = {part.place for part in own.values()}
        head = " per task" if any(part.tasks for part in own.values()) else ""
        arms = [place] if place else _selector(selectors, list(own), step)
        edit = name if len(groups) == 1 else f"{name}_{number}"
        edits.append(IncomingEdit(edit, statement(f"edit {edit} at ", arms, f"{head} {{ {equation} }}"), own))
    return edits


def trained_text(parameters: Sequence[str], selectors: Selectors, name: str) -> list[str]:
    """`train` statements for parameters of the base. Raises: P804."""
    modules: dict[str, set[str]] = {}
    for parameter in parameters:
        module, _, attribute = parameter.rpartition(".")
        modules.setdefault(module, set()).add({"weight": "w", "bias": "b"}.get(attribute, attribute))
    groups: dict[tuple[str, ...], list[str]] = {}
    for module, states in modules.items():
        if not states <= {"w", "b"}:
            raise unfit(f"`{module}` is saved with {', '.join(sorted(states))}, and `train` takes weights and biases")
        groups.setdefault(tuple(sorted(states, reverse=True)), []).append(module)
    texts = list[str]()
    for number, (states, own) in enumerate(groups.items(), 1):
        train = name if len(groups) == 1 else f"{name}_{number}"
        texts.append(statement(f"train {train} = [{', '.join(states)}] at ", _selector(selectors, own, ""), ""))
    return texts


def _selector(selectors: Selectors, modules: list[str], step: str) -> list[str]:
    text = selectors.text(modules, step)
    if text is None:
        raise unfit(f"no selector names `{modules[0]}` and the others like it alone")
    return text.split(" | ")


def statement(head: str, arms: Sequence[str], tail: str) -> str:
    """A statement on one line, or with its arms on lines of their own."""
    line = head + " | ".join(arms) + tail
    return line if len(line) <= _WIDTH else head + "\n    | ".join(arms) + tail


def unfit(message: str, *notes: str) -> PeftcError:
    help_ = "name the base that the adapter was trained on: `--model`, or `model=`"
    return PeftcError(Diagnostic("P804", message, notes=notes, help=help_))
