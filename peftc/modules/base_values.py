"""What parameters of the base are read as: their own values, first ones, or those of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from peftc.concurrency.context import ChoiceVar, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.sharded_tensors import is_sharded

BASE_VALUES = "peftc_originals"  # attribute of a module: by the names of parameters, what they are read as
ADAPTERS = "adapter-values"  # the child, of the modules that sites share, with values of attached adapters


class BaseValue(Protocol):
    """What a parameter of the base is read as."""

    @property
    def edits(self) -> tuple[str, ...]:
        """The statements that decide it."""
        ...

    def read(self, parameter: Tensor, choice: ChoiceVar) -> Tensor:
        """The value that acts in the present context. `parameter`: the one of the module."""
        ...

    def of_base(self, parameter: Tensor) -> Tensor:
        """The value where no edit acts."""
        ...


@dataclass(frozen=True)
class OriginalValue:
    """The first value of a base parameter that `edit` trains."""

    edit: str
    value: Tensor

    @property
    def edits(self) -> tuple[str, ...]:
        return (self.edit,)

    def read(self, parameter: Tensor, choice: ChoiceVar) -> Tensor:
        return self.of_base(parameter) if choice.is_off(self.edit) else parameter

    def of_base(self, parameter: Tensor) -> Tensor:
        """The value, with the device, the dtype and the rows of the parameter."""
        value = self.value
        if (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device):
            return value
        result = parameter.detach().clone()
        rows = common_rows(parameter, value)
        result[rows].copy_(value[rows])
        return result


@dataclass(frozen=True)
class AttachedValues:
    """The values that attached adapters have of the base parameter `name`, by the statement that
    trains it: modules with a parameter for each adapter, named after it.
    """

    name: str
    by_edit: Mapping[str, nn.Module]

    @property
    def edits(self) -> tuple[str, ...]:
        return tuple(self.by_edit)

    def read(self, parameter: Tensor, choice: ChoiceVar) -> Tensor:
        """Raises: P448 (sharded in another way), P536 where rows have adapters of their own."""
        if is_sharded(parameter):
            others = (value for values in self.by_edit.values() for value in values.parameters())
            if not all(map(is_sharded, others)):
                raise PeftcError(in_parts(self.name))
            return parameter  # FSDP2 reads what it has sharded between calls, by its name
        for edit, values in self.by_edit.items():
            if not choice.is_off(edit):
                adapter = choice.adapter
                if isinstance(adapter, Rows):
                    raise PeftcError(one_value(edit, self.name))
                if adapter:
                    value: Tensor = vars(values)["_parameters"][adapter]
                    return value if value.device == parameter.device else value.to(parameter.device)  # in a replica
        return parameter

    def of_base(self, parameter: Tensor) -> Tensor:
        return parameter


def in_parts(name: str) -> Diagnostic:
    """P448 for a parameter of the base of which attached adapters have values that are whole."""
    message = f"`{name}` is in parts on several processes, and attached adapters have whole values in its place"
    help_ = "attach before `fully_shard`, and shard the whole model; tensor parallelism has to leave its module whole"
    return Diagnostic("P448", message, help=help_)


def one_value(edit: str, name: str) -> Diagnostic:
    """P536 for rows of different adapters, of which `edit` trains a parameter of the base."""
    message = f"a batch has one value of `{name}`, which `{edit}` trains"
    return Diagnostic("P536", message, help="put the rows with it into a batch of their own")


def common_rows(parameter: Tensor, value: Tensor) -> Any:
    """The rows that both have: an embedding may have been resized since."""
    return slice(min(len(value), len(parameter))) if value.ndim else ...


def register_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Registers a module at a dotted path. What is not on the way to it is made."""
    *parents, last = path.split(".")
    for name in parents:
        children: dict[str, nn.Module] = vars(root)["_modules"]
        if name not in children:
            children[name] = nn.Module().train(root.training)
        root = children[name]
    vars(root)["_modules"][last] = module
