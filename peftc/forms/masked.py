"""Changes of all entries of weights under a mask that is learnt, of which few are kept in the end (Diff Pruning)."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE
from peftc.forms.registry import Args, Count, Dims, Form, Param, register
from peftc.forms.shapes import entries
from peftc.forms.sparse import changes, of_weight


def _count(args: Args, dims: Dims) -> Count:
    trained = 2 * entries(dims.target) + (1 if args["structured"] else 0)
    return Count(trained, trained if args["keep"] else 0)


def _common_count(args: Args, dims: Dims) -> Count:
    return Count(0, 0 if args["keep"] else changes(args, dims))


register(
    Form(
        name="masked",
        equation="f = z ⊙ Δ, z hard-concrete gates with learnt α; `peftc.calibrate` keeps the largest among all sites of the edit",
        takes_input=False,
        params=(
            Param(
                "density",
                "float",
                "part of the entries that is kept, and saved",
                required=True,
                low=0.0,
                high=1.0,
                open="low",
            ),
            Param(
                "penalty", "float", "weight of the expected number of entries among `peftc.losses`", 1.25e-7, low=0.0
            ),
            Param("structured", "bool", "a gate for each weight or bias as a whole, too", True),
            Param("alpha", "float", "first value of α", 5.0),
            Param(
                "lower",
                "float",
                "where the gates are cut: they are stretched to begin below 0",
                -1.5,
                high=0.0,
                open="high",
            ),
            Param("upper", "float", "and to end above 1", 1.5, low=1.0, open="low"),
            Param(
                "keep", "bool", "save Δ and α, so that training can go on; else only what is kept, a `sparse`", False
            ),
            DTYPE,
        ),
        shape=lambda args, dims: of_weight("masked", dims),
        count=_count,
        at_init=lambda args: 0.0,
        affine=lambda args: None,
        module="peftc.forms.masked_module:Masked",
        paper="Guo et al. 2021, arXiv:2012.07463 (Diff Pruning); gates of Louizos et al. 2018, arXiv:1712.01312",
        common=lambda args: "edit",
        common_count=_common_count,
        anywhere=True,
        apart=True,
        changes=changes,
        collapses=lambda args: None if args["keep"] else "sparse",
    )
)
