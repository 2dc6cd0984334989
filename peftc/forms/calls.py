"""Calls of forms that are not of the package: their errors are the user's."""

from __future__ import annotations

from typing import get_args, get_type_hints

from peftc.diagnostics.suggestions import join_names
from peftc.forms.form import DISTRIBUTIONS, Args, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import is_built_in
from peftc.forms.reserved import is_reserved
from peftc.forms.shapes import Shape


def shape_at(form: Form, args: Args, dims: Dims) -> Shape:
    """The shape of a form's value at a place.

    Raises: PlacementError: what the form says, or P574 if its code fails, or gives no shape or no parameters.
    """
    if is_built_in(form):
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
    name, sizes, first = parameter.name, parameter.size, parameter.first
    if not isinstance(name, str) or not name.isidentifier() or is_reserved(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`{form.name}` has a parameter `{name}`, a name that its module has already, or that is none"
        raise PlacementError("P574", message, help="use another name")
    sizes = () if sizes is None else sizes
    if not isinstance(sizes, tuple) or not all(isinstance(n, int) and n > 0 for n in sizes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError("P574", f"`{name}` of `{form.name}` has the size {sizes!r}, not a tuple of whole numbers")
    for what, word in (("role", parameter.role), ("scope", parameter.scope)):
        words = get_args(get_type_hints(Parameter)[what])
        if word not in words:
            message = f"`{name}` of `{form.name}` has the {what} `{word}`"
            raise PlacementError("P574", message, help=f"one of {join_names(words)}")
    kind = first[0] if isinstance(first, tuple) else first if isinstance(first, str) else ""
    least = DISTRIBUTIONS.get(kind, 0) if parameter.size is not None else 0
    if kind not in ("", *DISTRIBUTIONS) or len(sizes) < least:
        message = f"`{name}` of `{form.name}`, of size {list(sizes)}, cannot start as {first!r}"
        raise PlacementError("P574", message, help=f"a number, or one of {join_names(DISTRIBUTIONS)}")
    if parameter.role == "fixed" and form.argument("seed") is None:
        message = f"`{name}` of `{form.name}` is drawn from the argument `seed`, which the form has not"
        raise PlacementError("P574", message, help="add `peftc.forms.arguments.SEED` to its arguments")
