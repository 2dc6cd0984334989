"""From a model, or the name of one, to its sites."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from peftc.addressing.site_list import SiteList
from peftc.addressing.sites import SiteTable, UntracedModule
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.python_globals import unchanged_globals
from peftc.fakes.tensors import fake_mode
from peftc.models.identity import VERSION, ParameterFacts
from peftc.models.skeleton import skeleton, skeleton_sample
from peftc.models.sources import ModelSource, resolve
from peftc.modules.instance_forward import instance_forward
from peftc.modules.lazy_children import lazy_children
from peftc.modules.walk import (
    all_named_modules,
    has_aliases,
    modules_outside,
    named_modules,
    outline,
    set_eval,
    submodule,
)
from peftc.recognition.layer_types import example_width
from peftc.recognition.layers import ModelStructure, analyze_structure
from peftc.recognition.non_layer_sites import module_infos, untraced_modules
from peftc.recognition.site_builder import all_sites
from peftc.recognition.stack_names import name_stacks
from peftc.recognition.unplaced.hidden_modules import hidden_module_lines
from peftc.recognition.unplaced.modules import unplaced_modules
from peftc.tracing.tracer import UNKNOWN_MODULE

ModelLike = str | PathLike[str] | PretrainedConfig | nn.Module


@dataclass(eq=False)
class Analysis:
    """A model taken apart: its skeleton's traced layers, and the table of its sites."""

    structure: ModelStructure
    table: SiteTable


def analyse(model: ModelLike | ModelSource, sample: Mapping[str, Any] | None = None) -> Analysis:
    """Traces a model on fake tensors; no weight is read.

    Args: `sample`: keyword arguments of one forward, for a model that cannot be fed from its
    config.
    Raises: P501-P507, P511 (the model).
    """
    source = model if isinstance(model, ModelSource) else resolve(model)
    fake = set_eval(skeleton(source))
    _check_names(fake)
    with unchanged_globals(fake):
        structure = analyze_structure(fake, skeleton_sample(source, sample), fake_mode(fake))
    name_stacks(structure)
    structure.shared = shared_modules(structure)
    layers = [kind for stack in structure.stacks for kind in stack.kinds]
    sites = all_sites(structure)
    untraced = _with_hidden_modules(untraced_modules(structure), fake if source.module is None else source.module)
    parameters = ParameterFacts.of(fake)
    table = SiteTable(
        model_id=source.id,
        model_type=source.type,
        parameters=parameters.count,
        d_model=example_width(layers[0]) if layers else 0,
        fingerprint=parameters.fingerprint,
        fingerprint_version=VERSION,
        sites=sites,
        modules=module_infos(structure, source.module),
        tied=parameters.tied,
        overlaps=parameters.overlaps,
        shared_modules=structure.shared,
        aliases=tuple(module_aliases(structure)),
        cross_layer_calls=tuple(structure.seen.cross_layer_calls.items()),
        external_reads=(*_external_reads(structure),),
        warnings=tuple(_warnings(source, fake, sites, untraced)),
        untraced=untraced,
        unplaced=unplaced_modules(structure),
        positions=_positions(fake),
    )
    return Analysis(structure, table)


def _with_hidden_modules(untraced: tuple[UntracedModule, ...], model: nn.Module) -> tuple[UntracedModule, ...]:
    """With the attribute that may hold the module which stopped a trace."""
    if not any(UNKNOWN_MODULE in one.reason for one in untraced) or not (lines := hidden_module_lines(model)):
        return untraced
    return tuple(
        replace(one, reason=f"{one.reason}; {lines[0]}") if UNKNOWN_MODULE in one.reason else one for one in untraced
    )


def _external_reads(structure: ModelStructure) -> Iterator[tuple[str, ...]]:
    """Each parameter that code outside of its module computes with, too, and whose code it is."""
    yield from ((name, *readers) for name, readers in structure.seen.external_reads.items())
    for stack in structure.stacks:
        for root, kind in zip(stack.roots, stack.kinds, strict=True):
            yield from ((f"{root}.{name}".strip("."), root) for name, _ in kind.layer.further_reads)


