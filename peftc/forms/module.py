"""Forms as torch modules: how they are built, given first values, shared between sites and folded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from math import sqrt
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.form import Args, Dims, FirstValue, Form, ModulePath, Parameter
from peftc.forms.registry import is_built_in
from peftc.modules.new_modules import module_with, uninitialised_like
from peftc.modules.torch_attributes import TABLES, copied_tables, drop_empty_tables

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
    """The tensors of a form at one site, or what several sites have in common, and how it computes.

    A form that is a Python class names a subclass of this as its `module`. The subclass defines
    `forward`. The tensors that `Form.parameters` yields are its attributes, under their names.
    `forward` is called with the inputs of the form or, for a form without inputs, with a tensor of
    which only dtype, device and batch are meant. It computes in the dtype of its parameters, and
    returns the dtype of that tensor.

    Attributes:
        definition: the form.
        form_args: the arguments of the call, with all defaults.
        form_dims: the place where it stands.
        owner_module: the module with what sites have in common, if there is one. It is no child of
            this module: it is saved, moved and counted once. Copies and pickles of the model keep
            one owner.
        index: which of these sites this is.
        task: of edits `per task`, whose parameters these are.
        reduction: what becomes of the penalties of the sites of an edit.
    """

    owner_module: FormModule | None
    index: int
    reduction: ClassVar[Literal["sum", "mean"]] = "sum"
    _common_attributes: ClassVar[tuple[str, ...]] = ()  # what copies have in common, though it is not plain

    def __init__(
        self,
        definition: Form,
        args: Args,
        dims: Dims,
        scopes: Collection[str],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.definition, self.scopes = definition, frozenset(scopes)
        self.form_args, self.form_dims = dict(args), dims
        self._options: tuple[torch.dtype, torch.device | str | None] = (dtype, device)
        self.__dict__["owner_module"] = None
        self.index, self.task = 0, cast(str | None, None)
        self._states: tuple[str, ...] = ()
        for parameter in definition.parameters(args, dims):
            if parameter.scope in self.scopes:
                self._register(parameter)
        self.setup()

    def _register(self, parameter: Parameter) -> None:
        dtype, device = self._options
        dtype = cast(torch.dtype, getattr(torch, parameter.dtype)) if parameter.dtype else dtype
        name, size = parameter.name, parameter.size
        match parameter.role:
            case "trained" | "training":
                value = None if size is None else nn.Parameter(torch.empty(size, dtype=dtype, device=device))
                self.register_parameter(name, value)
            case "fixed":
                self.register_buffer(name, None if size is None else torch.empty(size, dtype=dtype, device=device))
            case "state":
                self.state(name, torch.zeros(size or (), dtype=dtype, device=device))
            case "saved":
                pass

    def setup(self) -> None:
        """Adds what `forward` needs beside the tensors: numbers, states, buffers."""

    def join(self, owner: FormModule, index: int, task: str | None = None) -> None:
        """Makes this the site numbered `index` of those that have `owner` in common; of edits `per task`, for one task."""
        self.__dict__["owner_module"] = owner
        self.index, self.task = index, task

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
        if not any(has_values(t) for t in (*self.parameters(False), *self.buffers(False))):
            return
        for name, draw in self.draws().items():
            if has_values(tensor := cast(Tensor, getattr(self, name))):
                fill_values(tensor, draw, generator(name))

    def sets_values(self) -> bool:
        """Whether `initialise` or `fix` may set values where parameters have no storage, or nothing is to be drawn."""
        cls = type(self)
        return cls.initialise is not FormModule.initialise or cls.fix is not FormModule.fix

    def draws(self) -> Mapping[str, Draw]:
        """How the first values of each parameter are drawn, by `Parameter.first`."""
        return self._draws_of("trained", "training")

    def fix(self, place: str) -> None:
        """Draws what is never trained: it depends on the argument `seed`, the place and the name alone, so that whoever has
        the spec has the values. `place`: the path of the site; "" for what sites have in common.
        """
        for name, draw in self.fixed_draws().items():
            fill_values(self.get_buffer(name), draw, seeded(f"{self.form_args['seed']}/{place}/{name}"))

    def fixed_draws(self) -> Mapping[str, Draw]:
        """How each fixed tensor is drawn, by `Parameter.first`."""
        return self._draws_of("fixed")

    def _draws_of(self, *roles: str) -> Mapping[str, Draw]:
        parameters = self.definition.parameters(self.form_args, self.form_dims)
        own = (p for p in parameters if p.role in roles and p.scope in self.scopes)
        return {p.name: draw_of(p.first, p.size) for p in own if p.size is not None}

    def copier(self) -> Callable[[], FormModule] | None:
        """A function that makes forms like this new one, with uninitialised parameters of their own, in a fraction of the
        time of building them; None where the form has more of its own than parameters and numbers.
        """
        cls, args, tables = type(self), self.form_args, copied_tables(type(self))
        common = {name: value for name, value in vars(self).items() if name not in TABLES}
        own = (value for name, value in common.items() if name not in self._common_attributes)
        if self._modules or self._buffers or not all(map(_is_plain, own)):
            return None
        drop_empty_tables(self)
        parameters = [(n, None if p is None else uninitialised_like(p)) for n, p in self._parameters.items()]

        def copy() -> FormModule:
            attributes = common | {name: kind() for name, kind in tables}
            attributes["form_args"] = args.copy()
            attributes["_parameters"] = {n: None if make is None else make() for n, make in parameters}
            return module_with(cls, attributes)

        return copy

    def added_to(self, h: Tensor, *inputs: Tensor) -> Tensor:
        """h plus the value, which is a tensor."""
        return h + cast(Tensor, self(*inputs))

    def takes_rows(self) -> bool:
        """Whether the equation also holds for parameters with one value for each row of the batch (`stacked_module`)."""
        return False

    def sum_of_rows(self, names: tuple[str, ...]) -> Callable[..., Tensor] | None:
        """A function of a form, h, inputs, and values in the place of these parameters, as `with_values(…).added_to` computes
        them; None where there is only that.
        """
        return None

    def with_values(self, values: Mapping[str, Tensor]) -> FormModule:
        """A form that computes with these values in place of its parameters. It has all else in common with this form."""
        form = object.__new__(type(self))
        vars(form).update(vars(self), **values)  # found before parameters of the same name
        return form

    def with_arguments(self, args: Args) -> FormModule:
        """This form with other arguments of its value (`Form.value_arguments`). It has all else in common with this one."""
        form = object.__new__(type(self))
        vars(form).update(vars(self), form_args=dict(args))
        return form

    def value_at(self, index: int, like: Tensor) -> Tensor | Pair:
        """The value at the site numbered `index` of those that share these parameters."""
        return self(like)

    def prepare(self) -> None:
        """Makes what the first call would make, which `torch.compile` cannot."""

    def after_load(self) -> None:
        """Called when parameters and states have been read from a file."""

    def after_step(self, generator: torch.Generator) -> None:
        """What changes after each step of training (`peftc.step`).

        Args:
            generator: on the CPU; it depends on the seed, the site and the number of the step.
        """

    def penalties(self) -> Mapping[str, Tensor]:
        """The terms that it adds to the loss (`peftc.losses`), by name: numbers, ()."""
        return {}

    def reduction_of(self, term: str) -> Literal["sum", "mean"]:
        """What becomes of a term of the loss over the sites of an edit."""
        return self.reduction

    def require_ready(self) -> None:
        """Raises: PeftcError if it has nothing to train or save yet: something has to be selected or read first."""

    def collapsed(self) -> Mapping[str, Tensor]:
        """The parameters of the simpler form that is saved in its place (`Form.saved_as`), by name."""
        raise TypeError(f"{type(self).__name__} is saved as it is")

    def collapsed_at(self, index: int) -> Mapping[str, Tensor]:
        """The same at the site numbered `index` of those that share these parameters."""
        return self.collapsed()

    def fold(self, value: Affine) -> Affine:
        """The form of an affine value, for a form that is affine (`Form.not_affine`)."""
        message = f"`{self.definition.name}` is affine, and {type(self).__name__} has no `fold`"
        raise PeftcError(
            Diagnostic("P574", message, help="write `FormModule.fold`, or the reason in `Form.not_affine`")
        )

    def fold_at(self, index: int, value: Affine) -> Affine:
        """The same at the site numbered `index` of those that share these parameters."""
        return self.fold(value)

    def hidden_units(self) -> HiddenUnits | None:
        """Of U act(D x + b) + c the parts D (r, d_in), b (r,), U (d_out, r), c (d_out,), and the name of act; None for another form."""
        return None

    def extra_repr(self) -> str:
        said = (f"{k}={v}" for k, v in self.form_args.items() if v is not None)
        return ", ".join([*said, *(f"{n}: {tuple(p.shape)}" for n, p in self.named_parameters(recurse=False))])


EVERY_SCOPE = ("site", "common", "tasks")


def build(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module of an instance at its site, uninitialised; `dtype` is the base's at the site."""
    form = instance.form
    scopes = ("site",) if form.has_common_part else EVERY_SCOPE
    return _module(form.module_of(instance.form.fill(instance.args)), instance, scopes, dtype, device)


