"""The tensors of a PEFT adapter by module, and the equations that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.parameters import ENDS, ParameterLora, parameter_loras, target_parameters
from peftc.exchange.peft_format.rows.prompts import TASKS
from peftc.exchange.peft_format.table import type_of
from peftc.exchange.peft_format.types import PeftType
from peftc.exchange.places import aliases, places
from peftc.exchange.spec_text import ModulePart, unfit


@dataclass(eq=False)
class Incoming:
    """An adapter of another program.

    Attributes:
        saved: parameters of the base that it replaces, by name.
        common: tensors that all modules have in common, by `form.parameter`.
        at_sites: its other parts, where the sites of the model tell what they are.
        of_parameters: LoRA of parameters, whose sites the table of the model has.
    """

    name: str
    parts: list[ModulePart] = field(default_factory=list[ModulePart])
    saved: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    common: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    of_parameters: list[ParameterLora] = field(default_factory=list[ParameterLora])

    at_sites: Callable[[SiteTable], list[ModulePart]] | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of tasks, which PEFT numbers."""
        return tuple(f"task_{number}" for number in range(max((part.tasks for part in self.parts), default=0)))


def read_peft(
    config: PeftConfig, tensors: Mapping[str, Tensor], model: nn.Module, of_linear: Callable[[str, str], Tensor]
) -> Incoming:
    """What a file has. Raises: P802, P803, P804, P806.

    Args: `of_linear`: the weight (out, in) or the bias of a module of the base.
    """
    peft_type = type_of(config)
    if peft_type.unpack is not None:
        tensors = peft_type.unpack(config, tensors, model)
    if peft_type.sites is not None:
        return Incoming(config.type.lower(), at_sites=partial(_at_sites, config, peft_type, tensors, model))
    if peft_type.place:
        return _at_place(config, peft_type, tensors, model)
    wrapped = target_parameters(config, model) if config.type == "LORA" else {}
    modules = dict(model.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}  # tied parameters have several names
    parameters = {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    unknown, copies = list[Exception](), set[str]()
    present = {_of_base(key.removeprefix(PREFIX)) for key in tensors}
    incoming, own = Incoming(config.type.lower()), defaultdict[str, dict[str, Tensor]](dict)
    of_parameters = defaultdict[str, dict[str, Tensor]](dict)
    ends = sorted({end for row in peft_type.rows for end in row.tensors}, key=len, reverse=True)
    common = {name.rpartition(".")[2]: name for name in peft_type.common_names()}
    whole = dict(tensors)
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() and not key.endswith(peft_type.whole_ends()):
            raise damaged(f"`{key}` has the dtype {str(tensor.dtype).removeprefix('torch.')}")
        if peft_type.zeros is not None and key.endswith(peft_type.zeros) and not tensor.any():
            continue
        if (place := common.get(key.rpartition(".")[2])) is not None:  # some types have it at each module
            if not whole.setdefault(place, tensor).equal(tensor):
                raise unfit(f"`{key}` has other values than the same tensor of other modules")
            continue
        name = key.removeprefix(PREFIX)
        end = next((end for end in ends if name.endswith(f".{end}")), None)
        if end in ENDS and (parameter := wrapped.get(name.removesuffix(f".{end}"))) is not None:
            of_parameters[parameter][end] = tensor
        elif end is not None and (module := name.removesuffix(f".{end}")) in modules:
            if len(shared := places(model, modules[module])) > 1:
                raise unfit(f"`{shared[0]}` and `{shared[1]}` are one module, of which PEFT changes one")
            own[module][end] = tensor
        elif (place := _of_base(name)) in parameters:
            _save(incoming, parameters[place], tensor)
            if ".ln_tuning_layers." in name or _is_in(place.rpartition(".")[0], config.saved):
                copies.add(place)
        else:
            unknown.append(_unknown(key, end, name, list(modules)))
    own = {name: own[name] for name in modules if name in own and any(map(Tensor.numel, own[name].values()))}
    groups = dict[str, str]()
    if peft_type.groups is not None:
        groups = dict(peft_type.groups(config, own, {name: weight_size(modules[name]) for name in own}))
    for name, ends in own.items():
        if any(part.module == name for part in incoming.parts):  # tied with one before
            continue
        part = _part(config, peft_type, modules[name], name, ends, of_linear, groups.get(name, ""))
        incoming.parts += _tied_parts(part, config, peft_type, ends, model)
    for part in incoming.parts if any(row.tied for row in peft_type.rows) else ():
        for end, tensor in own.get(part.module, {}).items():
            if not any(one.equal(tensor) for one in part.tensors.values()):
                raise unfit(f"`{part.module}.{end}` has other values than that of a module that is tied with it")
    incoming.common = _common(config, peft_type, own, whole, modules)
    incoming.of_parameters = parameter_loras(config, peft_type, of_parameters, model)
    if incoming.parts or incoming.of_parameters or not peft_type.rows:
        config.finish(peft_type.ignored)
    if unknown:
        raise unknown[0]
    if not incoming.parts and not incoming.of_parameters and (peft_type.rows or not incoming.saved):
        raise damaged(f"the adapter has no tensors of {config.type}")
    _check_saved(config.saved, incoming.saved, parameters)
    _check_tied(copies, present, model)
    return incoming


def _at_sites(
    config: PeftConfig, peft_type: PeftType, tensors: Mapping[str, Tensor], model: nn.Module, table: SiteTable
) -> list[ModulePart]:
    """The parts of an adapter whose tensors are of no modules. Raises: P802, P803, P804."""
    assert peft_type.sites is not None
    parts = peft_type.sites(config, tensors, table, model)
    config.finish(peft_type.ignored)
    return parts


def _at_place(config: PeftConfig, peft_type: PeftType, tensors: Mapping[str, Tensor], model: nn.Module) -> Incoming:
    """An adapter that stands at one place of the model. Raises: P802, P803, P804."""
    (row,) = peft_type.rows
    if others := sorted(tensors.keys() - row.tensors.keys()):
        raise _unknown(others[0], None, others[0], [])
    if lack := [name for name in row.tensors if name not in tensors]:
        raise damaged(f"the adapter has no tensor `{lack[0]}`")
    if any(not one.is_floating_point() or not 2 <= one.ndim <= peft_type.dimensions for one in tensors.values()):
        raise damaged("its tensors are no matrices of numbers with a point")
    numbers = peft_type.numbers(config, "", tensors)
    task, known = config.read("task_type", None), getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if task != TASKS[bool(known)]:
        raise unfit(f"the adapter is for {task}, and the model {'has' if known else 'has no'} encoder and decoder")
    own = tensors if peft_type.chosen is None else peft_type.chosen(config, tensors)
    named = {row.tensors[end]: tensor for end, tensor in own.items()}
    config.finish(peft_type.ignored)
    part = ModulePart(
        module="",
        equation=row.equation.format(**numbers),
        tensors=named,
        form=row.form,
        place=peft_type.place,
        tasks=numbers.get("tasks", 0),
        by_task=row.by_task,
    )
    return Incoming(config.type.lower(), [part])


def _common(
    config: PeftConfig,
    peft_type: PeftType,
    own: Mapping[str, Mapping[str, Tensor]],
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
) -> dict[str, Tensor]:
    """What all modules have in common: of the file, or as PEFT makes it again. Raises: P803."""
    rows = [row for ends in own.values() if (row := peft_type.row(config, ends)) is not None and row.common]
    if not rows:
        return {}
    names = rows[0].common
    there = {name: tensors[name] for name in names if name in tensors}
    if not there and peft_type.common is not None:
        there = peft_type.common(config, {name: weight_size(modules[name]) for name in own})
    if lack := [name for name in names if name not in there]:
        raise damaged(f"the adapter has no tensor `{lack[0]}`")
    return {names[name]: tensor for name, tensor in there.items()}


def weight_size(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a Linear, however it stores its weight. Raises: P804."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise unfit(f"a {type(module).__name__} is no Linear")
    first, second = weight.shape
    return (second, first) if isinstance(module, Conv1D) else (first, second)


def _is_in(module: str, ends: Collection[str]) -> bool:
    """Whether PEFT takes a module, or one around it, for one of `modules_to_save`."""
    parts = module.split(".")
    return any(".".join(parts[: i + 1]).endswith(tuple(ends)) for i in range(len(parts)))


def _check_saved(ends: Collection[str], saved: Collection[str], parameters: Mapping[str, str]) -> None:
    """Raises: P803 where a module that the configuration says is saved is not there."""
    for name, place in parameters.items():
        if place not in saved and _is_in(name.rpartition(".")[0], ends):
            raise damaged(f"`modules_to_save` has {join_names(list(ends))}, and there is no tensor `{name}`")


def _check_tied(copies: Collection[str], present: Collection[str], model: nn.Module) -> None:
    """Raises: P804 where PEFT would change one use of a tied parameter, and leave the other."""
    for place in copies:
        for name in aliases(model, place):
            if name not in present:
                message = f"`{place}` is tied to `{name}`, and the adapter has values for one of them"
                help_ = "train it with `ensure_weight_tying=True`, or untie the base"
                raise PeftcError(Diagnostic("P804", message, help=help_))


def _of_base(name: str) -> str:
    """The name of a parameter without the modules that PEFT puts around it."""
    return name.replace(".base_layer.", ".").replace(".ln_tuning_layers.", ".")


def _save(incoming: Incoming, name: str, tensor: Tensor) -> None:
    """Raises: P804 for two values of a tied parameter."""
    before = incoming.saved.setdefault(name, tensor)
    if before.shape != tensor.shape or not before.equal(tensor):
        raise unfit(f"`{name}` has two names in the model, and other values under each in the adapter")


def _part(
    config: PeftConfig,
    peft_type: PeftType,
    owner: nn.Module,
    module: str,
    tensors: Mapping[str, Tensor],
    of_linear: Callable[[str, str], Tensor],
    group: str,
) -> ModulePart:
    row, own = peft_type.row(config, tensors), join_names(sorted(tensors))
    if row is None and any(set(tensors) < set(row.tensors) for row in peft_type.rows):
        raise damaged(f"of the tensors of `{module}` there is only {own}")
    if row is None:
        raise PeftcError(Diagnostic("P802", f"`{module}` has {own}, for which there is no equation"))
    weight = getattr(owner, "weight", None)
    most = max(peft_type.dimensions, weight.ndim if isinstance(weight, Tensor) else 2)
    for end, tensor in tensors.items():
        if tensor.ndim > most:
            raise damaged(f"`{module}.{end}` has the shape {list(tensor.shape)}")
    for key, end in peft_type.flags.items():
        if config.flag(key) != (end in tensors) and "lora_embedding_A" not in tensors:
            there = "has" if end in tensors else "has no"
            raise damaged(f"the configuration has `{key}: {config.flag(key)}`, and `{module}` {there} {end}")
    numbers = peft_type.numbers(config, module, tensors)
    rank = numbers.get("r")
    if rank is not None and all(rank not in tensor.shape for tensor in tensors.values()):
        shapes = ", ".join(f"{end} {list(tensor.shape)}" for end, tensor in tensors.items())
        message = f"`{module}` has the rank {rank} by the configuration, and {shapes}"
        raise PeftcError(Diagnostic("P804", message, help="`r` and `rank_pattern` are not those of the tensors"))
    if row.check is not None and (reason := row.check(tensors)):
        raise PeftcError(Diagnostic("P802", f"`{module}`: {reason}, which no equation says"))
    named = (
        {row.tensors[end]: tensor for end, tensor in tensors.items()}
        if row.read is None
        else row.read(config, tensors, weight_size(owner))
    )
    if row.of_base is not None:
        weight_size(owner)
        named |= row.of_base(config, tensors, partial(of_linear, module))
    own = (group, *(id(tensors[end]) for end in row.shared))
    equation, tasks = row.equation.format(**numbers), numbers.get("tasks", 0)
    return ModulePart(module, equation, named, row.step, row.form, group=own, tasks=tasks, by_task=row.by_task)


def tied_with_input(model: nn.Module, module: str) -> list[str]:
    """The modules that PEFT changes together: the input embedding and those tied with it."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if model.get_submodule(module) is not embedding or not getattr(model.config, "tie_word_embeddings", False):
        return [module]
    return [name.removesuffix(".weight") for name in aliases(model, f"{module}.weight")]


def tied_bias(model: nn.Module, names: Collection[str]) -> str | None:
    """Why PEFT computes something else at tied modules: it leaves out the bias of a head."""
    biased = (name for name in names if getattr(model.get_submodule(name), "bias", None) is not None)
    name = next(biased, None)
    return None if name is None else f"`{name}` has a bias, which PEFT leaves out beside a tied embedding"


def _tied_parts(
    part: ModulePart, config: PeftConfig, peft_type: PeftType, tensors: Mapping[str, Tensor], model: nn.Module
) -> list[ModulePart]:
    """Of a module, and of those that are tied with it, if PEFT changes them together."""
    row = peft_type.row(config, tensors)
    if row is None or not row.tied or len(names := tied_with_input(model, part.module)) == 1:
        return [part]
    if reason := tied_bias(model, names):
        raise PeftcError(Diagnostic("P802", f"{reason}: no equation says that"))
    let, equation = row.tied
    form = f"{part.form.strip()}\n\n{let.format(**peft_type.numbers(config, part.module, tensors))}"
    return [replace(part, module=name, form=form, equation=equation) for name in names]


def _unknown(key: str, end: str | None, name: str, modules: list[str]) -> Exception:
    if end is None:
        return PeftcError(Diagnostic("P802", f"the adapter has a tensor `{key}`, for which there is no equation"))
    module = name.removesuffix(f".{end}")
    if module.endswith(".base_layer"):
        message = f"`{key}` is of a LoRA of a parameter that `target_parameters` does not name"
        return PeftcError(Diagnostic("P802", message))
    near = did_you_mean(module, modules)
    return unfit(f"the model has no module `{module}`", *((near,) if near else ()))
