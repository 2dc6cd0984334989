"""`peftc.fold`: into the weights of the base, into a wider ffn, or into a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.caches import State, fold_into_state
from peftc.folding.ffn_width import fold_and_widen
from peftc.folding.report import FoldReport
from peftc.folding.weights import Folding


@overload
def fold(
    model: nn.Module,
    *,
    into: Literal["weights"] = "weights",
    only: Iterable[str] | None = None,
    name: str | None = None,
    dequantize: bool = False,
    widen: bool = False,
    sample: Mapping[str, Any] | None = None,
) -> FoldReport: ...
@overload
def fold(
    model: nn.Module,
    *,
    into: Literal["state"],
    only: Iterable[str] | None = None,
    name: str | None = None,
    sample: Mapping[str, Any] | None = None,
) -> State: ...
def fold(
    model: nn.Module,
    *,
    into: Literal["weights", "state"] = "weights",
    only: Iterable[str] | None = None,
    name: str | None = None,
    dequantize: bool = False,
    widen: bool = False,
    sample: Mapping[str, Any] | None = None,
) -> FoldReport | State:
    """Folds what folds into the weights of the base, in place; the other edits go on working.

    W' = W + (α/r) B A for LoRA, and so on for every equation that is affine in what a Linear reads:
    sums in float32 (float64), rounded once. Folded edits are gone from the model; values that
    `train` changed stay. When all edits are folded, the model is one without edits, with the
    `requires_grad` it had before `compile`.

    `into="state"`: a prefix becomes the seed of a cache, a prompt embedded tokens. The `State` that
    is returned makes the arguments of `generate` with them, and the model is without that edit.

    Args:
        model: a compiled model.
        into: "weights" or "state".
        only: the names of the edits to fold, all of which must fold.
        name: of one spec of the model; the edits of others stay.
        dequantize: a quantised weight (torchao) is written out in full and folded into. Without it,
            an edit that would change one is refused.
        widen: a bottleneck that reads `x` beside an ffn without a gate, with the ffn's own
            activation or none, becomes hidden units of the ffn: r of them, or 2r without an
            activation, since act(z) − act(−z) = z for relu, gelu and silu. The configuration
            follows where all ffns grow alike. With `widen` and `only`, what does not fold is
            reported, not raised.
        sample: as in `compile`.

    Returns:
        The edits that were folded, with the entries changed in each parameter, and those refused,
        with the sub-expression that prevents it. With `into="state"`, the state.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P527 (no weights), P529
            (switched off), P530 (NaN or infinite entries), P531 and P532 (`only`), P538 (no state),
            P545 (arguments), P546 (no room for the old weights). After an error or an interrupt
            the model is as it was.
    """
    if into not in ("weights", "state"):
        message = f'edits are folded into "weights" or into a "state", not into {into!r}'
        raise PeftcError(Diagnostic("P545", message, help="what is folded into the weights cannot be taken out again"))
    if into == "state" and (dequantize or widen):
        message = f"`{'widen' if widen else 'dequantize'}` is for folds into weights, and a state touches none"
        raise PeftcError(Diagnostic("P545", message, help="leave it out, or fold the other edits in a second call"))
    if into == "state":
        return fold_into_state(model, only, name, sample)
    if widen:
        return fold_and_widen(model, only, name, sample, dequantize)
    return Folding(model, only, name, sample, dequantize).run()
