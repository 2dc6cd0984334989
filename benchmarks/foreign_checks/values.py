"""The reference model of a trial: each edited site's parameters, at the place of the role table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from benchmarks.foreign_checks.edits import ALPHA, PARALLEL, SCALE, SEQUENTIAL, Arm, R, Trial
from benchmarks.foreign_checks.plain import Plain, adapter, lora
from benchmarks.foreign_checks.references import expanded
from benchmarks.foreign_checks.roles import Comparison, Entry


class NotComparable(Exception):
    """The role table has no place for this edit."""


def reference_of(model: nn.Module, comparison: Comparison, trial: Trial, leaves: Mapping[str, Tensor]) -> Plain:
    """The base, with the edits of a trial by the table; differentiable in `leaves`."""
    plain = Plain(model)
    for (edit, path), parameters in _by_site(leaves).items():
        arm = trial.arms[int(edit.removeprefix("e"))]
        if arm.equation in (SEQUENTIAL, PARALLEL):
            x, h = _border(plain.base, comparison, path)
            plain.insert(x, h, partial(_adapter, arm.equation == PARALLEL, parameters), _call(comparison, path))
        else:
            _change_weight(plain, arm, _entry(comparison, path), parameters)
    return plain


def _change_weight(plain: Plain, arm: Arm, entry: Entry, parameters: Mapping[str, Tensor]) -> None:
    if arm.equation != SCALE:
        plain.add(entry.reference, lora(parameters, ALPHA / R))
    elif arm.selector == "ffn.hidden":
        plain.scale_columns(entry.reference, parameters["scale"])
    else:
        bias = entry.stack.biases.get(entry.role, "").replace("{i}", str(entry.layer))
        plain.scale_rows(entry.reference, parameters["scale"], bias)


def _adapter(parallel: bool, parameters: Mapping[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
    return h + adapter(parameters, x if parallel else h)


def _by_site(leaves: Mapping[str, Tensor]) -> Mapping[tuple[str, str], dict[str, Tensor]]:
    """The parameters of each edit at each site, by their last name."""
    sites = defaultdict[tuple[str, str], dict[str, Tensor]](dict)
    for name, leaf in leaves.items():
        edit, path, parameter = name.split("/")
        sites[edit, path][parameter.rpartition(".")[2]] = leaf
    return sites


def _entry(comparison: Comparison, path: str) -> Entry:
    """The expected role of an edited site. An ffn's `hidden` is what its `down` reads."""
    path = path.removesuffix("hidden") + "down" if path.endswith(".hidden") else path
    if path not in comparison.sites:
        raise NotComparable(f"{path} has no expected role")
    return comparison.sites[path]


def _border(model: nn.Module, comparison: Comparison, path: str) -> tuple[str, str]:
    """The modules whose input and output are x and h of a sub-layer."""
    inner = {p: entry for p, entry in comparison.sites.items() if p.startswith(f"{path}.")}
    if not inner:
        raise NotComparable(f"{path} has no expected role")
    return tuple(_module(model, state, roles, inner) for state, roles in _STATES)  # type: ignore[return-value]


def _call(comparison: Comparison, path: str) -> int | None:
    """Which of the calls of its module a sub-layer is; None where there is one in its layer."""
    entry = next(e for p, e in comparison.sites.items() if p.startswith(f"{path}."))
    place = entry.stack, entry.layer, entry.role, entry.text
    numbers = sorted(e.number for e in comparison.sites.values() if (e.stack, e.layer, e.role, e.text) == place)
    return numbers.index(entry.number) if len(numbers) > 1 else None


_STATES = (("x", ("q", "up")), ("h", ("o", "down")))


def _module(model: nn.Module, state: str, roles: tuple[str, ...], inner: Mapping[str, Entry]) -> str:
    entry = next((e for e in inner.values() if e.role.split(".")[-1] in roles), None)
    any_entry = entry or next(iter(inner.values()))
    *steps, _ = any_entry.role.split(".")
    for name in dict.fromkeys((".".join((*steps[:2], state)), f"{steps[0]}.{state}")):
        if name in any_entry.stack.states:
            module = any_entry.stack.states[name]
            if module is None:
                raise NotComparable(f"no module has {name}")
            choices = list(expanded(module, any_entry.layer))
            return choices[min(any_entry.number, len(choices) - 1)]
    if entry is None or not _is_leaf(model.get_submodule(entry.reference.module)):
        raise NotComparable(f"the table does not say which module has {steps[0]}.{state}")
    return entry.reference.module


def _is_leaf(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or not any(True for _ in module.children())
