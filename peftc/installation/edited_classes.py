"""The classes of edited modules: generated ones, and overlays for what `disabled` changes.

Inside of `disabled`, base parameters that `train` has changed have their first values.
`save_pretrained` writes an adapter, and the base inside of `disabled`; `load_state_dict` reads the
tensors of an adapter, too. A call of the model checks that its edited modules are in it.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]

from peftc.concurrency.context import CHOICE, ChoiceVar
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.completeness import COMPLETENESS, Completeness, checked_call, edited_modules
from peftc.installation.record import RECORD, Installation, installation_of, is_installed, place_of_values
from peftc.modules.base_values import BASE_VALUES, AttachedValues, BaseValue, OriginalValue, register_at
from peftc.modules.instance_forward import FORWARD, rebind_forward, replace_base, unpatched_class
from peftc.modules.new_modules import set_class
from peftc.modules.quantizer import QUANTIZER, trainable_quantizer
from peftc.modules.subclasses import constructor, plain_subclass
from peftc.modules.walk import modules_in
from peftc.rewriting.edits import CONTAINER, SHARED
from peftc.specialization.generated_class import GeneratedClass

_UNDER, SAVE = "_peftc_under", "save_pretrained"
_saving: ContextVar[nn.Module | None] = ContextVar("peftc_saving", default=None)


def install_overlays(model: nn.Module, record: Installation, modules: Sequence[nn.Module]) -> None:
    """Gives modules of a compiled model the classes of this file. `modules`: those of the base."""
    owners: dict[nn.Module, dict[str, BaseValue]] = {}
    for name, value in base_values(record).items():
        parameter = true_parameter(model, name)
        for owner in model.modules():
            attributes = [n for n, p in vars(owner)["_parameters"].items() if p is parameter]
            if attributes:
                owners.setdefault(owner, {}).update(dict.fromkeys(attributes, value))
    for place, values in record.attached_values.items():
        register_at(model, place, values)
    for module, values in owners.items():
        vars(module).update({CHOICE: record.choice, BASE_VALUES: values})
    for module in (model, *(part for part in parts_with_files(modules) if has_edits(part))):
        owners.setdefault(module, {})
    for module, values in owners.items():
        saves, root = hasattr(type(module), "save_pretrained"), module is model
        module.__class__ = overlay_class(type(module), tuple(values), saves, root)
    vars(model)[COMPLETENESS] = Completeness(model)


def base_values(record: Installation) -> dict[str, BaseValue]:
    """What parameters of the base, by dotted name, are read as."""
    values: dict[str, BaseValue] = {
        name: OriginalValue(saved.partition("/")[0], record.originals[name]) for saved, name in record.trained.items()
    }
    attached: dict[str, dict[str, nn.Module]] = {}
    for saved, name in record.adapter_parameters.items():
        own = record.attached_values[place_of_values(saved)]
        attached.setdefault(name, {})[saved.partition("/")[0]] = own
    return values | {name: AttachedValues(name, by_edit) for name, by_edit in attached.items()}


def parts_with_files(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that have a `save_pretrained` of their own."""
    classes = {cls for cls in {*map(type, modules)} if hasattr(cls, "save_pretrained")}
    return [module for module in modules if type(module) in classes]


def has_edits(module: nn.Module) -> bool:
    """Whether an edit is at a module or in it."""
    pending: list[nn.Module | None] = [module]
    while pending:
        if (inner := pending.pop()) is not None:
            if CHOICE in inner.__dict__:
                return True
            pending += inner.__dict__["_modules"].values()
    return False


