"""Compares the analysis of a model whose repeated layers are copied lazily with that of plain
copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import nn

from peftc.installation.model_state import read_state
from peftc.models import skeleton as skeletons
from peftc.models.sources import resolve
from peftc.modules.lazy_children import LazyChildren
from peftc.recognition.analysis import Analysis, analyse


@contextmanager
def plain_copies() -> Iterator[None]:
    """Inside, skeletons have no lazy children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeletons, "lazy_copy", lambda *args, **kwargs: None)
        yield


def facts_of(analysis: Analysis) -> dict[str, Any]:
    """All that an analysis says, in order, without graphs."""
    table, structure = analysis.table, analysis.structure
    facts: dict[str, Any] = {field.name: getattr(table, field.name) for field in fields(table)}
    facts |= {"sites": [*table.sites], "modules": [*table.modules]}
    seen = structure.seen
    kinds = dict[str, int]()
    facts["calls"] = [*seen.calls.items()]
    facts["layers"] = [(name, kinds.setdefault(key, len(kinds))) for name, (key, _) in seen.layers.items()]
    facts |= {name: getattr(seen, name) for name in ("candidates", "outside_layers", "modality", "external_reads")}
    facts |= {name: [*getattr(seen, name).items()] for name in ("callers", "cross_layer_calls", "parameter_lines")}
    facts |= {"products": dict(seen.token_products), "own products": seen.weight_products}
    types = dict[int, int]()
    for kind in (kind for stack in structure.stacks for kind in stack.kinds):
        types.setdefault(id(kind), len(types))
    facts["stacks"] = [(s.name, s.path, s.layers, [types[id(k)] for k in s.kinds], s.roots) for s in structure.stacks]
    return facts | {"untraced layers": structure.untraced}


def lazy_layers(analysis: Analysis) -> list[str]:
    """The layers whose children the analysis has not looked at."""
    model = analysis.structure.model
    return [name for name, module in _outer(model, "") if type(vars(module)["_modules"]) is LazyChildren]


def _outer(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    children = vars(module)["_modules"]
    for child_name, child in children.items() if type(children) is not LazyChildren else ():
        if child is not None:
            yield from _outer(child, f"{name}.{child_name}".lstrip("."))


def check_same_analysis(model: nn.Module, sample: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the layers that stay lazy."""
    with plain_copies():
        other = analyse(model, sample)
    own = facts_of(other)
    layers: list[list[str]] = []
    for rows in dict.fromkeys((None, read_state(model)[1])):
        analysis = analyse(replace(resolve(model), rows=rows), sample)
        layers.append(lazy_layers(analysis))
        for name, fact in facts_of(analysis).items():
            assert own[name] == fact, name
        check_same_modules(analysis.structure.model, other.structure.model)
    assert layers[0] == layers[-1]
    return layers[0]


def check_same_modules(model: nn.Module, other: nn.Module) -> None:
    """Whether two skeletons have equal modules, attributes and layouts."""
    pairs = zip(model.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False), strict=True)
    numbers: dict[int, int] = {}
    for (name, one), (other_name, two) in pairs:
        assert (name, type(one)) == (other_name, type(two))
        assert vars(one).keys() == vars(two).keys()
        assert numbers.setdefault(id(one), id(two)) == id(two)
        for key, value in vars(one).items():
            if type(value) in (bool, int, float, str, tuple, list, type(None)):
                assert str(value) == str(vars(two)[key]), (name, key)
        for table in ("_parameters", "_buffers"):
            for key, tensor in vars(one)[table].items():
                same = vars(two)[table][key]
                assert (tensor is None) == (same is None)
                if tensor is not None:
                    assert numbers.setdefault(id(tensor), id(same)) == id(same)
                    assert numbers.setdefault(-id(same), id(tensor)) == id(tensor)
                    assert layout(tensor) == layout(same), (name, key)


def layout(tensor: Any) -> tuple[Any, ...]:
    facts = (type(tensor), isinstance(tensor, nn.Parameter), tensor.shape, tensor.stride(), tensor.dtype)
    return *facts, tensor.device, tensor.requires_grad, vars(tensor).get("_peftc_memory")
