"""`moved old -> new`: from the names of an adapter's tensors to those of a spec.

Saved tensors are named `<edit>/<site>/<form>.<parameter>`; those that sites have in common have the
name of a `shared`, or `<edit>.<form>`, in the place of the site.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from peftc.addressing.paths import BRANCHES, align, stack_steps
from peftc.semantics.moves import called_forms, last_name, moves_of, names_of, next_names
from peftc.syntax import ast


@dataclass(frozen=True)
class Moves:
    """What the old names of a spec are now.

    Attributes:
        names: of edits, `train` statements and shared parameters.
        forms: of forms.
        parameters: of parameters of forms, by the present name of the form.
        sites: where edits are, by their present names.
    """

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    forms: Mapping[str, str] = field(default_factory=dict[str, str])
    parameters: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    sites: Sequence[tuple[str, ast.Path, ast.Path]] = ()

    @classmethod
    def of(cls, spec: ast.Spec) -> Moves:
        """The moves of an expanded spec, which has been checked."""
        moves = moves_of(spec)
        if not moves:
            return cls()
        following = next_names(moves)
        ends = {old: last_name(new, following) for old, new in following.items()}
        own, forms = names_of(spec), called_forms(spec)
        form_names = {old: new for old, new in ends.items() if new not in own and new in forms}
        dotted = ((old.rpartition("."), new.rpartition(".")) for old, new in ends.items() if new not in {*own, *forms})
        parameters = {(new[0], old[2]): new[2] for old, new in dotted if new[0] in forms}
        sites = tuple((m.old, m.at, m.to) for m in moves if m.at is not None and m.to is not None)
        return cls({old: new for old, new in ends.items() if new in own}, form_names, parameters, sites)

    def __bool__(self) -> bool:
        return bool(self.names or self.forms or self.parameters or self.sites)

    def renamed(self, saved: Iterable[str], expected: Collection[str]) -> dict[str, str]:
        """From saved names of tensors to those that a plan expects, as far as moves say them."""
        saved = list(saved)
        if not self:
            return {name: name for name in saved}
        free = [name for name in expected if name not in set(saved)]
        by_site = self._by_site(free)
        result: dict[str, str] = {}
        for name in saved:
            candidates = () if name in expected else tuple(self._candidates(name))
            at_sites = (new for one in candidates for new in _of_branch(one, by_site.get(self._key(one), ())))
            new = next((one for one in (*candidates, *at_sites) if one in expected), name)
            result[name] = new if new not in result.values() else name
        return result

    def _candidates(self, name: str) -> Iterator[str]:
        """The names that a saved tensor may have now, at sites of the same names."""
        edit, _, rest = name.partition("/")
        new_edit = self.names.get(edit, edit)
        place, slash, last = rest.rpartition("/")
        for key, new_key, parameter in self._keys(last) if slash else [("", "", last)]:
            for new_place in self._owners(place, edit, new_edit, key, new_key):
                yield f"{new_edit}/{new_place}{slash}{new_key}{parameter}"

    def _keys(self, last: str) -> Iterator[tuple[str, str, str]]:
        """The form of a name, as it was and as it is, and the rest behind it with its parameter."""
        key, _, rest = last.partition(".")
        tasks, dot, parameter = f".{rest}".rpartition(".")
        form, number = (key, "") if key in self.forms else _numbered(key)
        new_form = self.forms.get(form, form)
        yield key, f"{new_form}{number}", f"{tasks}{dot}{self.parameters.get((new_form, parameter), parameter)}"

    def _owners(self, place: str, edit: str, new_edit: str, key: str, new_key: str) -> Iterator[str]:
        """What a site, or an owner of common parameters, may be called now."""
        yield place
        owner, dot, task = place.partition(".tasks.")
        if owner in self.names:
            yield f"{self.names[owner]}{dot}{task}"
        if place == f"{edit}.{key}" or place.startswith(f"{edit}.{key}."):
            yield f"{new_edit}.{new_key}{place.removeprefix(f'{edit}.{key}')}"

    def _by_site(self, expected: Iterable[str]) -> dict[object, list[str]]:
        """Expected names at the new sites of an edit, by what they have in common with old ones."""
        result: dict[object, list[str]] = {}
        for name in expected if self.sites else ():
            edit, _, rest = name.partition("/")
            place, _, last = rest.rpartition("/")
            for number, (owner, _, to) in enumerate(self.sites):
                if owner == edit and matches(to, place):
                    result.setdefault((edit, number, _common_part(place), last), []).append(name)
        return result

    def _key(self, name: str) -> object:
        edit, _, rest = name.partition("/")
        place, _, last = rest.rpartition("/")
        numbers = (n for n, (owner, at, _) in enumerate(self.sites) if owner == edit and matches(at, place))
        return edit, next(numbers, None), _common_part(place), last


def _numbered(key: str) -> tuple[str, str]:
    """`lora` and `_2` of `lora_2`, the second of two in an edit."""
    match = re.fullmatch(r"(.+?)(_\d+)?", key)
    assert match is not None
    return match[1], match[2] or ""


def _numbers(place: str) -> tuple[tuple[str, int | None], ...]:
    """The steps of a site: `layer[3].ffn` is ("layer", 3), ("ffn", None)."""
    parts = filter(None, (re.fullmatch(r"([^\[]*)(?:\[(\d+)\])?", part) for part in place.split(".")))
    return tuple((part[1], None if part[2] is None else int(part[2])) for part in parts)


def _common_part(place: str) -> tuple[object, ...]:
    """What a site has at its old and its new place: its stack, and all numbers."""
    steps = _numbers(place)
    names = [name for name, _ in steps]
    return (*names[: stack_steps(names)], *(number for _, number in steps if number is not None))


def _of_branch(saved: str, names: Sequence[str]) -> Sequence[str]:
    """The names at the same kind of attention, self or cross, if there are several."""
    if len(names) < 2:
        return names
    own = [name for name in names if _branches(name) == _branches(saved)]
    return own if len(own) == 1 else ()


def _branches(name: str) -> list[str]:
    return [part for part in name.split("/")[1].split(".") if part in BRANCHES]


def matches(path: ast.Path, place: str) -> bool:
    """Whether a path of a `moved` names a site, as a selector does."""
    steps = _numbers(place)
    positions = align([step.name for step in path.steps], [name for name, _ in steps])
    return positions is not None and all(
        _holds(step.indices, steps[at][1]) for step, at in zip(path.steps, positions, strict=True)
    )


def _holds(indices: tuple[ast.Index, ...] | None, number: int | None) -> bool:
    if indices is None or number is None:
        return True
    return any(
        (index.start is None or index.start <= number) and (index.stop is None or number <= index.stop)
        for index in indices
    )
