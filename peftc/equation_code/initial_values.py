"""First values of parameters, as the text of a form names them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from peftc.equation_code.code import evaluate_all
from peftc.equations.analysis import Place
from peftc.equations.words import CHOICE, INITIAL_VALUES, TAIL
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
        case ast.Call(kind, (count,)) if kind == CHOICE:
            return partial(_choose, place.size(count))
        case ast.Call(kind, (count,)) if kind == TAIL:
            return partial(_count_up, place.size(count))
        case ast.Call(kind, args) if kind in INITIAL_VALUES:
            numbers = [float(place.number(arg)) for arg in args]
            return draw_of((kind, numbers[0]) if numbers else kind, size)
        case _:
            return None


def _choose(n: int, values: Tensor, generator: torch.Generator) -> None:
    """Numbers below n in any order, each as often as another, or once more."""
    some = torch.randperm(n, generator=generator)[: len(values) % n]
    numbers = torch.cat([torch.arange(n).repeat(len(values) // n), some])
    values.copy_(numbers[torch.randperm(len(values), generator=generator)])


def _count_up(n: int, values: Tensor, generator: torch.Generator) -> None:
    """The last numbers below n, in their order."""
    del generator
    values.copy_(torch.arange(n - len(values), n))


def write_initial(place: Place, base: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Writes first values that are computed from the base's weights into parameters, by name."""
    parts = [place.parameters[name].value for name in parameters]
    names = [one for part in parts for one in names_in(part) if one in place.types]
    stored = {one: base[one].detach() for one in dict.fromkeys(names)}  # raises where they have no values
    if not all(map(has_values, (*parameters.values(), *stored.values()))):
        return
    first = next(iter(parameters.values()))
    weights = {one: weight.to(first.device, first.dtype) for one, weight in stored.items()}
    with torch.no_grad():
        for parameter, value in zip(parameters.values(), evaluate_all(place, parts, weights, {}), strict=True):
            parameter.copy_(value.to(parameter.device, parameter.dtype).reshape(parameter.shape))
