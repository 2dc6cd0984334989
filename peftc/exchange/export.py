"""`peftc.export`: an adapter in the format of another program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from typing import Any, Literal

from torch import Tensor, nn

from peftc.adapters.base import require_values
from peftc.adapters.checkpoints import check_gradients
from peftc.adapters.files import path_of
from peftc.adapters.loading import check_tensors
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub import folder as hub_folder
from peftc.exchange.adapterhub.writing import hub_export
from peftc.exchange.edited_model import Base, Model, edited, trained_values
from peftc.exchange.lora_export import LoraAdapter, lora_config, lora_of, lora_tensors, no_form, no_product
from peftc.exchange.peft_format.folder import PREFIX, write
from peftc.exchange.peft_format.names import largest_owners, saved_names
from peftc.exchange.peft_format.task_types import task_type
from peftc.exchange.places import aliases, places
from peftc.exchange.report import ExportedModule, ExportReport
from peftc.exchange.typed_export import norms_adapter, typed_adapter
from peftc.exchange.vllm_rules import vllm_config
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.installation.completeness import active_installation
from peftc.installation.contents import parameters
from peftc.installation.record import refuse_passes
from peftc.merging.destination import check_destination
from peftc.planning.foldability.affine import ONE_ADAPTER
from peftc.planning.ir import Concat

Target = Literal["peft", "vllm", "adapterhub"]
TARGETS = ("peft", "vllm", "adapterhub")


def export(
    adapter: Model,
    output: str | PathLike[str],
    *,
    to: Target = "peft",
    model: Model | None = None,
    max_rank: int | None = None,
    svd: bool = False,
    other_weights: bool = False,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Writes an adapter in the format of another program.

    Rank, alpha and scale are evaluated from the equations: `4 * lora(x, r=8, alpha=16)` has the
    scale 8, so its `lora_alpha` is 64. Several edits of one Linear are stacked into one LoRA, and
    edits of q, k or v in a fused Linear have rows of zeros for the others. A and B keep the bits of
    the parameters; where an edit of `h` or a number that is no power of two changes them, they are
    rounded once, and the report says so.

    Args:
        adapter: a compiled model, or a folder that `save` wrote.
        output: a new or empty folder. It appears complete, or not at all.
        to: `"peft"`: the files that PEFT's `save_pretrained` writes; `"vllm"`: the same, checked by
            the rules of vLLM, which loads less; `"adapterhub"`: those of the library `adapters`.
        model: the base of a saved adapter, by default the one that it names. Its weights are read
            only for edits that depend on them, such as `h += lora(h)`.
        max_rank: of a LoRA, at most. For vLLM the rank that it is started with.
        svd: changes of a higher rank, and edits that fold and are no product of low rank, become
            the nearest change of rank `max_rank`, by singular values. The report has the errors.
        other_weights: as in `load`.
        trust_remote_code: as in `plan`.

    Returns:
        What was written for each module.

    Raises:
        PeftcError: P410 (not compiled), P501-P506 (the base), P520-P525 (the adapter), P545
            (arguments), P561 (infinite or NaN values), P583 (parameters that are trained by no
            edit), P703 and P704 (the folder), P801 (an edit without a form there), P805 (the rank),
            P806 (weights are needed).
    """
    if max_rank is not None:
        check_rank("max_rank", max_rank)
    if svd and max_rank is None:
        raise PeftcError(Diagnostic("P545", "`svd` needs a rank", help="give `max_rank`, or `--max-rank`"))
    if to not in TARGETS:
        raise PeftcError(Diagnostic("P545", f"there is no format {to!r}", help=f"to: {', '.join(TARGETS)}"))
    if to == "adapterhub" and max_rank is not None:
        raise PeftcError(Diagnostic("P545", "a bottleneck has no `max_rank`", help="leave out `max_rank`"))
    target = path_of(output)
    check_destination(target)
    with edited(adapter, model, other_weights, trust_remote_code) as base:
        check_model(base.module)
        if to == "adapterhub":
            hub = hub_export(base)
            hub_folder.write(target, hub.config, hub.tensors, hub.heads)
            own = tuple(ExportedModule(module=site, rank=0) for site in hub.sites)
            return ExportReport(output=str(target), type=hub.type, modules=own, saved=tuple(hub.heads))
        config, tensors, report = lora_export(base, max_rank, svd, to == "peft" and not svd)
        if to == "vllm":
            config, note = vllm_config(config, tensors, max_rank)
            report = report.model_copy(update={"notes": (*report.notes, note)})
        check_tensors(tensors, tensors)
        write(target, config, tensors)
    return report.model_copy(update={"output": str(target)})


