"""Classes put over those of modules that have something else inside of `disabled`: base parameters that `train` has changed have
their first values, and `save_pretrained` of the model writes the base. A call of the model itself asks whether all edits are in it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from peftc.concurrency.context import CHOICE, ChoiceVar
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.presence import ORIGINALS, PRESENCE, VIEW, Presence, refuse_loss, refuse_loss_of
from peftc.installation.record import Installation, installation_of, is_installed
from peftc.specialization.derived_classes import replace_base

_UNDER = "_peftc_under"
_saving: ContextVar[bool] = ContextVar("peftc_saving", default=False)


@dataclass(frozen=True)
class Original:
    """The first value of a base parameter that `edit` trains."""

    edit: str
    value: Tensor

    def like(self, parameter: Tensor) -> Tensor:
        """It, on the parameter's device, in its dtype, and with its rows: an embedding may have got more since, or lost some."""
        value = self.value
        if (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device):
            return value
        result = parameter.detach().clone()
        put_back(result, value)
        return result


@torch.no_grad()
def put_back(parameter: Tensor, value: Tensor) -> None:
    """Gives a parameter its value of before; an embedding may have got more rows since, or lost some."""
    rows = slice(min(len(value), len(parameter))) if value.ndim else ...
    parameter[rows].copy_(value[rows])


def cover(model: nn.Module, record: Installation) -> None:
    """Puts the classes over those of a compiled model's modules."""
    first = {saved: Original(saved.partition("/")[0], record.originals[n]) for saved, n in record.trained.items()}
    owners: dict[nn.Module, dict[str, Original]] = {}
    for saved, name in record.trained.items():
        for owner, attribute in owners_of(model, true_parameter(model, name)):
            owners.setdefault(owner, {})[attribute] = first[saved]
    for module, originals in owners.items():
        vars(module).update({CHOICE: record.choice, ORIGINALS: originals})
    owners.setdefault(model, {})
    for module, originals in owners.items():
        saves, root = module is model and hasattr(model, "save_pretrained"), module is model
        module.__class__ = over(type(module), tuple(originals), saves, root)
    vars(model)[PRESENCE] = Presence(model)


def uncover(model: nn.Module) -> None:
    """Takes them off."""
    vars(model).pop(PRESENCE, None)
    for module in model.modules():
        while (own := _made_here(type(module))) is not None:
            module.__class__ = replace_base(type(module), own, vars(own)[_UNDER])
        if vars(module).pop(ORIGINALS, None) is not None and not hasattr(type(module), "_peftc_kind"):
            vars(module).pop(CHOICE, None)


