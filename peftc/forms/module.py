"""Forms as torch modules: how they are built, given first values, shared between sites and folded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib import import_module
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.registry import Args, Dims, EquationForm, Form
from peftc.modules.new_modules import module_with, uninitialised_like
from peftc.modules.torch_attributes import TABLES

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

Generators = Callable[[str], torch.Generator]  # from the name of a parameter to the CPU generator of its values
Draw = Callable[[Tensor, torch.Generator], object]  # fills a float32 tensor in place
Pair = tuple[Tensor, Tensor]
HiddenUnits = tuple[Tensor, Tensor | None, Tensor, Tensor | None, str]
SEEDS = range(-(2**63), 2**64)  # those of torch


class Placement(Protocol):
    """What building needs of a `peftc.planning.ir.Instance`."""

    @property
    def form(self) -> Form: ...
    @property
    def args(self) -> Args: ...
    @property
    def dims(self) -> Dims: ...


class FormModule(nn.Module):
    """A functional form with its parameters at one site (or, as an owner, at several).

    Called with exactly one tensor: its input or, for a form without one, a tensor from which only dtype, device and batch
    are taken. Computes in the dtype of its parameters and returns the dtype of that tensor. Owns its parameters directly,
    under the names that are saved.

    `owner_module` holds what is common to several sites, where the form has such a part; `index` is the number of this
    site among them. It is held without being registered, so it is saved, moved and counted once, where it is registered;
    copies and pickles of the model keep one owner.
    """

    owner_module: FormModule | None
    index: int

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.form_args = dict(args)
        self.form_dims = dims
        self._options: tuple[torch.dtype, torch.device | str | None] = (dtype, device)
        self.__dict__["owner_module"] = None
        self.index = 0
        self.task: str | None = None
        self._states: tuple[str, ...] = ()

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        """The module that holds the parameters of several sites, or their common part."""
        return cls(args, dims, dtype, device)

    @classmethod
    def of_all(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        """What the owners of all tasks have in common, where `Form.all_count` says so."""
        raise TypeError(f"{cls.__name__} has nothing that all tasks have in common")

    def join(self, owner: FormModule, index: int, task: str | None = None) -> None:
        """Makes this the site numbered `index` of those that have `owner` in common; of edits `per task`, for one task."""
        self.__dict__["owner_module"] = owner
        self.index, self.task = index, task

    def parameter(self, name: str, *size: int) -> nn.Parameter:
        """Registers an uninitialised parameter."""
        dtype, device = self._options
        made = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.register_parameter(name, made)
        return made

    def optional(self, name: str, wanted: object, *size: int) -> nn.Parameter | None:
        """An uninitialised parameter where it is wanted, else None under that name."""
        if wanted:
            return self.parameter(name, *size)
        self.register_parameter(name, None)
        return None

    def fixed(self, name: str, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Registers a buffer that is never trained nor saved, since it can be drawn again (`fixed_draws`)."""
        made = torch.empty(size, dtype=dtype or self._options[0], device=self._options[1])
        self.register_buffer(name, made)
        return made

    def state(self, name: str, value: Tensor) -> Tensor:
        """Registers a buffer that changes while training and is saved with the parameters."""
        self.register_buffer(name, value.to(self._options[1] or value.device))
        self._states += (name,)
        return value

    def states(self) -> tuple[str, ...]:
        """The buffers that are saved with the parameters."""
        return self._states

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        """First values, drawn on the CPU in float32: they depend on the generators alone, not on device or dtype.

        Parameters without storage (meta, fake) are left alone.
        """
        if not any(has_values(p) for p in self._parameters.values() if p is not None):
            return
        for name, draw in self.draws().items():
            if has_values(parameter := self.get_parameter(name)):
                _fill(parameter, draw, generator(name))

    def sets_values(self) -> bool:
        """Whether `initialise` or `fix` may set values where parameters have no storage, or nothing is to be drawn."""
        cls = type(self)
        return cls.initialise is not FormModule.initialise or cls.fix is not FormModule.fix

    def draws(self) -> Mapping[str, Draw]:
        """How the first values of each parameter are drawn."""
        return {}

    def fix(self, place: str) -> None:
        """Draws what is never trained: it depends on the argument `seed`, the place and the name alone, so that whoever has
        the spec has the values. `place`: the path of the site; "" for what sites have in common.
        """
        for name, draw in self.fixed_draws().items():
            _fill(self.get_buffer(name), draw, seeded(f"{self.form_args['seed']}/{place}/{name}"))

    def fixed_draws(self) -> Mapping[str, Draw]:
        """How each buffer of `fixed` is drawn."""
        return {}

    def copier(self) -> Callable[[], FormModule] | None:
        """A function that makes forms like this new one, with uninitialised parameters of their own, in a fraction of the
        time of building them; None where the form has more of its own than parameters and numbers.
        """
        cls, own = type(self), (value for name, value in vars(self).items() if name not in TABLES)
        if self._modules or self._buffers or not all(map(_is_plain, own)):
            return None
        args, tables, common = self.form_args, tuple(TABLES.items()), dict(vars(self))
        parameters = {n: None if p is None else uninitialised_like(p) for n, p in self._parameters.items()}

        def copy() -> FormModule:
            attributes = common.copy()
            for name, kind in tables:
                attributes[name] = kind()
            attributes["form_args"] = args.copy()
            attributes["_parameters"] = {n: None if make is None else make() for n, make in parameters.items()}
            return module_with(cls, attributes)

        return copy

    def takes_rows(self) -> bool:
        """Whether the equation also holds for parameters with one value for each row of the batch (`rowwise_module`)."""
        return False

    def with_values(self, values: Mapping[str, Tensor]) -> FormModule:
        """A form that computes with these values in place of its parameters. It has all else in common with this form."""
        form = object.__new__(type(self))
        vars(form).update(vars(self), **values)  # found before parameters of the same name
        return form

    def value_at(self, index: int, like: Tensor) -> Tensor | Pair:
        """The value at the site numbered `index` of those that share these parameters."""
        return self(like)

    def prepare(self) -> None:
        """Makes what the first call would make, which `torch.compile` cannot."""

    def loaded(self) -> None:
        """Called when parameters and states have been read from a file."""

    def stepped(self, generator: torch.Generator) -> None:
        """What changes after each step of training."""

    def collapsed(self) -> Mapping[str, Tensor]:
        """The parameters of the simpler form that is saved in the place of this one, where `Form.collapses` says so."""
        raise TypeError(f"{type(self).__name__} is saved as it is")

    def collapsed_at(self, index: int) -> Mapping[str, Tensor]:
        """The same at the site numbered `index` of those that share these parameters."""
        return self.collapsed()

    def fold(self, value: Affine) -> Affine:
        """This form of an affine value; only where `Form.affine` says None."""
        raise TypeError(f"{type(self).__name__} is not affine")  # the planner's verdict comes first

    def hidden_units(self) -> HiddenUnits | None:
        """Of U act(D x + b) + c the parts D (r, d_in), b (r,), U (d_out, r), c (d_out,), and the name of act; None for another form."""
        return None

    def extra_repr(self) -> str:
        said = (f"{k}={v}" for k, v in self.form_args.items() if v is not None)
        return ", ".join([*said, *(f"{n}: {tuple(p.shape)}" for n, p in self.named_parameters(recurse=False))])


