"""First values of parameters, as the text of a form names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from peftc.equation_code.code import evaluate
from peftc.equations.analysis import Place
from peftc.equations.primitives import INITIAL_VALUES
from peftc.forms.module import Draw, constant, has_values, kaiming, normal, truncated
from peftc.syntax import ast
from peftc.syntax.walk import names_in

_DRAWS: Mapping[str, Callable[..., Draw]] = {"normal": normal, "truncated": truncated}


def draw_of(place: Place, name: str) -> Draw | None:
    """How a parameter is drawn; None if its first value is computed from the base's weight."""
    value = place.parameters[name].value
    number = place.initial(place.parameters[name])
    if number is not None:
        return constant(number)
    match value:
        case ast.Name(kind) if kind in INITIAL_VALUES:
            return _draw(kind, place.sizes[name], None)
        case ast.Call(kind, args) if kind in INITIAL_VALUES:
            return _draw(kind, place.sizes[name], *(float(place.number(arg)) for arg in args))
        case _:
            return None


def _draw(kind: str, size: tuple[int, ...], number: float | None) -> Draw:
    match kind:
        case "kaiming":
            return kaiming(size[-1])
        case "normal" | "truncated":
            return _DRAWS[kind](1.0 if number is None else number)
        case "uniform":
            bound = 1.0 if number is None else number
            return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
        case "orthogonal":
            return lambda values, generator: nn.init.orthogonal_(values, generator=generator)
        case _:
            return lambda values, generator: nn.init.eye_(values)


def write_initial(place: Place, name: str, base: Mapping[str, Tensor], parameter: Tensor) -> None:
    """Writes a first value that is computed from the base's weights into a parameter."""
    node = place.parameters[name].value
    names = [one for one in dict.fromkeys(names_in(node)) if one in place.types]
    stored = {one: base[one].detach() for one in names}  # raises where they have no values
    if not all(map(has_values, (parameter, *stored.values()))):
        return
    weights = {one: weight.to(parameter.device, parameter.dtype) for one, weight in stored.items()}
    value = evaluate(place, node, weights, {})
    with torch.no_grad():
        parameter.copy_(value.to(parameter.device, parameter.dtype).reshape(parameter.shape))
