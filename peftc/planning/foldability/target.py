"""The Linear whose parameters an edit folds into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.parameter_ranges import parameter_name
from peftc.addressing.sites import Site, WeightRef
from peftc.forms.shapes import Tokens, Weight
from peftc.planning.ir import SiteEdit

Side = Literal["weight", "output", "input"]
OUTPUT_LINEAR = {"ffn": "down", "attn": "o", "self": "o", "cross": "o"}  # sub-layer -> the Linear that computes its h


@dataclass(frozen=True)
class FoldTarget:
    """The parameters that an edit folds into.

    side "weight": equations of w and b alone. "output": h becomes the Linear's output, so W' is the
    value's matrix. "input": the edit changes what the Linear reads, so W' = W · the value's matrix.
    """

    side: Side
    site: Site
    weight: WeightRef | None
    bias: WeightRef | None  # None if folding adds one

    @property
    def refs(self) -> list[WeightRef]:
        return [ref for ref in (self.weight, self.bias) if ref is not None]

    @property
    def parameters(self) -> frozenset[str]:
        """The dotted names of the weight and the bias."""
        return frozenset(map(parameter_name, self.refs))


def fold_target(site_edit: SiteEdit, sites: Mapping[str, Site]) -> FoldTarget | str:
    """What the edit folds into, or the reason why there is no such Linear. `sites`: by path."""
    states = {assign.state for assign in site_edit.assigns}
    site, last = site_edit.site, site_edit.site.steps[-1][0]
    if states <= {"w", "b"}:
        return _target("weight", site)
    if states <= {"h", "w", "b"} and is_linear(site):
        return _target("output", site)
    if (states, last) in (({"h"}, "hidden"), ({"z"}, "ffn")):
        ffn = site.path if last == "ffn" else site.path.rpartition(".")[0]
        down = sites.get(f"{ffn}.down")
        return _target("input", down) if down and is_linear(down) else f"`{ffn}` has no single Linear `down`"
    if states == {"h"} and last in OUTPUT_LINEAR:
        linear = sites.get(site.states["h"].linear)
        if linear and is_linear(linear):
            return _target("output", linear)
        return f"`h` of `{site.path}` is not simply the output of `{OUTPUT_LINEAR[last]}`"
    return f"`{min(states - {'w', 'b'})}` of `{site.path}` is not the output of a Linear"


def _target(side: Side, site: Site) -> FoldTarget:
    weight, bias = site.states.get("w"), site.states.get("b")
    return FoldTarget(side, site, weight.weight if weight else None, bias.weight if bias else None)


def linear_states(target: FoldTarget, site: Site) -> frozenset[str]:
    """The states at the edit's site that are linear in what the target Linear reads."""
    if target.side == "input":
        return frozenset({"h"} if site.steps[-1][0] == "hidden" else {"z"})
    return frozenset({"h", "x"} if site.path == target.site.path else {"h"})


def is_linear(site: Site) -> bool:
    """Whether the site computes h = w x, perhaps with a bias. Shapes: w (out, in)."""
    weight, x, h = (site.states.get(name) for name in ("w", "x", "h"))
    if weight is None or x is None or h is None or not isinstance(weight.shape, Weight):
        return False
    return (x.shape, h.shape) == (Tokens(weight.shape.d_in), Tokens(weight.shape.d_out))