def build_owner(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module with what all sites of `instance.owner` have in common, uninitialised; registered once, at the root."""
    form = instance.form
    if form.has_common_part:
        return _module(form.common_module, instance, ("common",), dtype, device)
    return _module(form.module_of(form.fill(instance.args)), instance, EVERY_SCOPE, dtype, device)


def build_of_all(instance: Placement, *, dtype: torch.dtype, device: torch.device | str | None = None) -> FormModule:
    """The module with what all tasks have in common, uninitialised; registered once, at the root."""
    return _module(instance.form.tasks_module, instance, ("tasks",), dtype, device)


def _module(
    path: ModulePath, instance: Placement, scopes: Sequence[str], dtype: torch.dtype, device: torch.device | str | None
) -> FormModule:
    args = instance.form.fill(instance.args)
    dtype = dtype if instance.form.has_base_dtype else parameter_dtype(args, dtype)
    options = (instance.form, args, instance.dims, scopes, dtype, device)
    if is_built_in(instance.form):
        module, _, name = str(path).partition(":")
        return cast(type[FormModule], getattr(import_module(module), name))(*options)
    cls = _class_of_user(instance.form, path)
    try:
        return cls(*options)
    except PeftcError:
        raise
    except Exception as error:  # the user's code
        message = f"the module of the Python form `{instance.form.name}` failed: {type(error).__name__}: {error}"
        raise PeftcError(Diagnostic("P574", message)) from error


def _class_of_user(form: Form, path: ModulePath) -> type[FormModule]:
    """Raises: P574 where a Python form names no module."""
    try:
        module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
        cls: object = getattr(import_module(module), name) if isinstance(path, str) else path
    except Exception as error:  # the user's code
        message = f"the module of the Python form `{form.name}` cannot be imported: {type(error).__name__}: {error}"
        raise PeftcError(Diagnostic("P574", message)) from error
    if not isinstance(cls, type) or not issubclass(cls, FormModule):
        message = f"the module of the Python form `{form.name}`, `{path}`, is no `peftc.forms.FormModule`"
        raise PeftcError(Diagnostic("P574", message))
    return cls


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


def fill_values(tensor: Tensor, draw: Draw, generator: torch.Generator) -> None:
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
        value, bool | int | float | str | frozenset | Dims | torch.dtype | torch.device | Form
    )


def has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def draw_of(first: FirstValue, size: Sequence[int]) -> Draw:
    """How a first value is drawn (`Parameter.first`).

    - a number: all entries are it;
    - normal, truncated (at two deviations), uniform: N(0, a), or U(-a, a); a is 1 without it;
    - kaiming: as the weight of `nn.Linear`, U(-1/√n, 1/√n) for the last dimension n;
    - orthogonal: rows or columns are orthonormal; identity: ones on the diagonal, and a or 0 beside it;
      both of each matrix of a stack;
    - signs: 1 or -1, each as likely; permutation: 0, 1, … n - 1 in any order.
    """
    if isinstance(first, int | float):
        return lambda values, generator: values.fill_(first)
    kind, number = first if isinstance(first, tuple) else (first, 1.0)
    match kind:
        case "normal":
            return lambda values, generator: values.normal_(0.0, number, generator=generator)
        case "truncated":
            ends = (-2 * number, 2 * number)
            return lambda values, generator: nn.init.trunc_normal_(values, 0.0, number, *ends, generator=generator)
        case "kaiming" | "uniform":
            bound = 1 / sqrt(size[-1]) if kind == "kaiming" else number
            return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
        case "orthogonal":
            return lambda values, generator: [nn.init.orthogonal_(m, generator=generator) for m in _matrices(values)]
        case "identity":
            beside = number * (kind != first)
            return lambda values, generator: [nn.init.eye_(m).masked_fill_(m == 0, beside) for m in _matrices(values)]
        case "signs":
            return lambda values, generator: values.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        case "permutation":
            return lambda values, generator: values.copy_(torch.randperm(len(values), generator=generator))
        case _:
            raise ValueError(f"there is no distribution `{kind}`")


def _matrices(values: Tensor) -> Tensor:
    """The matrices of a stack, or the one that there is, (count, rows, columns)."""
    return values.view(-1, *values.shape[-2:])
