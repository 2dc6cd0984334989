"""The sites of a model, compared with its expected role table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_checks.references import Reference, effective_name, expanded, parse, tensor_of
from benchmarks.foreign_models.case import Case, Stack

# The last steps of roles that a table must list in full.
COMPLETE = ("q", "k", "v", "o", "gate", "up", "down", "norm")


@dataclass(frozen=True)
class Entry:
    """One expected role of one layer. `number` counts the references of the role in the layer."""

    stack: Stack
    layer: str | int
    role: str
    number: int
    text: str
    reference: Reference
    key: tuple[str, bytes]
    optional: bool = False


@dataclass
class Comparison:
    """How the sites of a model differ from its table, a line each.

    Attributes:
        missing: expected, and at no site.
        wrong: at a site of another role, other rows, or another layer; and sites that no table has.
        sites: the expected role at each path that has one.
        partial: roles that some of their expected layers lack.
        expected: the whole table.
    """

    missing: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    sites: dict[str, Entry] = field(default_factory=dict[str, Entry])
    partial: set[str] = field(default_factory=set[str])
    expected: list[Entry] = field(default_factory=list[Entry])

    @property
    def verdict(self) -> str:
        return "wrong" if self.wrong else "missing" if self.missing else "exact"


def entries(case: Case, model: nn.Module) -> list[Entry]:
    """The expected table. Raises ValueError where the table names what the model does not have."""
    canonical = canonical_names(model)
    result: list[Entry] = []
    for stack in case.stacks:
        for layer, (roles, optional) in product(stack.layers, ((stack.roles, False), (stack.optional, True))):
            for role, texts in roles.items():
                for number, text in enumerate(expanded(texts, layer)):
                    reference = parse(text, model)
                    key = _key(canonical, reference.name, reference.matrix(model))
                    result.append(Entry(stack, layer, role, number, text, reference, key, optional))
    return result


def compared(case: Case, model: nn.Module, table: Any) -> Comparison:
    """The difference between a site table and the expected roles."""
    expected, actual = entries(case, model), list(_actual(model, table))
    result = Comparison(expected=[entry for entry in expected if not entry.optional])
    by_key = defaultdict[tuple[str, bytes], list[tuple[Any, str]]](list)
    for site, role, key in actual:
        by_key[key].append((site, role))
    hits = set[str]()
    for entry in expected:
        candidates = by_key[entry.key]
        match = next((site for site, role in candidates if is_role(role, entry.role) and site.path not in hits), None)
        if match is not None:
            result.sites[match.path] = entry
            hits.add(match.path)
        elif not entry.optional:
            _explain(entry, actual, candidates, result)
    extra = [(site, role) for site, role, _ in actual if site.path not in hits and role.split(".")[-1] in COMPLETE]
    result.wrong += [f"{role} at {_weight_name(site)}: not expected" for site, role in extra]
    result.wrong += _layers_out_of_order(result.sites)
    known = {id(entry) for entry in result.sites.values()}
    lacking = {entry.role for entry in result.expected if id(entry) not in known}
    result.partial = lacking & {entry.role for entry in result.sites.values()}
    return result


def is_role(actual: str, expected: str) -> bool:
    """Whether a path below its layer, without numbers, is the expected one."""
    return actual == expected or actual.replace(".self", "", 1).replace(".cross", "", 1) == expected


def role_of(site: Any) -> str:
    """`attn.self.q` for `encoder.layer[3].attn.self.q`; empty outside layers."""
    names = [name for name, _ in site.steps]
    return ".".join(names[names.index("layer") + 1 :]) if "layer" in names else ""


def layer_of(site: Any) -> tuple[str, int]:
    """The stack and the number of a site's layer."""
    at = [name for name, _ in site.steps].index("layer")
    return str(site.steps[:at]), site.steps[at][1] or 0