def check_rank(name: str, rank: object) -> None:
    """Raises: P545."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise PeftcError(Diagnostic("P545", f"`{name}` is a number from 1 on, not {rank!r}"))


def check_model(model: nn.Module) -> None:
    """Raises: P446 (a pass), P561 and P583 (parameters), P801 (what PEFT changes differently)."""
    record = active_installation(model)
    refuse_passes(record, "other programs read equations")
    own = parameters(model)
    require_values(own.items())
    check_tensors(own, own)
    check_gradients(model, record)
    if saved := next(iter(record.adapter_parameters), None):
        raise no_product(saved.partition("/")[0], "it has values for each attached adapter", ONE_ADAPTER)
    edits = ", ".join(dict.fromkeys(saved.partition("/")[0] for saved in record.trained))
    if any(base_class(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        name = next((one.edit for one in record.site_edits), edits)
        raise no_form(name, "the model has an adapter of PEFT already", "merge it into the base: `merge_and_unload()`")
    for site_edit in record.site_edits:
        module, step = site_edit.site.module, site_edit.assigns[-1].value
        if isinstance(step, Concat):  # PEFT calls the model with the rows, and changes no module
            continue
        if len(own := places(model, model.get_submodule(module))) > 1:
            raise no_form(site_edit.edit, f"`{own[0]}` and `{own[1]}` are one module, of which PEFT changes one")
    for place in record.trained.values():
        owner = model.get_submodule(place.rpartition(".")[0])
        if len(own := aliases(model, place)) > 1 or len(own := places(model, owner)) > 1:
            reason = f"`{own[0]}` and `{own[1]}` are one parameter, of which PEFT changes one use"
            raise no_form(edits, reason, "untie them before the model is compiled")


def lora_export(
    base: Base, max_rank: int | None, svd: bool, exact: bool
) -> tuple[dict[str, Any], dict[str, Tensor], ExportReport]:
    folding = Folding(base.module, None, None, None)
    if exact and (typed := typed_export(base, folding)) is not None:
        return typed
    adapter = lora_of(base, folding, max_rank, svd)
    modules = [info.name for info in folding.analysis.table.modules]
    biases = lone_biases(base, folding)
    saved = whole_modules(base, folding, adapter.weights, biases)
    if not adapter.weights and not adapter.stacked:
        raise no_product(", ".join(folding.names) or "it", "it changes no Linear")
    config = common_config(base, lora_config(adapter, modules), list(saved), modules)
    tensors = dict(lora_tensors(adapter)) | {f"{PREFIX}{n}": t for own in saved.values() for n, t in own.items()}
    tensors |= bias_tensors(config, biases, adapter.weights)
    report = ExportReport(
        output="",
        type="LORA",
        modules=tuple(exported_modules(adapter)),
        saved=tuple(saved),
        notes=tuple(adapter.notes),
    )
    return config, tensors, report


def typed_export(base: Base, folding: Folding) -> tuple[dict[str, Any], dict[str, Tensor], ExportReport] | None:
    """The edits in a type of PEFT that has them as they stand."""
    typed, saved, biases = typed_adapter(folding, base.of_linear), dict[str, dict[str, Tensor]](), dict[str, Tensor]()
    if typed is not None:
        biases = lone_biases(base, folding) if typed.type == "LORA" else biases
        saved = whole_modules(base, folding, typed.modules, biases)
    elif not folding.record.site_edits:
        typed = norms_adapter(folding, whole_modules(base, folding, ()))
    if typed is None:
        return None
    modules = [info.name for info in folding.analysis.table.modules]
    if saved and typed.type in ("PROMPT_TUNING", "TRAINABLE_TOKENS"):
        beside = "a prompt of a language model" if typed.type == "PROMPT_TUNING" else "trained tokens"
        raise no_form(", ".join(saved), f"PEFT has no modules that are saved whole beside {beside}")
    config = common_config(base, typed.config, list(saved), modules)
    tensors = typed.tensors | {f"{PREFIX}{n}": t for own in saved.values() for n, t in own.items()}
    tensors |= bias_tensors(config, biases, typed.modules)
    exported = (ExportedModule(module=name, rank=typed.ranks.get(name, 0)) for name in typed.modules)
    notes = tuple(typed.notes)
    report = ExportReport(output="", type=typed.type, modules=tuple(exported), saved=tuple(saved), notes=notes)
    return config, tensors, report


def exported_modules(adapter: LoraAdapter) -> list[ExportedModule]:
    return [
        ExportedModule(module=name, rank=weights.rank, exact=weights.exact, error=adapter.errors.get(name))
        for name, weights in (adapter.weights | adapter.stacked).items()
    ]


def lone_biases(base: Base, folding: Folding) -> dict[str, Tensor]:
    """The trained biases of modules that are not trained as a whole: PEFT's `bias`."""
    trained = set(active_installation(base.module).trained.values())
    sizes = {info.name: {f"{info.name}.{name}" for name in info.parameters} for info in folding.analysis.table.modules}
    names = [name for name in trained if name.endswith(".bias") and not sizes[name.rpartition(".")[0]] <= trained]
    return trained_values(base, sorted(names))


