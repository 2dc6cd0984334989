"""Edits in a type of PEFT's own, such as DoRA, (IA)³ or VeRA, and LN tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.exchange.lora_export import no_form
from peftc.exchange.peft_format.attention_export import attention_adapter
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.folder import PREFIX
from peftc.exchange.peft_format.form_texts import equation_of, is_form, is_same
from peftc.exchange.peft_format.names import target_names
from peftc.exchange.peft_format.reading import tied_bias, tied_with_input, weight_size
from peftc.exchange.peft_format.rows.places import DELTA, TOKENS_FORM
from peftc.exchange.peft_format.rows.prompts import PROMPT, TASKS, prompt_config
from peftc.exchange.peft_format.table import TYPES
from peftc.exchange.peft_format.task_types import task_type
from peftc.exchange.peft_format.types import NoConfig, PeftRow, TypedAdapter
from peftc.exchange.selector_text import is_whole
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.forms.module import FormModule
from peftc.planning.ir import SiteEdit
from peftc.planning.selection.selectors import resolve
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

_OPTIONS = ("options", "dropout", "neumann", "penalty", "mini")  # in braces of equations


def typed_adapter(folding: Folding, of_linear: Callable[[str, str], Tensor]) -> TypedAdapter | None:
    """The edits in one of PEFT's types; None where they are not those of a type that has them as
    they stand. Raises: P801 for edits of a type with numbers that it cannot have, P806.

    Args: `of_linear`: the weight (out, in) or the bias of a module of the base.
    """
    site_edits = list(folding.record.site_edits)
    if site_edits and all(map(_replaces_rows, site_edits)):
        return tokens_adapter(folding)
    if site_edits and (adapter := attention_adapter(folding)) is not None:
        return adapter
    rows = [_row(site_edit) for site_edit in site_edits]
    types = {row[0] for row in rows if row is not None}
    modules = [site_edit.site.module for site_edit in site_edits]
    if not rows or None in rows or len(types) != 1 or len(set(modules)) != len(modules):
        return None
    if "PROMPT_TUNING" in types:
        return prompt_adapter(folding, bool(getattr(folding.model.config, "is_encoder_decoder", False)))
    (name,) = types
    own = [(site_edit, row[1]) for site_edit, row in zip(site_edits, rows, strict=True) if row is not None]
    try:
        return _adapter(folding, name, own, of_linear)
    except _Unfit as error:
        if TYPES[name].is_lora:
            return None
        raise no_form(error.edit, error.reason) from error


def _adapter(
    folding: Folding, name: str, edits: Sequence[tuple[SiteEdit, PeftRow]], of_linear: Callable[[str, str], Tensor]
) -> TypedAdapter:
    """Raises: _Unfit."""
    peft_type, adapter, inputs = TYPES[name], TypedAdapter(name, {}), list[str]()
    numbers, tensors = dict[str, dict[str, Any]](), dict[str, dict[str, Tensor]]()
    for site_edit, row in edits:
        module = site_edit.site.module
        cls = base_class(folding.model.get_submodule(module))
        if not issubclass(cls, nn.Linear | Conv1D) or (row.linear_alone and not issubclass(cls, nn.Linear)):
            raise _Unfit(site_edit.edit, f"PEFT has no {name} of a {cls.__name__}, as `{module}` is")
        try:
            tensors[module] = _tensors(folding, site_edit, row)
        except NoConfig as error:
            raise _Unfit(site_edit.edit, str(error)) from error
        if row.check is not None and (reason := row.check(tensors[module])):
            raise _Unfit(site_edit.edit, f"`{module}`: {reason}, where PEFT computes something else")
        try:
            numbers[module] = _config(row, site_edit)
            _check_of_base(folding, site_edit, row, PeftConfig(numbers[module]), tensors[module], of_linear)
        except NoConfig as error:
            raise _Unfit(site_edit.edit, str(error)) from error
        adapter.modules.append(module)
        inputs += [module] if row.step else []
        _note_dropout(adapter, numbers[module], site_edit)
        for key, tensor in _common_tensors(folding, site_edit, row):
            if key in adapter.tensors and not torch.equal(adapter.tensors[key], tensor):
                raise _Unfit(site_edit.edit, f"PEFT has one `{key}` for all modules, and `{module}` has another one")
            adapter.tensors[key] = tensor
    try:
        adapter.config = peft_type.config(numbers, tensors)
    except NoConfig as error:
        raise _Unfit(", ".join(dict.fromkeys(edit.edit for edit, _ in edits)), str(error)) from error
    adapter.tensors |= {f"{PREFIX}{module}.{end}": t for module, own in tensors.items() for end, t in own.items()}
    adapter.ranks = {module: own["r"] for module, own in numbers.items() if isinstance(own.get("r"), int)}
    names = [info.name for info in folding.analysis.table.modules]
    try:
        if peft_type.pack is not None:
            adapter.tensors = peft_type.pack(adapter.config, adapter.tensors, names)
    except NoConfig as error:
        raise _Unfit(", ".join(dict.fromkeys(edit.edit for edit, _ in edits)), str(error)) from error
    adapter.config |= {"peft_type": name, "target_modules": target_names(adapter.modules, names)}
    if peft_type.has_transposition:
        classes = {base_class(folding.model.get_submodule(module)) for module in adapter.modules}
        adapter.config["fan_in_fan_out"] = all(issubclass(cls, Conv1D) for cls in classes)
    if name == "IA3":
        adapter.config |= {"target_modules": adapter.modules, "feedforward_modules": inputs}
    return adapter


@dataclass(eq=False)
class _Unfit(Exception):
    """Why edits are not those of a type, though they have its equation."""

    edit: str
    reason: str


def _note_dropout(adapter: TypedAdapter, config: Mapping[str, Any], site_edit: SiteEdit) -> None:
    rates = (one.form.fill(one.args).get("dropout") for one in site_edit.instances)
    note = f"{adapter.type} has no dropout of what it reads"
    if any(rates) and not any(key.endswith("dropout") for key in config) and note not in adapter.notes:
        adapter.notes.append(note)


def prompt_adapter(folding: Folding, is_encoder_decoder: bool) -> TypedAdapter | None:
    """One prompt before the tokens of the input, whatever makes it; None for other edits."""
    site_edits, place = folding.record.site_edits, TYPES["PROMPT_TUNING"].place
    if len(site_edits) != 1 or (row := _row(site_edits[0])) is None or row[0] != "PROMPT_TUNING":
        return None
    (site_edit,) = site_edits
    (edit,) = parse_text(f"peft 2\nedit e at {place} {{ h = h }}\n").statements
    assert isinstance(edit, ast.Edit)
    if site_edit.site.path not in [site.path for site in resolve(edit.selector, folding.analysis.table)]:
        raise no_form(site_edit.edit, f"PEFT has a prompt at `{place}` alone, and this is `{site_edit.site.path}`")
    (form,) = folding.modules(site_edit).values()
    cls = base_class(folding.model)
    if task_type(cls, ()) != TASKS[is_encoder_decoder]:
        raise no_form(site_edit.edit, f"PEFT reads the result of a {cls.__name__} at another place")
    is_made = form.definition.saved_as(form.form_args) is not None
    tokens = form.collapsed()["tokens"] if is_made else form.get_parameter("tokens")
    config = prompt_config(tokens.shape[0], is_encoder_decoder)
    adapter = TypedAdapter("PROMPT_TUNING", config, {PROMPT: tokens.detach()}, [site_edit.site.module])
    if not torch.equal(tokens.float().to(tokens.dtype), tokens):
        adapter.notes.append("PEFT keeps the rows of a prompt in float32, which rounds them")
    return adapter


def tokens_adapter(folding: Folding) -> TypedAdapter:
    """Rows of embeddings in the place of the base's. Raises: P801."""
    adapter, places = TypedAdapter("TRAINABLE_TOKENS", {}), list[int]()
    forms = {
        edit.site.module: (edit.edit, *(form.owner_module or form for form in folding.modules(edit).values()))
        for edit in folding.record.site_edits
    }
    left = dict(forms)
    for module, (edit, form) in forms.items():
        if module not in left:
            continue
        tied = tied_with_input(folding.model, module)
        if len(tied) > 1 and (reason := tied_bias(folding.model, tied)):
            raise no_form(edit, reason)
        if any(other not in left or left[other][1] is not form for other in tied):
            reason = f"PEFT changes `{tied[0]}` and `{tied[1]}`, which are tied, together"
            raise no_form(edit, reason, "write `let tokens = shared(trainable_tokens(n=…))`, and `tokens(w)` at both")
        own = form.get_buffer("places").tolist()
        if places not in ([], own):
            raise no_form(edit, f"PEFT has the same rows for all modules, and `{module}` has others")
        places = own
        for other in tied:
            del left[other]
            adapter.tensors[f"{PREFIX}{other}.{DELTA}"] = form.get_parameter("values").detach()
        adapter.modules.append(module)
    names = [info.name for info in folding.analysis.table.modules]
    adapter.config = {
        "peft_type": adapter.type,
        "target_modules": target_names(adapter.modules, names),
        "token_indices": places,
    }
    return adapter


