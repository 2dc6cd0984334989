"""A `SiteTable` as JSON data, and back.

A dataclass is a list of the number of its class and its fields, a tuple a list that begins with -1.
Sites and modules are stored once for each kind of layer, as their lists have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from peftc.addressing import sites
from peftc.addressing.module_infos import ModuleBlock, ModuleInfos, ModuleTemplate, infos_of
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
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SITES, _MODULES = "sites", "modules"
_TEXTS, _COUNTS = ("model_id", "model_type", "fingerprint"), ("parameters", "d_model", "fingerprint_version")


def encode_table(table: SiteTable) -> dict[str, Any]:
    """The table as JSON data."""
    names = [field.name for field in fields(table) if field.name not in (_SITES, _MODULES)]
    data = {name: encode(getattr(table, name)) for name in names}
    return {**data, _SITES: _encode_sites(site_list(table)), _MODULES: _encode_modules(infos_of(table))}


def decode_table(data: Mapping[str, Any]) -> SiteTable:
    """The table of JSON data. Raises: ValueError, TypeError, LookupError for other data."""
    names = {field.name for field in fields(SiteTable)}
    if {*data} != names:
        raise ValueError
    others = {name: decode(data[name]) for name in names - {_SITES, _MODULES}}
    table = SiteTable(**others, sites=_decode_sites(data[_SITES]), modules=_decode_modules(data[_MODULES]))
    kinds = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_COUNTS, int)}
    if any(type(getattr(table, name)) is not kind for name, kind in kinds.items()):
        raise ValueError
    return table


def _encode_modules(modules: ModuleInfos) -> dict[str, Any]:
    """The templates, and the template and the layer of each block."""
    templates = {id(block.template): block.template for block in modules.blocks}
    numbers = {key: i for i, key in enumerate(templates)}
    return {
        "templates": [list(map(encode, template.modules)) for template in templates.values()],
        "blocks": [[numbers[id(block.template)], block.layer] for block in modules.blocks],
    }


def _decode_modules(data: Any) -> ModuleInfos:
    templates = [ModuleTemplate(tuple(map(decode, modules))) for modules in data["templates"]]
    blocks = [ModuleBlock(templates[number], layer) for number, layer in data["blocks"]]
    if any(type(module) is not ModuleInfo for template in templates for module in template.modules):
        raise ValueError
    if any(type(block.layer) is not str for block in blocks):
        raise ValueError
    return ModuleInfos(blocks)


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
    if type(value) in _PLAIN:
        return value
    number = _NUMBERS.get(type(value))
    if number is not None:
        return [number, *(encode(getattr(value, name)) for name in _FIELDS[number])]
    if isinstance(value, tuple):
        return [_TUPLE, *map(encode, value)]
    if isinstance(value, frozenset):
        return [_SET, *sorted(map(encode, value))]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, bool | int | float | str):  # of a class derived from one
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
