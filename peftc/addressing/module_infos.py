"""The modules of a model, once for each kind of layer; a `ModuleInfo` is made when someone asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from peftc.addressing.lazy_sequence import LazySequence
from peftc.addressing.renaming import with_changes
from peftc.addressing.sites import ModuleInfo, SiteTable

_LIST = "_module_infos"  # where a table of plain modules keeps them


@dataclass(frozen=True)
class ModuleTemplate:
    """Modules that follow each other; those of a layer by their names in it, "" for the layer."""

    modules: tuple[ModuleInfo, ...]

    @cached_property
    def by_name(self) -> Mapping[str, ModuleInfo]:
        return {module.name: module for module in self.modules}


@dataclass(frozen=True)
class ModuleBlock:
    """The modules of a layer; or some outside of layers, with "" as `layer`."""

    template: ModuleTemplate
    layer: str = ""

    def __iter__(self) -> Iterator[ModuleInfo]:
        return map(self.named, self.template.modules) if self.layer else iter(self.template.modules)

    def named(self, module: ModuleInfo) -> ModuleInfo:
        """A module of the template with its name in the model."""
        return with_changes(module, name=f"{self.layer}.{module.name}".strip(".")) if self.layer else module


class ModuleInfos(LazySequence[ModuleInfo]):
    """All modules in model order. Iterating makes them; `find` makes one."""

    def __init__(self, blocks: Iterable[ModuleBlock]) -> None:
        self.blocks = tuple(blocks)

    @classmethod
    def of(cls, modules: Iterable[ModuleInfo], layers: Collection[str] = ()) -> ModuleInfos:
        """Modules with the names that they have; layers with equal modules have one template."""
        if isinstance(modules, ModuleInfos):
            return modules
        runs: list[tuple[str, list[ModuleInfo]]] = []
        layer = ""
        for module in modules:
            name = module.name
            if not layer or (name != layer and not name.startswith(f"{layer}.")):
                layer = name if name in layers else ""
            if not runs or runs[-1][0] != layer:
                runs.append((layer, []))
            runs[-1][1].append(with_changes(module, name=name[len(layer) + 1 :]) if layer else module)
        templates: list[ModuleTemplate] = []
        blocks: list[ModuleBlock] = []
        for layer, members in runs:
            template = ModuleTemplate(tuple(members))
            known = next((one for one in templates if layer and one == template), None)
            templates += [template] if layer and known is None else []
            blocks.append(ModuleBlock(known or template, layer))
        return cls(blocks)

    def _make(self) -> Iterable[ModuleInfo]:
        return (module for block in self.blocks for module in block)

    @cached_property
    def _outside(self) -> Mapping[str, ModuleInfo]:
        return {m.name: m for block in self.blocks if not block.layer for m in block.template.modules}

    @cached_property
    def _layers(self) -> Mapping[str, list[ModuleBlock]]:
        layers: dict[str, list[ModuleBlock]] = {}
        for block in self.blocks:
            layers.setdefault(block.layer, []).append(block)
        return layers

    def find(self, name: str) -> ModuleInfo | None:
        """The module of a dotted name."""
        if (module := self._outside.get(name)) is not None:
            return module
        ends = (*(i for i, c in enumerate(name) if c == "."), len(name))
        for end in ends:
            for block in self._layers.get(name[:end], ()) if end else ():
                if (module := block.template.by_name.get(name[end + 1 :])) is not None:
                    return block.named(module)
        return None

    def __len__(self) -> int:
        return sum(len(block.template.modules) for block in self.blocks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ModuleInfos) and other.blocks == self.blocks:
            return True
        return isinstance(other, ModuleInfos | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as that of `SiteList`

    def __repr__(self) -> str:
        return repr(tuple(self))


def infos_of(table: SiteTable) -> ModuleInfos:
    """The modules of a table, by kinds of layers where these are known."""
    if isinstance(table.modules, ModuleInfos):
        return table.modules
    if (modules := vars(table).get(_LIST)) is None:
        modules = vars(table)[_LIST] = ModuleInfos.of(table.modules)
    return modules


def used_ties(table: SiteTable) -> list[list[str]]:
    """The groups of tied parameters, without names through which no forward reads the parameter.

    Such names belong to modules that no forward calls (a `shared` embedding next to those of the
    stacks), to modules around the called one (a head whose `bias` is that of its Linear), and to
    other names of a whole layer, or of what holds it (Enformer's `_trunk` and `transformer`).
    """
    modules = infos_of(table)

    def is_read(name: str, group: Iterable[str]) -> bool:
        module = name.rpartition(".")[0]
        info = modules.find(module)
        is_called = info is not None and info.called
        return is_called and not any(o.rpartition(".")[0].startswith(f"{module}.") for o in group)

    return [[name for name in group if is_read(name, group)] for group in table.tied]
