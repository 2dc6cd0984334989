"""The module of a form whose equation is in a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftc.equations.code_module import Forward, evaluate, forward_of
from peftc.equations.definition import scope_of
from peftc.equations.fold_module import Fold
from peftc.equations.initial_module import draw_of, write_initial
from peftc.forms.affine_module import Affine
from peftc.forms.module import Draw, FormModule, Generators, has_values
from peftc.forms.registry import Args, Dims, EquationForm
from peftc.syntax import ast

if TYPE_CHECKING:
    from peftc.equations.analysis import Place

OWNER, PLACE, FORWARDS = "owner_module", "_place", "_equation_forwards"


class EquationModule(FormModule):
    """The parameters of a form at one site, or the common ones of several, and its equation.

    The parameters have the names and sizes of the text. `forward` runs the code of the equation: a
    function of torch's operations, made once for evaluation and once for training.
    Shapes: as `Definition.shape` says.
    """

    def __init__(
        self,
        args: Args,
        dims: Dims,
        dtype: torch.dtype,
        device: torch.device | str | None,
        definition: EquationForm,
        scopes: frozenset[str],
    ) -> None:
        super().__init__(args, dims, dtype, device)
        self.definition, self.scopes = definition, scopes
        place = self.place
        self.arity = len(place.inputs)
        for name, size in place.sizes.items():
            line = place.parameters[name]
            if scope_of(line) in scopes:
                (self.fixed if line.fixed else self.parameter)(name, *size)

    @property
    def place(self) -> Place:
        own = vars(self)
        if PLACE not in own:
            own[PLACE] = self.definition.at(self.form_args, self.form_dims)
        return own[PLACE]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (PLACE, FORWARDS)}

    def copier(self) -> Callable[[], FormModule] | None:
        for name in (PLACE, FORWARDS):
            vars(self).pop(name, None)
        return super().copier()

    def own_names(self) -> list[str]:
        """The parameters and fixed values that this module has."""
        return [name for name, line in self.place.parameters.items() if scope_of(line) in self.scopes]

    def values(self) -> dict[str, Tensor]:
        """The parameters and fixed values of the equation, by name."""
        own = set(self.own_names())
        return {n: getattr(self if n in own else self.owner_module, n) for n in self.place.parameters}

    def forward(self, *inputs: Tensor) -> Tensor:
        like, dtype = inputs[0], self.dtype
        values = [x if x.dtype == dtype or not x.is_floating_point() else x.to(dtype) for x in inputs]
        forwards = vars(self).get(FORWARDS) or self._forwards()
        f = forwards[self.training](self, *values[: self.arity])
        return f if f.dtype == like.dtype or not like.is_floating_point() else f.to(like.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, in which the equation is computed."""
        tensors = iter(self._parameters.values() or self.values().values())
        return next((t.dtype for t in tensors if t is not None and t.is_floating_point()), self._options[0])

    def _forwards(self) -> tuple[Forward, Forward]:
        """The code of the equation in evaluation and in training."""
        place, own = self.place, self.own_names()
        owners = tuple((name, OWNER) for name in place.parameters if name not in own)
        forwards = forward_of(place, owners, training=False), forward_of(place, owners, training=True)
        vars(self)[FORWARDS] = forwards
        return forwards

    def draws(self) -> Mapping[str, Draw]:
        return {name: draw for name, draw in self._draws().items() if not self.place.parameters[name].fixed}

    def fixed_draws(self) -> Mapping[str, Draw]:
        return {name: draw for name, draw in self._draws().items() if self.place.parameters[name].fixed}

    def _draws(self) -> dict[str, Draw]:
        draws = ((name, draw_of(self.place, name)) for name in self.own_names())
        return {name: draw for name, draw in draws if draw is not None}

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        super().initialise(generator, base)
        place, known = self.place, self._draws()
        for name in self.own_names():
            parameter = getattr(self, name)
            if name not in known and has_values(parameter):
                write_initial(place, name, base, parameter)

    def fold(self, value: Affine) -> Affine:
        place = self.place
        parameters = {name: tensor.detach().to(value.dtype) for name, tensor in self.values().items()}

        def constant(node: ast.Expr) -> Tensor:
            return evaluate(place, node, {}, parameters)

        assert place.result is not None
        result = Fold(place, value, constant).value(place.result)
        if not isinstance(result, Affine):
            raise TypeError(f"{self.definition.name} does not depend on its input")
        return result

    def extra_repr(self) -> str:
        return f"{self.definition.name}: {super().extra_repr()}"