def true_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its dotted name, whatever the present context reads in its place."""
    module, _, attribute = name.rpartition(".")
    return vars(model.get_submodule(module))["_parameters"][attribute]


def owners_of(model: nn.Module, parameter: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """Every module that has the parameter itself, and its name there."""
    for module in model.modules():
        yield from ((module, name) for name, p in vars(module)["_parameters"].items() if p is parameter)


def check_readable(model: nn.Module, names: Iterable[str]) -> None:
    """Raises: P432 for a parameter that a module holds in a list besides, as recurrent ones do: it is read from there."""
    wanted = {id(true_parameter(model, n)): n for n in names}
    for name, module in model.named_modules():
        for attribute, held in vars(module).items():
            parts = held if isinstance(held, list | tuple) else ()
            if hit := next((wanted[id(p)] for p in cast(Iterable[object], parts) if id(p) in wanted), None):
                message = f"`{hit}` is trained, and {type(module).__name__} `{name}` reads it from its `{attribute}`"
                raise PeftcError(Diagnostic("P432", message, help="compare with a copy: peftc.remove(deepcopy(model))"))


_made: weakref.WeakValueDictionary[tuple[type, tuple[str, ...], bool, bool], type[nn.Module]] = (
    weakref.WeakValueDictionary()
)


def over(cls: type[nn.Module], names: tuple[str, ...], saves: bool, root: bool) -> type[nn.Module]:
    """A subclass under the same names whose parameters `names` are those of the present context.

    `saves`: it writes what the model is in the present context. `root`: its calls are those of the model.
    """
    key = (cls, names, saves, root)
    return _made.get(key) or _made.setdefault(key, _make(*key))


def _make(cls: type[nn.Module], names: tuple[str, ...], saves: bool, root: bool) -> type[nn.Module]:
    members: dict[str, Any] = {name: _parameter(name) for name in names}
    members |= {part: getattr(cls, part) for part in ("__module__", "__qualname__", "__doc__")}
    members |= {_UNDER: cls, "__reduce_ex__": _reduce, "_peftc_over": (names, saves, root)}
    if names:
        members["_replicate_for_data_parallel"] = _replicate
    if saves:
        members |= {"state_dict": _state_dict, "save_pretrained": _save_pretrained}
    if root:
        members |= {"__call__": _call(cls), "__setstate__": _setstate(cls)}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def _parameter(name: str) -> property:
    def get(self: Any) -> Any:
        own = self._parameters[name] if name in self._parameters else vars(self)[name]  # a plain one in replicas
        original = vars(self)[ORIGINALS][name]
        return original.like(own) if vars(self)[CHOICE].is_off(original.edit) else own

    def set_(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return property(get, set_)


def _reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles a module by the class or the kind below, and by the class that others have derived from the one made here."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    cls, own = type(self), _over(self)
    under: Any = vars(own)[_UNDER]
    made = (vars(under).get("_peftc_kind", under), *cls._peftc_over)
    return (_blank, made if cls is own else (*made, cls), state)


def _blank(under: Any, names: tuple[str, ...], saves: bool, root: bool = False, derived: Any = None) -> nn.Module:
    cls = over(under if isinstance(under, type) else under.cls, names, saves, root)
    if derived is not None:
        cls = replace_base(derived, _made_here(derived) or cls, cls)
    return cls.__new__(cls)


def _call(under: Any) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, PRESENCE):  # a bound method of it, such as `torch.compile` keeps, may outlive the edits
            return type(self).__call__(self, *args, **kwargs)
        if is_dynamo_compiling():
            presence = self.peftc_presence
            if not getattr(VIEW, presence.attribute):
                refuse_loss_of(presence.number)
        else:
            refuse_loss(self)
        return under.__call__(self, *args, **kwargs)

    return __call__


def _setstate(under: Any) -> Callable[..., None]:
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        under.__setstate__(self, state)
        vars(self)[PRESENCE] = Presence(self)

    return __setstate__


def _replicate(self: Any) -> Any:
    below: Any = super(_over(self), self)
    replica = below._replicate_for_data_parallel()
    vars(replica)[CHOICE] = cast(ChoiceVar, vars(self)[CHOICE]).fixed()
    return replica


def _state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    below: Any = super(_over(self, "state_dict"), self)
    state = below.state_dict(*args, **kwargs)
    return of_base(self, state) if _saving.get() else state


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes what the model is in the present context: inside of `disabled`, without the edits that do not act."""
    below: Any = super(_over(self, "save_pretrained"), self)
    save = below.save_pretrained
    if not is_installed(self) or not installation_of(self).choice.get().off:
        return save(*args, **kwargs)
    call = inspect.signature(save).bind(*args, **kwargs)
    if call.arguments.get("state_dict") is not None:
        call.arguments["state_dict"] = of_base(self, call.arguments["state_dict"])
    token = _saving.set(True)
    try:
        return save(*call.args, **call.kwargs)
    finally:
        _saving.reset(token)


def _made_here(cls: type[Any]) -> type[Any] | None:
    """The uppermost class made here from which a class is derived, or which it is."""
    return next((c for c in cls.__mro__ if _UNDER in vars(c)), None)


def _over(self: nn.Module, member: str = _UNDER) -> type[Any]:
    """The class made here, among those of a module; FSDP2 puts another one in front of it."""
    return next(c for c in type(self).__mro__ if _UNDER in vars(c) and member in vars(c))


def of_base(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without what belongs to edits that do not act, and with the first values of what they train."""
    record = installation_of(model)
    off = record.choice.is_off
    places = tuple(f"{place}." for name, place in record.form_modules.items() if off(name.partition("/")[0]))
    values: dict[str, Tensor] = {}
    for saved, name in record.trained.items():
        if off(saved.partition("/")[0]):
            parameter = true_parameter(model, name)
            value = Original("", record.originals[name]).like(parameter)
            values |= {n: value for n, p in model.named_parameters(remove_duplicate=False) if p is parameter}
    return {key: values.get(key, value) for key, value in state.items() if not key.startswith(places)}
