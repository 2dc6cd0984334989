"""A `SiteTable` as JSON data, and back.

A dataclass is a list of the number of its class and its fields, a tuple a list that begins with -1.
Sites are stored once for each kind of layer, as their list has them. Of the modules of layers of
one kind the text is stored once, with a mark in the place of each layer's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, groupby
from typing import Any, cast

from peftc.addressing import sites
from peftc.addressing.renaming import LayerName
from peftc.addressing.site_list import Block, Numbers, SiteList, Template, TemplateSite, site_list
from peftc.addressing.sites import ModuleInfo, Site, SiteTable
from peftc.forms import shapes

_CLASSES: tuple[type[Any], ...] = (
    *(
        cls
        for module in (shapes, sites)
        for cls in vars(module).values()
        if isinstance(cls, type) and is_dataclass(cls) and cls is not SiteTable
    ),
    LayerName,
    Numbers,
)
_NUMBERS: dict[type[Any], int] = {cls: number for number, cls in enumerate(_CLASSES)}
_FIELDS = tuple(tuple(field.name for field in fields(cls)) for cls in _CLASSES)
_TUPLE, _SET = -1, -2
# Marks of a layer's module, path and number: JSON has no such characters outside of escapes.
_MODULE, _PATH, _NUMBER = "\x01", "\x02", "\x03"
_SITES, _MODULES = "sites", "modules"
_TEXTS, _COUNTS = ("model_id", "model_type", "fingerprint"), ("parameters", "d_model", "fingerprint_version")

Runs = list[list[Any]]  # the number of a text, and the module, path and number of a layer


def encode_table(table: SiteTable) -> dict[str, Any]:
    """The table as JSON data."""
    names = [field.name for field in fields(table) if field.name not in (_SITES, _MODULES)]
    sites = site_list(table)
    layers = {layer.module: (layer.path, layer.steps[-1][1] or 0) for b in sites.blocks if (layer := b.layer)}
    texts: dict[str, int] = {}
    modules = _fold(table.modules, lambda module: _layer_of(module.name, layers), layers, texts)
    data = {name: encode(getattr(table, name)) for name in names}
    return {**data, _SITES: _encode_sites(sites), _MODULES: modules, "texts": list(texts)}


def decode_table(data: Mapping[str, Any]) -> SiteTable:
    """The table of JSON data. Raises: ValueError, TypeError, LookupError for other data."""
    names = {field.name for field in fields(SiteTable)}
    if {*data} != {*names, "texts"}:
        raise ValueError
    sites, modules = _decode_sites(data[_SITES]), tuple(_unfold(data[_MODULES], data["texts"]))
    others = {name: decode(data[name]) for name in names - {_SITES, _MODULES}}
    table = SiteTable(**others, sites=sites, modules=modules)
    kinds = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_COUNTS, int)}
    items = ((getattr(table, name), kind) for name, kind in kinds.items())
    if any(type(part) is not kind for part, kind in chain(items, ((module, ModuleInfo) for module in modules))):
        raise ValueError
    return table


def _encode_sites(sites: SiteList) -> dict[str, Any]:
    """The templates, and the template and the layer of each block."""
    templates = {id(block.template): block.template for block in sites.blocks}
    numbers = {key: i for i, key in enumerate(templates)}
    return {
        "templates": [_encode_template(template) for template in templates.values()],
        "blocks": [[numbers[id(block.template)], encode(block.layer)] for block in sites.blocks],
    }


def _encode_template(template: Template) -> list[Any]:
    networks = {id(item.numbers): item.numbers for item in template.items if item.numbers is not None}
    index = {key: i for i, key in enumerate(networks)}
    items = [[encode(item.site), index.get(id(item.numbers), -1)] for item in template.items]
    return [encode(template.layer), items, list(map(encode, networks.values()))]


def _decode_sites(data: Any) -> SiteList:
    templates = list(map(_decode_template, data["templates"]))
    blocks = [Block(templates[number], decode(layer)) for number, layer in data["blocks"]]
    if any(type(block.layer) not in (LayerName, type(None)) for block in blocks):
        raise ValueError
    return SiteList(blocks)


def _decode_template(data: Any) -> Template:
    layer, items, networks = data
    numbers = (*map(decode, networks), None)  # the last is that of -1
    template = Template(decode(layer), tuple(TemplateSite(decode(site), numbers[i]) for site, i in items))
    parts = ((template.layer, LayerName | None), *((n, Numbers | None) for n in numbers))
    if any(not isinstance(part, kind) for part, kind in parts) or any(type(i.site) is not Site for i in template.items):
        raise ValueError
    return template


def encode(value: Any) -> Any:
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
