"""Forms with a state that passes from layer to layer, which have their value at the last one."""

from __future__ import annotations

from peftc.forms.arguments import over
from peftc.forms.form import Args, Dims, Form, PlacementError, Scope
from peftc.forms.shapes import Shape


class CrossLayerForm(Form):
    """A form of the layers of a stack, whose value is that of its state at the last one."""

    def shape(self, args: Args, dims: Dims) -> Shape:
        if self.written_features(dims) != self.read_features(dims):
            raise PlacementError("P301", f"`{self.name}` reads {dims.input} but writes {dims.target}", "input")
        check_depth(self.name, dims)
        return over(dims)

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it depends on the states of all layers"

    def common(self, args: Args) -> Scope | None:
        return "group"


def check_depth(form: str, dims: Dims) -> None:
    """Raises: PlacementError P315 where a form does not stand in the last layer, or one forward passes a layer more than once."""
    if not dims.spots:
        return
    stack, _, last = dims.spots[-1].layer.rpartition("[")
    if last and not dims.depth:
        message = (
            f"`{form}` cannot be `shared`: its places are not alike, and those of a stack have a part in common already"
        )
        raise PlacementError("P315", message, help=f"write `{form}(…)` in the equation")
    if dims.runs > 1:
        message = f"the layers of `{stack}`, or modules in them, run {dims.runs} times: `{form}` has one place for each"
        raise PlacementError("P315", message)
    if not last or int(last[:-1]) != dims.depth - 1:
        where = f"its last place is layer {last[:-1]} of {dims.depth}" if last else "it has no place in a layer"
        help_ = f"let the selector reach `layer[{dims.depth - 1}]`" if last else "write it at `layer[*]`"
        raise PlacementError("P315", f"`{form}` ends at the last layer of its stack, and {where}", help=help_)
