"""What a rewriting pass of a program has at a site, as a form. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from peftc.forms.form import Args, Count, Dims, Form
from peftc.forms.shapes import Shape

Pass = Callable[[Any], object]  # of a `Region`


@dataclass(frozen=True)
class PassMember:
    """A parameter, a buffer or a module that a pass has at a site.

    `make`: a number, the name of a distribution, a tensor or a function that fills a tensor; of a
    module, the function that makes it. `shape`: of a tensor. `trained`, `stored`: how many scalars.
    """

    name: str
    kind: Literal["parameter", "buffer", "module"]
    make: Any
    shape: tuple[int, ...] = ()
    trained: int = 0
    stored: int = 0

    @classmethod
    def tensor(cls, kind: Literal["parameter", "buffer"], name: str, shape: Sequence[int], make: object) -> PassMember:
        size = prod(shape)
        return cls(name, kind, make, tuple(shape), size if kind == "parameter" else 0, size)

    @property
    def declaration(self) -> tuple[str, str, tuple[int, ...]]:
        """What each run of the pass has to state alike."""
        return self.name, self.kind, self.shape


class PassForm(Form):
    """A pass at a site: its function, and the members that it has there.

    Args:
        name: of the pass.
        function: of the program.
        members: by their names in the site's module.
        site: the path of the site in its layer.
        layer_sites: the sites of a layer of this type, whose states the pass can name.
        layer: the path of the layer, for a pass that reads it; else empty.
        replaced: the states that the pass replaces.
    """

    module = "peftc.rewriting.passes.pass_module:PassModule"
    has_base_dtype = True
    equation = "a pass over the fx graph of the layer"

    def __init__(
        self,
        name: str,
        function: Pass,
        members: tuple[PassMember, ...],
        site: str,
        layer_sites: Sequence[Any],
        layer: str = "",
        replaced: Sequence[str] = (),
    ) -> None:
        self.name, self.function, self.members = name, function, members
        self.site, self.layer_sites, self.layer, self.replaced = site, tuple(layer_sites), layer, tuple(replaced)

    def with_run(self, members: tuple[PassMember, ...], replaced: Sequence[str], layer: str) -> PassForm:
        """The form after a run of its function."""
        return PassForm(self.name, self.function, members, self.site, self.layer_sites, layer, replaced)

    def shape(self, args: Args, dims: Dims) -> Shape:
        return dims.target

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return f"`{self.name}` is a pass, which has no fold"

    def count(self, args: Args, dims: Dims) -> Count:
        """The parameters of a site."""
        return Count(sum(m.trained for m in self.members), sum(m.stored for m in self.members))

    @property
    def key(self) -> object:
        """Equal for passes that rewrite a graph in the same way."""
        return self.name, id(self.function), self.site, self.layer