def _check_names(model: nn.Module) -> None:
    """Raises: P511 for a name that is no text, or that is hidden by an attribute."""
    # A layer with lazy children has the names of an earlier one.
    modules = [pair for pair in modules_outside(model) if lazy_children(pair[1]) is None]
    texts = set[str]()
    hides = cache(_may_hide_children)
    for owner, parent in modules:
        own = vars(parent)
        children, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
        if isinstance(parent, torch.jit.ScriptModule):
            continue  # its tables are no dicts
        for name in chain(children, parameters, buffers):
            if name not in texts:
                _check_text(owner, name)
                texts.add(name)
        if not children:
            continue
        is_plain = all(map(children.keys().isdisjoint, (own, parameters, buffers)))
        if is_plain and not hides(type(parent), *children):
            continue
        for name, module in parent.named_children():
            if getattr(parent, name, None) is not module:
                shown = f"{owner}.{name}".lstrip(".")
                message = f"`{shown}` is hidden by an attribute of {type(parent).__name__} that has the same name"
                raise PeftcError(Diagnostic("P511", message, help="rename the module"))


def _check_text(owner: str, name: str) -> None:
    """Raises: P511 for a name that no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = f"{owner}.{name}".lstrip(".").encode(errors="backslashreplace").decode()
        message = f"the name `{shown}` cannot be written in any file"
        raise PeftcError(Diagnostic("P511", message, help="rename the module")) from None


def _may_hide_children(cls: type[nn.Module], *names: str) -> bool:
    """Whether modules of a class may have other attributes of the names of children."""
    is_plain = cls.__getattr__ is nn.Module.__getattr__ and cls.__getattribute__ is object.__getattribute__
    return bool(names) and (not is_plain or any(hasattr(cls, name) for name in names))


def _warnings(
    source: ModelSource, fake: nn.Module, sites: SiteList, untraced: tuple[UntracedModule, ...]
) -> Iterator[str]:
    """What a model lacks; and the modules of one in memory whose code is unknown."""
    templates = {id(block.template): block.template for block in sites.blocks}
    words = {step for template in templates.values() for item in template.items for step, _ in item.site.steps}
    if "layer" not in words:
        yield f"{source.id} has no transformer layers: only its modules have names"
        yield from hidden_module_lines(fake if source.module is None else source.module)
    elif "attn" not in words and not any("attn" in module.roles for module in untraced):
        yield f"{source.id} has no attention: `attn` and the sites below it name nothing"
    # A module with such a forward is no lazy child.
    if (model := source.module) is None:
        return
    for name, _ in modules_outside(fake):
        if (forward := instance_forward(submodule(model, name))) is not None and forward.function is None:
            yield f"`{name}` has a `forward` in its instance that could not be traced"


def _positions(model: nn.Module) -> int | None:
    """The most tokens by the configuration, less rows for padding in a table of positions."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:  # some say -1 for any number
        return None
    tables = [m for _, m in outline(model) if isinstance(m, nn.Embedding) and m.num_embeddings == count]
    if count == getattr(text, "vocab_size", None):
        return count  # these tables may be of words
    return count - max((m.padding_idx + 1 for m in tables if m.padding_idx is not None), default=0)


def module_aliases(structure: ModelStructure) -> Iterator[tuple[str, str]]:
    """Further names of modules, and those that they have in a table. Not of modules inside one with
    a further name.
    """
    if not has_aliases(structure.model):
        return
    names, every = named_modules(structure.model), all_named_modules(structure.model)
    first = {id(module): name for name, module in names}
    grouped = frozenset(chain.from_iterable(structure.shared))
    others: dict[str, str] = {}
    for name, module in every:
        own = first[id(module)]
        if name == own or name in grouped:
            continue
        others[name] = own
        parent, _, last = name.rpartition(".")
        if parent not in others or f"{others[parent]}.{last}" != own:
            yield name, own


def shared_modules(structure: ModelStructure) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names under which one module is used, each in the order of the layers.

    A whole layer with several names is no such group: it is one layer, which runs several times.
    """
    if not has_aliases(structure.model):
        return ()
    groups: dict[int, list[str]] = {}
    layers = dict.fromkeys(name for stack in structure.stacks for name in stack.modules)
    for layer in layers:
        for name, module in named_modules(submodule(structure.model, layer), layer):
            groups.setdefault(id(module), []).append(name)
    in_layers = {id(submodule(structure.model, layer)) for layer in layers}
    for name, module in _outside_layers(structure.model, in_layers):
        names = groups.get(id(module), [])
        if not structure.seen.outside_layers.isdisjoint(names) and name not in names:
            names.append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _outside_layers(module: nn.Module, layers: Collection[int], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module that is not in a layer, under each of its names. `layers`: by `id`."""
    yield name, module
    for child_name, child in vars(module)["_modules"].items():
        if child is not None and id(child) not in layers:
            yield from _outside_layers(child, layers, f"{name}.{child_name}".lstrip("."))
