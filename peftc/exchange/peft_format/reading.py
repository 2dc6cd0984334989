"""The tensors of a PEFT adapter by module, and the equations that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.types import TYPES, PeftType
from peftc.exchange.spec_text import ModulePart, unfit


@dataclass(eq=False)
class Incoming:
    """An adapter of another program. `saved`: parameters of the base that it replaces, by name."""

    name: str
    parts: list[ModulePart] = field(default_factory=list[ModulePart])
    saved: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def read_peft(config: PeftConfig, tensors: Mapping[str, Tensor], model: nn.Module) -> Incoming:
    """Raises: P802, P803, P804."""
    peft_type = TYPES.get(config.type)
    if peft_type is None:
        raise refusal("peft_type", config.values.get("peft_type"), f"peftc reads {join_names(list(TYPES))}")
    modules = dict(model.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}  # tied parameters have several names
    parameters = {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    incoming, own = Incoming(config.type.lower()), defaultdict[str, dict[str, Tensor]](dict)
    ends = sorted({end for row in peft_type.rows for end in row.tensors}, key=len, reverse=True)
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        end = next((end for end in ends if name.endswith(f".{end}")), None)
        if end is not None and (module := name.removesuffix(f".{end}")) in modules:
            own[module][end] = tensor
        elif (place := _of_base(name)) in parameters:
            _save(incoming, parameters[place], tensor)
        else:
            raise _unknown(key, end, name, list(modules))
    incoming.parts += [_part(config, peft_type, module, own[module]) for module in modules if module in own]
    config.finish(peft_type.ignored)
    if not incoming.parts and not incoming.saved:
        raise damaged("the adapter has no tensors")
    return incoming


def _of_base(name: str) -> str:
    """The name of a parameter without the modules that PEFT puts around it."""
    return name.replace(".base_layer.", ".").replace(".ln_tuning_layers.", ".")


def _save(incoming: Incoming, name: str, tensor: Tensor) -> None:
    """Raises: P804 for two values of a tied parameter."""
    before = incoming.saved.setdefault(name, tensor)
    if before.shape != tensor.shape or not before.equal(tensor):
        raise unfit(f"`{name}` has two names in the model, and other values under each in the adapter")


def _part(config: PeftConfig, peft_type: PeftType, module: str, tensors: Mapping[str, Tensor]) -> ModulePart:
    row = peft_type.row(tensors)
    if row is None:
        raise refusal(
            "peft_type", config.type, f"`{module}` has {join_names(sorted(tensors))}, for which there is no equation"
        )
    numbers = peft_type.numbers(config, module, tensors)
    rank = numbers.get("r")
    if rank is not None and all(rank not in tensor.shape for tensor in tensors.values()):
        shapes = ", ".join(f"{end} {list(tensor.shape)}" for end, tensor in tensors.items())
        raise unfit(f"`{module}` has the rank {rank} by the configuration, and {shapes}")
    named = {row.tensors[end]: tensor for end, tensor in tensors.items()}
    return ModulePart(module, row.equation.format(**numbers), named, row.step)


def _unknown(key: str, end: str | None, name: str, modules: list[str]) -> Exception:
    if end is None:
        return refusal("peft_type", key, "the adapter has such a tensor, for which there is no equation")
    module = name.removesuffix(f".{end}")
    near = did_you_mean(module, modules)
    return unfit(f"the model has no module `{module}`", *((near,) if near else ()))
