"""First values of parameters, as the text of a form names them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peftc.equation_code.code import evaluate
from peftc.equations.analysis import Place
from peftc.equations.words import INITIAL_VALUES
from peftc.forms.module import Draw, draw_of, has_values
from peftc.syntax import ast
from peftc.syntax.walk import names_in


def draw_at(place: Place, name: str) -> Draw | None:
    """How a parameter is drawn; None if its first value is computed from the base's weight."""
    value, size = place.parameters[name].value, place.sizes[name]
    number = place.initial(place.parameters[name])
    if number is not None:
        return draw_of(number, size)
    match value:
        case ast.Name(kind) if kind in INITIAL_VALUES:
            return draw_of(kind, size)
        case ast.Call(kind, args) if kind in INITIAL_VALUES:
            numbers = [float(place.number(arg)) for arg in args]
            return draw_of((kind, numbers[0]) if numbers else kind, size)
        case _:
            return None


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