def canonical_names(model: nn.Module) -> Mapping[str, str]:
    """One name for tied parameters: the first."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}


def _actual(model: nn.Module, table: Any) -> Iterator[tuple[Any, str, tuple[str, bytes]]]:
    canonical = canonical_names(model)
    for site in table.sites:
        state = site.states.get("w")
        if role_of(site) and state is not None and state.weight is not None:
            name = effective_name(f"{state.weight.module}.{state.weight.attribute}".lstrip("."))
            yield site, role_of(site), _key(canonical, name, positions(state, tensor_of(model, name)))


def positions(state: Any, parameter: Tensor) -> Tensor:
    """The flat positions of a site's weight in its parameter."""
    ref, shape = state.weight, state.shape
    entries = torch.arange(parameter.numel()).view(parameter.shape)
    if ref.stacked_slice is not None:
        entries = entries.reshape(ref.stacked_slice.count, -1)[ref.stacked_slice.index]
        width = getattr(shape, "d_in", 1)
        entries = entries.view(width, -1) if ref.transposed else entries.view(-1, width)
    elif ref.layout is not None:  # its dimensions in this order, the first of them (out)
        entries = entries.permute(ref.layout.order).flatten(0, ref.layout.rows - 1)
        entries = entries.reshape(entries.shape[0], -1)
    else:
        entries = entries.reshape(entries.shape[0], -1)
    if ref.transposed:
        entries = entries.T
    return torch.cat([entries[a:b] for a, b in ref.rows.blocks()]) if ref.rows else entries


def _key(canonical: Mapping[str, str], name: str, matrix: Tensor) -> tuple[str, bytes]:
    return canonical.get(name, name), matrix.flatten().sort().values.numpy().tobytes()


def _weight_name(site: Any) -> str:
    ref = site.states["w"].weight
    rows = "" if ref.rows is None else "[" + ", ".join(f"{a}:{b}" for a, b in ref.rows.blocks()) + "]"
    return f"{ref.module}.{ref.attribute}{rows}"


def _explain(entry: Entry, actual: Iterable[Any], candidates: list[tuple[Any, str]], result: Comparison) -> None:
    """Files an expected role that no site has as wrong (something else stands there) or missing."""
    others = sorted({role for _, role in candidates if role.split(".")[-1] in COMPLETE})
    elsewhere = [_weight_name(s) for s, role, key in actual if is_role(role, entry.role) and key[0] == entry.key[0]]
    if others and not any(is_role(role, entry.role) for role in others):
        result.wrong.append(f"{entry.role} at {entry.text}: the sites say {', '.join(others)}")
    elif elsewhere and entry.reference.rows:
        result.missing.append(f"{entry.role} at {entry.text}: the sites have {', '.join(elsewhere[:2])}")
    else:
        result.missing.append(f"{entry.role} at {entry.text}")


def _layers_out_of_order(sites: Mapping[str, Entry]) -> Iterator[str]:
    """The expected layers of a stack are layers of their own, in running order."""
    paths = {path: _layer_path(path) for path in sites}
    of_layer = defaultdict[tuple[int, int], set[str]](set)
    for path, entry in sites.items():
        of_layer[id(entry.stack), entry.stack.layers.index(entry.layer)].add(paths[path])
    owner: dict[str, tuple[int, int]] = {}
    last: dict[tuple[int, str], int] = {}
    for key, layers in sorted(of_layer.items(), key=lambda item: item[0][1]):
        for layer in sorted(layers):
            if owner.setdefault(layer, key) != key and owner[layer][0] == key[0]:
                yield f"{layer} is more than one of the expected layers"
            prefix, _, number = layer.rpartition("[")
            if (value := int(number.rstrip("]") or 0)) < last.get((key[0], prefix), -1):
                yield f"{layer} is out of order"
            last[key[0], prefix] = value
        if len({layer.rpartition("[")[0] for layer in layers}) == 1 and len(layers) > 1:
            yield f"one expected layer is {', '.join(sorted(layers))}"


def _layer_path(path: str) -> str:
    head, _, rest = path.partition("layer[")
    return f"{head}layer[{rest.partition(']')[0]}]"