def bias_tensors(config: dict[str, Any], biases: Mapping[str, Tensor], changed: Collection[str]) -> dict[str, Tensor]:
    """By PEFT's names. `config` says that there are some: "all" if not only of changed modules."""
    owners = {name: name.rpartition(".")[0] for name in biases}
    if biases:
        config["bias"] = "lora_only" if set(owners.values()) <= set(changed) else "all"
    inner = {name: f"{owner}.base_layer.bias" if owner in changed else name for name, owner in owners.items()}
    return {f"{PREFIX}{inner[name]}": tensor for name, tensor in biases.items()}


def whole_modules(
    base: Base, folding: Folding, changed: Iterable[str], biases: Collection[str] = ()
) -> dict[str, dict[str, Tensor]]:
    """The modules that `train` statements train as a whole, with their tensors. Raises: P801."""
    record = active_installation(base.module)
    trained = dict.fromkeys(name for name in record.trained.values() if name not in biases)
    if not trained:
        return {}
    every = [f"{info.name}.{name}".lstrip(".") for info in folding.analysis.table.modules for name in info.parameters]
    owners = largest_owners(trained, every)
    edit = next(saved.partition("/")[0] for saved in record.trained)
    if owners is None:
        raise no_form(edit, "PEFT's `modules_to_save` has whole modules, and only some of their parameters are trained")
    for owner in owners:
        if any(f"{module}.".startswith(f"{owner}.") for module in changed):
            raise no_form(edit, f"`{owner}` has a LoRA, and PEFT does not save its weight beside it")
        if next(base.module.get_submodule(owner).buffers(), None) is not None:
            raise no_form(edit, f"`{owner}` has buffers, which PEFT saves with it")
    return {owner: trained_values(base, own) for owner, own in owners.items()}


def common_config(base: Base, config: dict[str, Any], saved: list[str], modules: list[str]) -> dict[str, Any]:
    """With the keys of every type of PEFT. Raises: P801."""
    names = saved_names(saved, modules)
    if names is None:
        raise no_form(", ".join(saved), "PEFT would take other modules, whose names end so, too")
    cls = base_class(base.module)
    task = task_type(cls, names)
    mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    return {
        "base_model_name_or_path": base.id,
        "auto_mapping": None if task else mapping,
        "task_type": task,
        "inference_mode": True,
        **({"modules_to_save": names} if names else {}),
        **config,
    }
