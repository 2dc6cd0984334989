"""What may stand at the cursor of a command line: commands, options, models, recipes, files.

Nothing is traced and torch is not imported: the sites of a model are those of its cached table.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from peftc.cli.parser.arguments import Argument, Values
from peftc.cli.parser.commands import COMMANDS
from peftc.diagnostics.codes import CODES
from peftc.filesystem import resources
from peftc.models.catalogue_file import catalogue_ids


class Candidate(NamedTuple):
    """A word, and what it is."""

    word: str
    help: str = ""


class Place(NamedTuple):
    """Where the cursor is: in the value of an argument, or where an option may begin."""

    argument: Argument | None
    options: Mapping[str, str]  # the values before it, by the names of options
    used: frozenset[str]  # all names of the options before it


def candidates(words: Sequence[str]) -> list[Candidate]:
    """What the last of these words may be. The words are those behind `peftc`."""
    *before, current = words
    if not before:
        commands = [Candidate(name, one.help) for name, one in COMMANDS.items()]
        return _fitting([*commands, Candidate("--help"), Candidate("--version")], current)
    if before[0] not in COMMANDS:
        return []
    command = COMMANDS[before[0]].every_argument
    place = _place(command, before[1:])
    if current.startswith("-") and (place.argument is None or not place.argument.is_option):
        name, equals, value = current.partition("=")
        option = next((one for one in command if name in one.names), None)
        if equals and option is not None and not option.is_flag:
            return [one._replace(word=f"{name}={one.word}") for one in _values(option, value, place)]
        return _fitting(_options(command, place), current)
    return _values(place.argument, current, place) if place.argument is not None else []


def _place(command: Sequence[Argument], before: Sequence[str]) -> Place:
    """The place behind some words: that of a value, or of an argument without an option."""
    options: dict[str, str] = {}
    used: set[str] = set()
    pending: Argument | None = None
    number = 0
    for word in before:
        if pending is not None:
            options[pending.names[0]], pending = word, None
        elif word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            option = next((one for one in command if name in one.names), None)
            if option is not None:
                used |= {*option.names} if not option.is_repeatable else set()
                if equals:
                    options[option.names[0]] = value
                elif not option.is_flag:
                    pending = option
        else:
            number += 1
    if pending is None:
        own = [one for one in command if not one.is_option]
        last_is_repeatable = bool(own) and own[-1].is_repeatable
        pending = own[number] if number < len(own) else own[-1] if last_is_repeatable else None
    return Place(pending, options, frozenset(used))


def _options(command: Sequence[Argument], place: Place) -> Iterator[Candidate]:
    for one in command:
        if one.is_option and not place.used & {*one.names}:
            yield Candidate(one.names[-1], one.options.get("help", ""))
    yield Candidate("--help", "show the options")


def _values(argument: Argument, current: str, place: Place) -> list[Candidate]:
    choices: Iterable[str] | None = argument.options.get("choices")
    if choices is not None:
        return _fitting(map(Candidate, choices), current)
    return _fitting(_SOURCES[argument.values](current, place), current)


def _fitting(words: Iterable[Candidate], current: str) -> list[Candidate]:
    """Those that begin with the current word, each once."""
    return list({one.word: one for one in words if one.word.startswith(current)}.values())


# What each kind of value may be.


def _nothing(current: str, place: Place) -> Iterator[Candidate]:
    yield from ()


def _models(current: str, place: Place) -> Iterator[Candidate]:
    yield from map(Candidate, catalogue_ids())
    yield from _paths(current, lambda name: name.endswith(".json"))


def _recipes(current: str, place: Place) -> Iterator[Candidate]:
    yield from map(Candidate, resources.recipes())


def _forms(current: str, place: Place) -> Iterator[Candidate]:
    yield from map(Candidate, import_module("peftc.equations.table").FORMS)


def _codes(current: str, place: Place) -> Iterator[Candidate]:
    yield from (Candidate(code, info.title) for code, info in sorted(CODES.items()))


def _codes_and_forms(current: str, place: Place) -> Iterator[Candidate]:
    yield from _codes(current, place)
    yield from _forms(current, place)


def _specs(current: str, place: Place) -> Iterator[Candidate]:
    yield from _paths(current, lambda name: name.endswith(".peft"))


def _folders(current: str, place: Place) -> Iterator[Candidate]:
    yield from _paths(current, lambda name: False)


def _files(current: str, place: Place) -> Iterator[Candidate]:
    yield from _paths(current, lambda name: True)


def _recipes_and_folders(current: str, place: Place) -> Iterator[Candidate]:
    yield from _recipes(current, place)
    yield from _folders(current, place)


def _sites(current: str, place: Place) -> Iterator[Candidate]:
    """The sites of `--model`, for all layers and without the name of the stack, too."""
    table = import_module("peftc.cache.lookup").cached_table(place.options.get("--model", ""))
    show_steps = import_module("peftc.addressing.site_list").show_steps
    for site in table.sites if table is not None else ():
        path = re.sub(r"\[\d+\]", "[*]", show_steps(site.steps))
        yield Candidate(path)
        yield Candidate(re.sub(r"^\w+\.(?=layer\b)", "", path))


def _paths(current: str, wanted: Callable[[str], bool]) -> Iterator[Candidate]:
    """Folders, and the files that are wanted. Hidden ones only where the name begins with a dot."""
    folder, name = os.path.split(current)
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            own = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in own:
        if entry.name.startswith(".") and not name.startswith("."):
            continue
        path = os.path.join(folder, entry.name)
        if entry.is_dir():
            yield Candidate(f"{path}/")
        elif wanted(entry.name):
            yield Candidate(path)


_SOURCES: Mapping[Values, Callable[[str, Place], Iterator[Candidate]]] = {
    "": _nothing,
    "spec": _specs,
    "model": _models,
    "recipe": _recipes,
    "form": _forms,
    "code": _codes,
    "code or form": _codes_and_forms,
    "selector": _sites,
    "folder": _folders,
    "file": _files,
    "recipe or folder": _recipes_and_folders,
}