def true_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its dotted name, whatever the present context reads in its place."""
    module, _, attribute = name.rpartition(".")
    return vars(model.get_submodule(module))["_parameters"][attribute]


_classes = weakref.WeakValueDictionary[tuple[type, tuple[str, ...], bool, bool], type[nn.Module]]()


def overlay_class(cls: type[nn.Module], names: tuple[str, ...], saves: bool, root: bool) -> type[nn.Module]:
    """A subclass whose parameters `names` (and files, if it `saves`) follow the present context."""
    key = (cls, names, saves, root)
    if (present := _classes.get(key)) is not None:
        return present
    members: dict[str, Any] = {name: _parameter(name) for name in names}
    members |= {_UNDER: cls, "__init__": constructor(cls), "__reduce_ex__": _reduce}
    members["_peftc_over"] = (names, saves, root)
    if names:
        members["_replicate_for_data_parallel"] = _replicate
    if saves or root:
        members |= {"state_dict": _over(cls.state_dict, _state_dict)}
        members |= {"named_modules": _over(cls.named_modules, _named_modules)}
    if saves:
        members |= {"load_state_dict": _over(cls.load_state_dict, _load_state_dict)}
        members |= {SAVE: _over(getattr(cls, SAVE), _save_pretrained)}
    if root:
        members |= {"__call__": checked_call(cls), "__setstate__": _setstate(cls), QUANTIZER: trainable_quantizer}
    return _classes.setdefault(key, plain_subclass(cls, members))


def _over(below: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an overlay class, whose first argument is the bound method that it overrides: of
    a part that was compiled alone, that is one of the overlay class below.
    """

    @functools.wraps(below)
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(below.__get__(self), self, *args, **kwargs)

    return override


