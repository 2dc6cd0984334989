"""Calls of forms that are not of the package: their errors are the user's."""

from __future__ import annotations

from typing import get_args

from peftc.forms.form import Args, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import is_built_in
from peftc.forms.shapes import Shape


def shape_at(form: Form, args: Args, dims: Dims) -> Shape:
    """The shape of a form's value at a place.

    Raises: PlacementError: what the form says, or P574 if its code fails, or gives no shape or no parameters.
    """
    if form.text is not None or is_built_in(form):
        return form.shape(args, dims)
    try:
        shape, parameters = form.shape(args, dims), list(form.parameters(args, dims))
        form.initial(args, dims)
        is_affine = form.not_affine(args, dims) is None
    except PlacementError:
        raise
    except Exception as error:  # the user's code
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = "" if place is None else f"{place.tb_frame.f_code.co_filename}, line {place.tb_lineno}"
        message = f"the Python form `{form.name}` failed: {type(error).__name__}: {error}"
        raise PlacementError("P574", message, notes=(where,) if where else ()) from error
    if not isinstance(shape, get_args(Shape)):
        raise PlacementError("P574", f"`{form.name}` gives {shape!r}, which is no shape of `peftc.forms.shapes`")
    for parameter in parameters:
        _check_parameter(form, parameter)
    names = [p.name for p in parameters if p.role != "saved"]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlacementError("P574", f"`{form.name}` has two parameters `{twice}`")
    if len(form.inputs) > 1 and is_affine:
        raise PlacementError("P574", f"`{form.name}` reads two states, and says that it is affine in one")
    return shape


def _check_parameter(form: Form, parameter: object) -> None:
    if not isinstance(parameter, Parameter):
        raise PlacementError("P574", f"`{form.name}` gives {parameter!r}, which is no `peftc.forms.Parameter`")
    sizes = () if parameter.size is None else parameter.size
    if not parameter.name.isidentifier() or not all(isinstance(n, int) and n > 0 for n in sizes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError("P574", f"`{form.name}` has a parameter `{parameter.name}` of size {parameter.size}")
