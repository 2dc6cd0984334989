"""Edits in a type of PEFT's own: DoRA, (IA)³, LoHa, OFT, and LN tuning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.exchange.lora_export import no_form
from peftc.exchange.peft_format.folder import PREFIX
from peftc.exchange.peft_format.names import pattern_of, target_names
from peftc.exchange.peft_format.types import TYPES, PeftRow
from peftc.exchange.selector_text import is_whole
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.planning.ir import SiteEdit
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

# The keys for modules with other numbers than most.
PATTERNS = {
    "LORA": {"r": "rank_pattern", "lora_alpha": "alpha_pattern"},
    "LOHA": {"r": "rank_pattern", "alpha": "alpha_pattern"},
}


@dataclass(eq=False)
class TypedAdapter:
    """An adapter of one type. `config`: the keys of the type."""

    type: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    modules: list[str] = field(default_factory=list[str])
    ranks: dict[str, int] = field(default_factory=dict[str, int])


def typed_adapter(folding: Folding) -> TypedAdapter | None:
    """The edits in one of PEFT's types; None where they are not those of a type that has them as
    they stand. Raises: P801 for edits of a type with numbers that it cannot have.
    """
    site_edits = list(folding.record.site_edits)
    rows = [_row(site_edit) for site_edit in site_edits]
    types = {row[0] for row in rows if row is not None}
    if not rows or None in rows or len(types) != 1:
        return None
    adapter, inputs = TypedAdapter(types.pop(), {}), list[str]()
    patterns: dict[str, dict[str, Any]] = {key: {} for key in PATTERNS.get(adapter.type, {})}
    for site_edit, own in zip(site_edits, rows, strict=True):
        assert own is not None
        module, row = site_edit.site.module, own[1]
        if module in adapter.modules:
            return None
        config = dict(_config(row, site_edit))
        cls = base_class(folding.model.get_submodule(module))
        if not issubclass(cls, nn.Linear | Conv1D) or (row.linear_alone and not issubclass(cls, nn.Linear)):
            raise no_form(site_edit.edit, f"PEFT has no {adapter.type} of a {cls.__name__}, as `{module}` is")
        for key, values in patterns.items():
            values[module] = config.pop(key)
        if adapter.config not in ({}, config):
            raise no_form(site_edit.edit, f"PEFT has one of each for all modules, and `{module}` has {config}")
        adapter.config = config
        adapter.modules.append(module)
        inputs += [module] if row.step else []
        adapter.tensors |= _tensors(folding, site_edit, row)
    for key, values in patterns.items():
        adapter.config[key], adapter.config[PATTERNS[adapter.type][key]] = pattern_of(values)
    adapter.ranks = patterns.get("r", {})
    names = [info.name for info in folding.analysis.table.modules]
    adapter.config |= {"peft_type": adapter.type, "target_modules": target_names(adapter.modules, names)}
    classes = {base_class(folding.model.get_submodule(module)) for module in adapter.modules}
    if adapter.type in ("LORA", "IA3"):
        adapter.config["fan_in_fan_out"] = all(issubclass(cls, Conv1D) for cls in classes)
    if adapter.type == "IA3":
        adapter.config |= {"target_modules": adapter.modules, "feedforward_modules": inputs}
    return adapter


def norms_adapter(folding: Folding, saved: dict[str, dict[str, Tensor]]) -> TypedAdapter:
    """Modules that are trained as a whole, and no edit: LN tuning, whatever the modules are."""
    names = [info.name for info in folding.analysis.table.modules]
    tensors = {
        f"{PREFIX}{module}.ln_tuning_layers{name.removeprefix(module)}": tensor
        for module, own in saved.items()
        for name, tensor in own.items()
    }
    config = {"peft_type": "LN_TUNING", "target_modules": target_names(list(saved), names)}
    return TypedAdapter("LN_TUNING", config, tensors, list(saved))


def _row(site_edit: SiteEdit) -> tuple[str, PeftRow] | None:
    """The type and the row whose equation is that of an edit at a module."""
    if len(site_edit.assigns) != 1 or any(one.tasks for one in site_edit.instances):
        return None
    source, step = site_edit.assigns[0].source, site_edit.site.steps[-1][0]
    for name, peft_type in TYPES.items():
        for row in peft_type.rows:
            if row.config is None or not _is_same(_equation(row.equation), source):
                continue
            if step == row.step if row.step else is_whole(site_edit.site):
                return name, row
    return None


def _config(row: PeftRow, site_edit: SiteEdit) -> dict[str, Any]:
    assert row.config is not None
    return row.config({one.form.name: one.form.fill(one.args) for one in site_edit.instances})


def _tensors(folding: Folding, site_edit: SiteEdit, row: PeftRow) -> Iterator[tuple[str, Tensor]]:
    modules = folding.modules(site_edit)
    for end, name in row.tensors.items():
        form, _, attribute = name.partition(".")
        tensor = modules[form].get_parameter(attribute).detach()
        shape = (1, -1) if row.step else (-1, 1)
        yield f"{PREFIX}{site_edit.site.module}.{end}", tensor.reshape(shape) if end == "ia3_l" else tensor


@cache
def _equation(text: str) -> ast.Equation:
    numbers = defaultdict(lambda: "1", options="", dropout="", neumann="")
    (edit,) = parse_text(f"peft 2\nedit e at layer[*] {{ {text.format_map(numbers)} }}\n").statements
    assert isinstance(edit, ast.Edit)
    (equation,) = edit.body
    assert isinstance(equation, ast.Equation)
    return equation


def _is_same(row: ast.Equation, own: ast.Equation) -> bool:
    return (row.target, row.op) == (own.target, own.op) and _is_same_value(row.value, own.value)


def _is_same_value(row: ast.Expr, own: ast.Expr) -> bool:
    """Whether two expressions are equal, but for the arguments of forms."""
    match row, own:
        case ast.Call(), ast.Call():
            pairs = zip(row.args, own.args, strict=False)
            same = row.function == own.function and len(row.args) == len(own.args)
            return same and all(_is_same_value(a, b) for a, b in pairs)
        case ast.Binary(), ast.Binary():
            return row.op == own.op and _is_same_value(row.left, own.left) and _is_same_value(row.right, own.right)
        case _:
            return row == own