def _parameter(name: str) -> property:
    def get(self: Any) -> Any:
        attributes = vars(self)
        if name not in self._parameters and name not in attributes:
            raise AttributeError(name)
        own = self._parameters[name] if name in self._parameters else attributes[name]  # a plain one in replicas
        if BASE_VALUES not in attributes:  # a program has constructed the module, of a derived class
            return own
        return attributes[BASE_VALUES][name].read(own, attributes[CHOICE])

    def set_(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return property(get, set_)


def _reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles what an overlay class is made of; others may have derived from it."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    cls, overlay = type(self), own_overlay(self)
    under: Any = vars(overlay)[_UNDER]
    arguments = (vars(under).get("_peftc_kind", under), *cls._peftc_over)
    return (_blank, arguments if cls is overlay else (*arguments, cls), state)


def _blank(under: Any, names: tuple[str, ...], saves: bool, root: bool = False, derived: Any = None) -> nn.Module:
    cls = overlay_class(under if isinstance(under, type) else under.cls, names, saves, root)
    if derived is not None:
        cls = replace_base(derived, top_overlay(derived) or cls, cls)
    return cls.__new__(cls)


def _setstate(under: Any) -> Callable[..., None]:
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        under.__setstate__(self, state)
        if RECORD in state:  # else a program has constructed it, of a derived class
            vars(self)[COMPLETENESS] = Completeness(self)

    return __setstate__


def _replicate(self: Any) -> Any:
    below: Any = super(own_overlay(self), self)
    replica = below._replicate_for_data_parallel()
    vars(replica)[CHOICE] = cast(ChoiceVar, vars(self)[CHOICE]).fixed()
    return replica


def _state_dict(below: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    prefix = kwargs.get("prefix") or (args[1] if len(args) > 1 else "")
    is_edited = bool(prefix) and is_installed(self) and bool(installation_of(self).site_edits)
    if is_edited and (saving := saving_around(self)) is not None:
        require_no_edits(self, saving[0], prefix)
        state = of_base(self, below(**{**kwargs, "destination": None, "prefix": ""}))
        kwargs["destination"].update({f"{prefix}{name}": value for name, value in state.items()})
        return kwargs["destination"]
    state = below(*args, **kwargs)
    return of_base(self, state) if _saving.get() is self else state


def _named_modules(
    below: Callable[..., Any], self: Any, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Any:
    """What `save_pretrained` of a model around this one asks first, whatever state it was given."""
    is_edited = bool(prefix) and is_installed(self) and bool(installation_of(self).site_edits)
    if is_edited and (saving := saving_around(self)) is not None:
        require_no_edits(self, saving[0], prefix)
        if isinstance(state := saving[1].get("state_dict"), dict):
            keep_base(self, cast(dict[str, Any], state), f"{prefix}.")
    return below(memo, prefix, remove_duplicate)


def keep_base(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Takes edits, and what they have trained, out of a state dict that is about to be saved."""
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    base = of_base(module, {name.removeprefix(prefix): value for name, value in own.items()})
    for name in own:
        if name.removeprefix(prefix) in base:
            state[name] = base[name.removeprefix(prefix)]
        else:
            del state[name]


def saving_around(module: nn.Module) -> tuple[nn.Module, Mapping[str, Any]] | None:
    """The model around a compiled one whose `save_pretrained` runs, with the variables of the call.
    It knows nothing of edits.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == SAVE and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and owner is not module and not is_installed(owner):
                return (owner, frame.f_locals) if any(part is module for part in modules_in(owner)) else None
        frame = frame.f_back
    return None


def require_no_edits(module: nn.Module, outer: nn.Module, prefix: str) -> None:
    """Raises: P581 where edits act. `prefix`: that of the module's names in `outer`."""
    record, place = installation_of(module), prefix.rstrip(".")
    acting = [edit for spec in record.specs for edit in spec.edits if not record.choice.is_off(edit)]
    if acting:
        message = f"`{place}` of this {type(outer).__name__} has edits (`{acting[0]}`), which its class would not read"
        help_ = "inside of `peftc.disabled` this writes the base alone"
        help_ = f"`peftc.save(model.{place}, …)` saves the adapter; {help_}"
        raise PeftcError(Diagnostic("P581", message, help=help_))


def _load_state_dict(
    below: Callable[..., Any], self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Reads the tensors of an adapter where it is given some: `Trainer` calls this to resume."""
    if is_installed(self) and (checkpoints := _checkpoints()).is_adapter(state_dict):
        checkpoints.load_tensors(self, state_dict)
        return _IncompatibleKeys([], [])
    return below(state_dict, *args, **kwargs)


def _save_pretrained(save: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes the edits that act, as an adapter; the base where none does (inside of `disabled`)."""
    edits = edits_in(self)
    if not (is_installed(self) or edits):
        return save(*args, **kwargs)
    call, checkpoints = inspect.signature(save).bind(*args, **kwargs), _checkpoints()
    if is_installed(self) and checkpoints.acting_specs(installation_of(self)):
        return checkpoints.save_pretrained(self, call.arguments)
    if acting := [edit for edit, choice in edits.items() if not choice.is_off(edit)]:
        message = f"this {type(self).__name__} is a part of a compiled model, and has edits of it (`{acting[0]}`)"
        help_ = "save the model that was compiled; inside of `peftc.disabled(model)` this writes the base alone"
        raise PeftcError(Diagnostic("P581", message, help=help_))
    checkpoints.check_base_folder(call.arguments)
    if call.arguments.get("state_dict") is not None:
        call.arguments["state_dict"] = of_base(self, call.arguments["state_dict"])
    token = _saving.set(self)
    try:
        return save(*call.args, **call.kwargs)
    finally:
        _saving.reset(token)


def save_with_edits(model: nn.Module, directory: Path) -> None:
    """Writes all weights of a compiled model, those of edits under their names in the model."""
    below: Any = next(c for c in own_overlay(model).__mro__ if _UNDER not in vars(c))
    below.save_pretrained(model, directory)


def _checkpoints() -> Any:
    return import_module("peftc.adapters.checkpoints")  # a later stage, which calls this one


def top_overlay(cls: type[Any]) -> type[Any] | None:
    """The uppermost overlay class among the bases of a class."""
    return next((c for c in cls.__mro__ if _UNDER in vars(c)), None)


def own_overlay(self: nn.Module) -> type[Any]:
    """The uppermost overlay class of a module; FSDP2 puts another class in front of it."""
    return next(c for c in type(self).__mro__ if _UNDER in vars(c))


def edits_in(module: nn.Module) -> dict[str, ChoiceVar]:
    """The edits at a module and in it, each with the choice that switches it off."""
    edits: dict[str, ChoiceVar] = {}
    for own in module.modules():
        kind: Any = getattr(type(own), "_peftc_kind", None)  # a wrapper has the attributes of its module
        names = [] if kind is None else [edit.edit for edit in kind.edits]
        names += [edit for value in vars(own).get(BASE_VALUES, {}).values() for edit in value.edits]
        edits |= {name: vars(own)[CHOICE] for name in names if CHOICE in vars(own)}
    return edits


def of_base(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a module without edits, and without what they have trained."""
    places, values = [f"{SHARED}."], dict[str, Tensor]()
    for name, own in module.named_modules(remove_duplicate=False):
        if hasattr(type(own), "_peftc_kind"):
            places.append(f"{name}.{CONTAINER}.".lstrip("."))
        for attribute, original in vars(own).get(BASE_VALUES, {}).items():
            value = original.of_base(vars(own)["_parameters"][attribute])
            values[f"{name}.{attribute}".lstrip(".")] = value
    return {key: values.get(key, value) for key, value in state.items() if not key.startswith(tuple(places))}


class EditedModule(NamedTuple):
    """A module, its generated class, and what holds the parameters of its edits."""

    module: nn.Module
    cls: GeneratedClass
    container: nn.Module


def install_edits(
    model: nn.Module,
    record: Installation,
    modules: Iterable[EditedModule],
    shared: nn.Module | None,
    base_modules: Sequence[nn.Module] | None = None,
) -> None:
    """Puts edits into a model. `shared`: the forms that several sites share. `base_modules`: the
    modules of the model, if they are known.
    """
    base_modules = modules_in(model) if base_modules is None else base_modules
    choice = record.choice
    for module, generated, container in modules:
        own, cls = vars(module), type(module)
        own[CHOICE] = choice
        if cls is generated.base:
            set_class(module, generated.cls)
        elif generated.cls not in cls.__mro__:
            module.__class__ = replace_base(cls, unpatched_class(generated.base), generated.cls)
        if FORWARD in own:
            rebind_forward(module, generated.cls.forward)
        own["_modules"][CONTAINER] = container
    if shared is not None:
        vars(model)["_modules"][SHARED] = shared
    vars(model)[RECORD] = record
    install_overlays(model, record, base_modules)


def remove_edits(model: nn.Module, modules: Iterable[EditedModule]) -> None:
    """Takes out what `install_edits` has put in, however far it has come."""
    vars(model).pop(COMPLETENESS, None)
    for module in model.modules():
        while (overlay := top_overlay(type(module))) is not None:
            module.__class__ = replace_base(type(module), overlay, vars(overlay)[_UNDER])
        if vars(module).pop(BASE_VALUES, None) is not None and not hasattr(type(module), "_peftc_kind"):
            vars(module).pop(CHOICE, None)
    for module, generated, _ in modules:
        if generated.cls in type(module).__mro__:
            module.__class__ = replace_base(type(module), generated.cls, unpatched_class(generated.base))
            rebind_forward(module, generated.base.forward)
        vars(module)["_modules"].pop(CONTAINER, None)
        vars(module).pop(CHOICE, None)
    vars(model)["_modules"].pop(SHARED, None)
    vars(model).pop(RECORD, None)


def strip(model: nn.Module, requires_grad: Mapping[str, bool] | None = None) -> nn.Module:
    """The model without edits; all values stay, and `requires_grad` is as before the first spec."""
    record = installation_of(model)
    flags = record.requires_grad if requires_grad is None else requires_grad
    remove_edits(model, edited_parts(model, record))
    for name, parameter in model.named_parameters():
        flag = flags.get(name, parameter.requires_grad)
        set_requires_grad(parameter, flag)
        if not flag:
            parameter.grad = None
    return model


def edited_parts(model: nn.Module, record: Installation) -> list[EditedModule]:
    """The modules of a model that have a generated class."""
    modules = [m for m in edited_modules(model, record) if hasattr(m, "_peftc_kind")]
    return [EditedModule(m, cast(Any, m)._peftc_kind, vars(m)["_modules"][CONTAINER]) for m in modules]


def set_requires_grad(parameter: torch.Tensor, flag: bool) -> None:
    """`requires_grad_`, also of parameters that an offload hook made inside of `inference_mode`."""
    if parameter.requires_grad != flag:
        if parameter.is_inference():
            with torch.inference_mode():
                parameter.requires_grad_(flag)
        else:
            parameter.requires_grad_(flag)