def _replaces_rows(site_edit: SiteEdit) -> bool:
    """Whether an edit is `w = trainable_tokens(w, …)`, or `new_tokens`, of an embedding."""
    if len(site_edit.assigns) != 1 or len(site_edit.instances) != 1 or not is_whole(site_edit.site):
        return False
    (form,), source = site_edit.instances, site_edit.assigns[0].source
    is_call = isinstance(source.value, ast.Call) and source.value.args[:1] == (ast.Name("w"),)
    is_one = form.form.name in ("trainable_tokens", "new_tokens")
    is_own = is_one and is_form(TOKENS_FORM, form.form) and not form.tasks
    return is_own and is_call and (source.target, source.op) == ("w", "=")


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
            if row.config is None or not is_same(equation_of(row.equation), source):
                continue
            if row.form and not all(is_form(row.form, one.form) for one in site_edit.instances):
                continue
            if not _parameters(site_edit) <= {*row.tensors.values(), *row.common.values(), *row.computed}:
                continue
            if step == row.step if row.step else is_whole(site_edit.site):
                return name, row
    return None


def _parameters(site_edit: SiteEdit) -> set[str]:
    """The trained parameters of the forms of an edit."""
    return {
        f"{one.key}.{parameter.name}"
        for one in site_edit.instances
        for parameter in one.form.parameters(one.form.fill(one.args), one.dims)
        if parameter.role == "trained" and parameter.size is not None
    }


