"""Roles by name from external tables, compared with inferred sites: transformers' tensor-parallel
plan, and PEFT's default LoRA targets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# The role of a Linear's name in a plan. Other names (norms, routers, latent projections)
# have none.
BY_NAME: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "qkv_proj": ("q", "k", "v"),
    "query_key_value": ("q", "k", "v"),
    "up_proj": ("up",),
    "gate_proj": ("gate",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
    "dense_h_to_4h": ("up",),
    "dense_4h_to_h": ("down",),
}


def plan_disagreements(model: nn.Module, table: Any) -> list[str]:
    """Where the model's tensor-parallel plan and the sites disagree, or no site exists: one line
    for a role and name.
    """
    by_role = sites_by_role(table)
    missing = defaultdict[str, list[str]](list)
    for name, roles in sorted(_planned(model)):
        for role in roles:
            if name not in by_role[role]:
                others = sorted(r for r, names in by_role.items() if name in names)
                disagreement = f", the sites say {' '.join(others)}" if others else ", no site has it"
                missing[f"{name.rsplit('.', 1)[-1]} is {role}{disagreement}"].append(name)
    return [f"{text} ({len(names)}: {names[0]})" for text, names in missing.items()]


def sites_by_role(table: Any) -> Mapping[str, set[str]]:
    """The modules (or parameters, if a module has several weights) of the sites of each role."""
    by_role = defaultdict[str, set[str]](set)
    for site in table.sites:
        weight = site.states.get("w")
        if weight is not None and weight.weight is not None:
            ref = weight.weight
            by_role[site.steps[-1][0]].add(ref.module if ref.attribute == "weight" else f"{ref.module}.{ref.attribute}")
    return by_role


def _planned(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every Linear or stack of expert weights that the plan names with a role."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    patterns = {key: re.compile(re.escape(key).replace(r"\*", r"\d+")) for key in plan}
    weights = {name for name, module in model.named_modules() if getattr(module, "weight", None) is not None}
    weights |= {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    for key, pattern in patterns.items():
        roles = BY_NAME.get(key.rsplit(".", 1)[-1])
        for name in weights if roles else ():
            if pattern.fullmatch(name):
                yield name, roles or ()


def table_disagreements(model: nn.Module, table: Any, targets: list[str] | str) -> list[str]:
    """Where PEFT's targets of a type and the modules of q and v differ. `targets` has PEFT's
    format: suffixes of names, or a pattern.
    """
    by_role = sites_by_role(table)
    ours = by_role["q"] | by_role["v"]
    targeted = [name for name, module in model.named_modules() if isinstance(module, nn.Module) and _hit(name, targets)]
    theirs = {name for name in targeted if hasattr(model.get_submodule(name), "weight")}
    lines = [f"{name} is q or v, PEFT does not adapt it" for name in sorted(ours - theirs)]
    return lines + [f"{name} is adapted by PEFT, it is {_role(by_role, name)}" for name in sorted(theirs - ours)]


def _hit(name: str, targets: list[str] | str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _role(by_role: Mapping[str, set[str]], name: str) -> str:
    return " ".join(sorted(role for role, names in by_role.items() if name in names)) or "at no site"
