"""The module of a form whose equation is in a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from peftc.equation_code.code import evaluate, evaluate_all
from peftc.equation_code.fold import Fold
from peftc.equation_code.form_code import forward_of, sum_of, sum_of_rows
from peftc.equation_code.functions import selection_part
from peftc.equation_code.initial_values import draw_at, write_initial
from peftc.equations.definition import TextForm, owner_path
from peftc.equations.patterns import bottleneck_of, takes_rows
from peftc.equations.primitives import ACTIVATIONS
from peftc.equations.words import is_choice_of_numbers
from peftc.forms.affine_module import Affine
from peftc.forms.form import Args
from peftc.forms.module import Draw, FormModule, Generators, HiddenUnits, Pair, has_values
from peftc.forms.sequence_module import Sequence as Positions
from peftc.modules.form_hooks import Hookable
from peftc.modules.torch_attributes import with_lazy_tables
from peftc.syntax import ast

if TYPE_CHECKING:
    from peftc.equations.analysis import Place

PLACE, PLACES = "_place", "_places"


@with_lazy_tables
class EquationModule(Hookable, FormModule):
    """The parameters of a form at one site, or the common ones of several, and its equation.

    The parameters have the names and sizes of the text. The code of an edited model has the
    operations of the equation itself, and reads the parameters here; `forward` runs the same
    operations where the form is chosen at run time, as those of several tasks are.
    Shapes: as `TextForm.shape` says.
    """

    definition: TextForm
    _common_attributes = (PLACE, PLACES)
    sequence: Positions | None = None  # of a form that selects positions
    _cache_name: str = ""  # under which a cache has what a form keeps of its tokens

    def setup(self) -> None:
        place, own = self.place, self.own_names()
        self.arity = len(place.inputs)
        tensors = self.definition.tensors(self.form_args, self.form_dims)
        starting = [name for name in own if _has_first_value(*tensors[name])]
        self._fixed = tuple(n for n in starting if tensors[n][0].parameters[tensors[n][1]].fixed)
        # Those whose first values follow from the base's weight.
        self._computed = tuple(name for name in starting if name not in self._draws())
        lines_of_others = ((n, line) for n, line in place.parameters.items() if place.tensor(n) not in own)
        self._owners = tuple((name, owner_path(line, self.definition)) for name, line in lines_of_others)
        if self.differs_by_site:  # which is called, also by compiled code
            self.prepare()

    @property
    def place(self) -> Place:
        own = vars(self)
        if PLACE not in own:
            own[PLACE] = self.definition.at(self.form_args, self.form_dims)
        return own[PLACE]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (PLACE, PLACES)}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.prepare()

    def own_names(self) -> list[str]:
        """The parameters and fixed values that this module has."""
        parameters = self.definition.parameters(self.form_args, self.form_dims)
        return [p.name for p in parameters if p.scope in self.scopes and p.role != "saved"]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and fixed values of the equation, by name."""
        return self._tensors_at(self.place)

    def _tensors_at(self, place: Place) -> dict[str, Tensor]:
        tensors = {name: self._tensor(place.tensor(name)) for name in place.parameters}
        selection = place.selection
        if selection is not None:
            tensors |= {name: selection_part(self, name, selection.units) for name in selection[:2]}
        return tensors

    def _tensor(self, name: str) -> Tensor:
        """A parameter or fixed value of this module, or of those with what several sites have."""
        module: FormModule | None = self
        while module is not None and not hasattr(module, name):
            module = module.owner_module
        return getattr(module, name)

    def forward(self, *inputs: Tensor) -> Tensor:
        return forward_of(self.place, self._owners)(self, *inputs[: self.arity or 1])

    def added_to(self, h: Tensor, *inputs: Tensor) -> Tensor:
        return sum_of(self.place, self._owners)(self, h, *inputs[: self.arity or 1])

    def sum_of_rows(self, names: tuple[str, ...]) -> Callable[..., Tensor] | None:
        is_own = type(self).added_to is EquationModule.added_to
        return sum_of_rows(self.place, self._owners, names) if is_own else None

    def with_arguments(self, args: Args) -> EquationModule:
        form = cast(EquationModule, super().with_arguments(args))
        for name in (PLACE, PLACES):
            vars(form).pop(name, None)
        return form

    def value_at(self, index: int, like: Tensor) -> Tensor | Pair:
        place = self.place_at(index)
        return self(like) if place is self.place else forward_of(place, self._owners)(self, like)

    @property
    def differs_by_site(self) -> bool:
        """Whether sites that share all parameters have values of their own."""
        return self.definition.differs_by_site(self.form_args)

    def place_at(self, index: int) -> Place:
        """The equation at the site numbered `index` of those that share all parameters."""
        if index == self.form_dims.index or not self.definition.asks_site_numbers:
            return self.place
        places = vars(self).setdefault(PLACES, {})
        if index not in places:
            places[index] = self.definition.at(self.form_args, replace(self.form_dims, index=index))
        return places[index]

    def collapsed_at(self, index: int) -> Mapping[str, Tensor]:
        place = self.place_at(index)
        tensors = self._tensors_at(place)
        with torch.no_grad():
            return {name: evaluate(place, node, {}, tensors).contiguous() for name, node in (place.saved or {}).items()}

    def collapsed(self) -> Mapping[str, Tensor]:
        return self.collapsed_at(self.index)

    def prepare(self) -> None:
        for index in self._indices() if self.definition.asks_site_numbers else (self.form_dims.index,):
            forward_of(self.place_at(index), self._owners)

    def draws(self) -> Mapping[str, Draw]:
        return {name: draw for name, draw in self._draws().items() if name not in self._fixed}

    def fixed_draws(self) -> Mapping[str, Draw]:
        return {name: draw for name, draw in self._draws().items() if name in self._fixed}

    def _draws(self) -> Mapping[str, Draw]:
        """How parameters and fixed values are drawn, the same for all forms at alike places."""
        # In a dictionary of their own: compiled code reads `code`, and hashes no places.
        known = self.place.code.setdefault("draws", {})
        key = self.scopes, self.form_dims.spots if self.place.tensors else ()
        if key not in known:
            tensors = self.definition.tensors(self.form_args, self.form_dims)
            own = ((name, *tensors[name]) for name in self.own_names())
            draws = ((name, draw_at(at, line)) for name, at, line in own if _has_first_value(at, line))
            known[key] = {name: draw for name, draw in draws if draw is not None}
        return known[key]

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        super().initialise(generator, base)
        if self._computed:
            tensors = self.definition.tensors(self.form_args, self.form_dims)
            write_initial(self.place, base, {tensors[name][1]: getattr(self, name) for name in self._computed})
        for copy, name in self.place.copies.items():
            if copy in self._buffers and has_values(self.get_buffer(copy)):
                self.get_buffer(copy).copy_(getattr(self, name).detach())

    def fix(self, place: str) -> None:
        if self._fixed:
            super().fix(place)

    def sets_values(self) -> bool:
        return bool(self._fixed or self._computed or self.place.copies)

    def reduction_of(self, term: str) -> Literal["sum", "mean"]:
        return "mean" if term in self.place.mean_losses else "sum"

    def penalties(self) -> Mapping[str, Tensor]:
        """The lines `loss_NAME = …` of the text, by name, over sites that share all parameters."""
        terms: dict[str, list[Tensor]] = {}
        for index in self._indices() if self.place.losses else ():
            place = self.place_at(index)
            values = evaluate_all(place, tuple(place.losses.values()), {}, self._tensors_at(place))
            for name, value in zip(place.losses, values, strict=True):
                terms.setdefault(name, []).append(value.reshape(()))
        return {
            name: torch.stack(values).mean() if self.reduction_of(name) == "mean" else torch.stack(values).sum()
            for name, values in terms.items()
        }

    def _indices(self) -> Sequence[int]:
        """The numbers of the sites that share all parameters of this module, or that of its own."""
        shares_all = self.definition.common(self.form_args) is not None and {"site", "common"} <= self.scopes
        return range(self.form_dims.sites) if shares_all else (self.form_dims.index,)

    def fold(self, value: Affine) -> Affine:
        return self.fold_at(self.form_dims.index, value)

    def fold_at(self, index: int, value: Affine) -> Affine:
        place = self.place_at(index)
        tensors = {name: tensor.detach() for name, tensor in self._tensors_at(place).items()}
        parameters = {n: t.to(value.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

        def constant(node: ast.Expr) -> Tensor:
            return evaluate(place, node, {}, parameters)

        assert place.result is not None
        result = Fold(place, value, constant).value(place.result)
        if not isinstance(result, Affine):
            raise TypeError(f"{self.definition.name} does not depend on its input")
        return result

    def extra_repr(self) -> str:
        return f"{self.definition.name}: {super().extra_repr()}"

    def takes_rows(self) -> bool:
        return takes_rows(self.place)

    def hidden_units(self) -> HiddenUnits | None:
        bottleneck = bottleneck_of(self.place)
        if bottleneck is None or bottleneck.of_heads or bottleneck.act not in ACTIVATIONS:
            return None
        down, down_bias, up, up_bias = (
            None if part is None else evaluate(self.place, part, {}, self.tensors())
            for part in (bottleneck.down, bottleneck.down_bias, bottleneck.up, bottleneck.up_bias)
        )
        assert down is not None
        assert up is not None
        factor = bottleneck.factor
        return down, down_bias, factor * up, None if up_bias is None else factor * up_bias, bottleneck.act


def _has_first_value(place: Place, name: str) -> bool:
    """Whether the text has the first value: not of a copy, nor of what a command fills."""
    line = place.parameters[name]
    return name not in place.states or is_choice_of_numbers(line) or name in place.frozen


def tensor_named(form: EquationModule, name: str) -> Tensor:
    """The parameter or fixed value with this name in the text, also a common one."""
    return form._tensor(form.place.tensor(name))  # pyright: ignore[reportPrivateUsage]  # names of methods are reserved in forms