def _config(row: PeftRow, site_edit: SiteEdit) -> dict[str, Any]:
    assert row.config is not None
    return row.config({one.form.name: one.form.fill(one.args) for one in site_edit.instances})


def _tensors(folding: Folding, site_edit: SiteEdit, row: PeftRow) -> dict[str, Tensor]:
    """By PEFT's names. Raises: NoConfig."""
    modules, own = folding.modules(site_edit), dict[str, Tensor]()
    for name in (*row.tensors.values(), *((row.places,) if row.places else ())):
        own[name] = _tensor(modules, name)
    if row.write is not None:
        args = {one.form.name: one.form.fill(one.args) for one in site_edit.instances}
        return row.write(own, args, weight_size(folding.model.get_submodule(site_edit.site.module)))
    return {
        end: own[name].reshape(row.shapes[end]) if end in row.shapes else own[name] for end, name in row.tensors.items()
    }


def _tensor(modules: Mapping[str, FormModule], name: str) -> Tensor:
    """A tensor `form.parameter` of a site, or of those that have it in common."""
    form, _, attribute = name.partition(".")
    module = modules[form]
    while not hasattr(module, attribute) and module.owner_module is not None:
        module = module.owner_module
    return getattr(module, attribute).detach()


def _check_of_base(
    folding: Folding,
    site_edit: SiteEdit,
    row: PeftRow,
    config: PeftConfig,
    tensors: Mapping[str, Tensor],
    of_linear: Callable[[str, str], Tensor],
) -> None:
    """Raises: NoConfig where PEFT would compute other tensors of the weight than an edit has."""
    if row.of_base is None:
        return
    modules, module = folding.modules(site_edit), site_edit.site.module
    for name, tensor in row.of_base(config, tensors, partial(of_linear, module)).items():
        own = _tensor(modules, name)
        if own.shape != tensor.shape or not torch.allclose(own.double(), tensor.double(), rtol=1e-4, atol=1e-5):
            raise NoConfig(f"PEFT decomposes the weight of `{module}` anew, and its `{name}` is another one")


def _common_tensors(folding: Folding, site_edit: SiteEdit, row: PeftRow) -> Iterator[tuple[str, Tensor]]:
    modules = folding.modules(site_edit)
    for key, name in row.common.items():
        form, _, attribute = name.partition(".")
        yield key, getattr(modules[form].owner_module or modules[form], attribute).detach()