class Member(FormModule):
    """The place of one site among those that share all the parameters of `owner`."""

    owner_module: FormModule  # pyright: ignore[reportIncompatibleVariableOverride]  # a member always has one

    def __init__(self, owner: FormModule, index: int) -> None:
        super().__init__(owner.form_args, owner.form_dims, torch.float32, None)
        self.join(owner, index)

    def forward(self, like: Tensor) -> Tensor | Pair:
        return self.owner_module.value_at(self.index, like)

    def collapsed(self) -> Mapping[str, Tensor]:
        return self.owner_module.collapsed_at(self.index)

    def fold(self, value: Affine) -> Affine:
        return self.owner_module.fold(value)

    def extra_repr(self) -> str:
        return f"index={self.index}, of {type(self.owner_module).__name__}"


def build(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module of an instance with the parameters of its site, uninitialised; `dtype` is the base's at the site."""
    args = instance.form.fill(instance.args)
    if (definition := instance.form.definition) is not None:
        cls: Any = _class_of(instance.form)
        return cls(args, instance.dims, parameter_dtype(args, dtype), device, definition, definition.scopes_of("site"))
    return _class_of(instance.form)(args, instance.dims, parameter_dtype(args, dtype), device)


def build_owner(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module that holds what all sites of `instance.owner` have in common, uninitialised; registered once, at the root."""
    args = instance.form.fill(instance.args)
    if (definition := instance.form.definition) is not None:
        cls: Any = _class_of(instance.form)
        return cls(
            args, instance.dims, parameter_dtype(args, dtype), device, definition, definition.scopes_of("common")
        )
    return _class_of(instance.form).owner(args, instance.dims, parameter_dtype(args, dtype), device)


def build_of_all(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module that holds what all tasks have in common (`instance.of_all`), uninitialised; registered once, at the root."""
    args = instance.form.fill(instance.args)
    return _class_of(instance.form).of_all(args, instance.dims, parameter_dtype(args, dtype), device)


def member(owner: FormModule, index: int) -> Member:
    """The module that stands at the site numbered `index` (`Instance.index`)."""
    return Member(owner, index)


def parameter_dtype(args: Args, base: torch.dtype) -> torch.dtype:
    """`dtype=`, else float32 where the base is float16 or bfloat16 (or quantised), else the base's."""
    asked = args.get("dtype")
    if asked is not None:
        return cast(torch.dtype, getattr(torch, str(asked)))
    return base if base in (torch.float32, torch.float64) else torch.float32


def checked_seed(seed: int) -> int:
    """Raises: P560 where a seed is no whole number, or not one of torch's."""
    whole = isinstance(seed, SupportsIndex) and not isinstance(seed, bool)  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be anything
    if whole and seed in SEEDS:
        return int(seed)
    what = f"one of {seed.bit_length()} bits" if isinstance(seed, int) and seed not in SEEDS else f"{seed!r}"  # pyright: ignore[reportUnnecessaryIsInstance]
    message = f"a seed is a whole number from -2**63 to 2**64 - 1, not {what}"
    raise PeftcError(Diagnostic("P560", message, help="e.g. `seed=0`"))


def seeded(text: str) -> torch.Generator:
    """A generator on the CPU that depends on the text alone."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)


def _fill(tensor: Tensor, draw: Draw, generator: torch.Generator) -> None:
    if has_values(tensor):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        values = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        draw(values, generator)
        with torch.no_grad():
            tensor.copy_(values)


def _is_plain(value: object) -> bool:
    """Whether a value has no tensors, and nobody changes it."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, cast(tuple[object, ...], value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast(dict[str, object], value).values()))
    return value is None or isinstance(
        value, bool | int | float | str | frozenset | Dims | torch.dtype | torch.device | EquationForm
    )


def has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _class_of(form: Form) -> type[FormModule]:
    module, _, name = form.module.partition(":")
    return cast(type[FormModule], getattr(import_module(module), name))


# First values --------------------------------------------------------------------------------------------------------


def normal(std: float) -> Draw:
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


def truncated(std: float) -> Draw:
    """N(0, std) cut at two deviations (Houlsby et al. 2019)."""
    return lambda values, generator: nn.init.trunc_normal_(values, 0.0, std, -2 * std, 2 * std, generator=generator)


def kaiming(fan_in: int) -> Draw:
    """Kaiming uniform with a = √5, as `nn.Linear`: U(-1/√fan_in, 1/√fan_in)."""
    bound = 1 / sqrt(fan_in)
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


def constant(value: float) -> Draw:
    return lambda values, generator: values.fill_(value)


def projections(init: str, fan_in: int) -> tuple[Draw, Draw]:
    """First values of the down and the up projection of a bottleneck (`arguments.INIT`)."""
    match init:
        case "lora":
            return kaiming(fan_in), constant(0.0)
        case "houlsby":
            return truncated(0.01), truncated(0.01)
        case _:
            return normal(0.02), normal(0.02)
