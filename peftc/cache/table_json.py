"""A `SiteTable` as JSON data, and back.

A dataclass is a list of the number of its class and its fields, a tuple a list that begins with -1.
Of layers of one kind the text is stored once, with a mark in the place of each layer's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, groupby
from typing import Any, cast

from peftc.addressing import sites
from peftc.addressing.sites import ModuleInfo, Site, SiteTable
from peftc.forms import shapes

_CLASSES: tuple[type[Any], ...] = tuple(
    cls
    for module in (shapes, sites)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls) and cls is not SiteTable
)
_NUMBERS = {cls: number for number, cls in enumerate(_CLASSES)}
_FIELDS = tuple(tuple(field.name for field in fields(cls)) for cls in _CLASSES)
_TUPLE, _SET = -1, -2
# Marks of a layer's module, path and number: JSON has no such characters outside of escapes.
_MODULE, _PATH, _NUMBER = "\x01", "\x02", "\x03"
_REPEATED = ("sites", "modules")
_TEXTS, _COUNTS = ("model_id", "model_type", "fingerprint"), ("parameters", "d_model", "fingerprint_version")

Runs = list[list[Any]]  # the number of a text, and the module, path and number of a layer


def encode_table(table: SiteTable) -> dict[str, Any]:
    """The table as JSON data."""
    data = {field.name: encode(getattr(table, field.name)) for field in fields(table) if field.name not in _REPEATED}
    layers = {site.root: prefix for site in table.sites if (prefix := _layer_path(site)) is not None}
    texts: dict[str, int] = {}
    sites = _fold(
        table.sites, lambda site: site.root if _layer_path(site) == layers.get(site.root) else "", layers, texts
    )
    modules = _fold(table.modules, lambda module: _layer_of(module.name, layers), layers, texts)
    return {**data, "sites": sites, "modules": modules, "texts": list(texts)}


def decode_table(data: Mapping[str, Any]) -> SiteTable:
    """The table of JSON data. Raises: ValueError, TypeError, LookupError for other data."""
    names = {field.name for field in fields(SiteTable)}
    if {*data} != {*names, "texts"}:
        raise ValueError
    repeated: dict[str, Any] = {name: tuple(_unfold(data[name], data["texts"])) for name in _REPEATED}
    table = SiteTable(**{name: decode(data[name]) for name in names - repeated.keys()}, **repeated)
    kinds = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_COUNTS, int)}
    items = ((getattr(table, name), kind) for name, kind in kinds.items())
    parts = chain(items, ((site, Site) for site in table.sites), ((module, ModuleInfo) for module in table.modules))
    if any(type(part) is not kind for part, kind in parts):
        raise ValueError
    return table


def encode(value: Any) -> Any:
    """A value of a table as JSON data. Raises: TypeError for any other."""
    if is_dataclass(value):
        number = _NUMBERS[type(value)]
        return [number, *(encode(getattr(value, name)) for name in _FIELDS[number])]
    if isinstance(value, tuple):
        return [_TUPLE, *map(encode, value)]
    if isinstance(value, frozenset):
        return [_SET, *sorted(map(encode, value))]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value))


def decode(value: Any) -> Any:
    """The value of JSON data. Raises: as `decode_table`."""
    if type(value) is list:
        number, *items = value
        if number == _TUPLE:
            return tuple([decode(item) if type(item) in (list, dict) else item for item in items])
        if number == _SET:
            return frozenset(map(decode, items))
        if len(items) != len(_FIELDS[number]) or number < 0:
            raise ValueError
        return _CLASSES[number](*[decode(item) if type(item) in (list, dict) else item for item in items])
    if type(value) is dict:
        return {key: decode(item) for key, item in cast(dict[str, Any], value).items()}
    return value


# Layers of one kind


def _layer_path(site: Site) -> tuple[str, int] | None:
    """The path of a site's layer, and its number."""
    for length, (name, number) in enumerate(site.steps, 1):
        if name == "layer" and number is not None:
            parts = (step if at is None else f"{step}[{at}]" for step, at in site.steps[:length])
            return ".".join(parts), number
    return None


def _layer_of(module: str, layers: Mapping[str, Any]) -> str:
    """The layer that a module is in, or is; "" outside of layers."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((name for name in names if name in layers), "")


def _fold(
    items: Iterable[Any],
    layer_of: Callable[[Any], str],
    layers: Mapping[str, tuple[str, int]],
    texts: dict[str, int],
) -> Runs:
    runs: Runs = []
    for layer, group in groupby(items, layer_of):
        text = json.dumps([encode(item) for item in group], ensure_ascii=False, separators=(",", ":"))
        path, number = layers.get(layer, ("", 0))
        folded = _with_marks(text, layer, path, number) if layer else text
        if _without_marks(folded, layer, path, number) != text:
            raise ValueError(layer)
        runs.append([texts.setdefault(folded, len(texts)), layer, path, number])
    return runs


def _unfold(runs: Runs, texts: list[str]) -> Iterator[Any]:
    for number, layer, path, index in runs:
        yield from map(decode, json.loads(_without_marks(texts[number], layer, path, index)))


def _with_marks(text: str, module: str, path: str, number: int) -> str:
    text = re.sub(rf'"{re.escape(module)}(?=["\.])', f'"{_MODULE}', text)
    text = re.sub(rf'"{re.escape(path)}(?=["\.])', f'"{_PATH}', text)
    return text.replace(f'"layer",{number}]', f'"layer",{_NUMBER}]')


def _without_marks(text: str, module: str, path: str, number: int) -> str:
    return text.replace(_MODULE, module).replace(_PATH, path).replace(_NUMBER, str(number))
