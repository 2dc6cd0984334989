"""Sub-layers of two streams of a layer whose Linears are the same modules."""

from collections.abc import Sequence

from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.attention.side_by_side import joint_states
from peftc.recognition.ffn import linear_modules
from peftc.recognition.sublayer import SubLayer


def of_other_stream(
    more: Sequence[SubLayer], subs: Sequence[SubLayer], layer: LayerGraph
) -> tuple[list[SubLayer], bool]:
    """Of the sub-layers of another stream those with states of its own, and whether no Linear is in
    both streams. Code that runs one Linear for both has one set of roles: where one call computes
    what both get, `subs` have the states of all tokens.
    """
    # Seen in: no transformers model, but CogVideoX; with calls for each CogView 4, LightGlue
    known = linear_modules(sub.projections for sub in subs)
    if known.isdisjoint(linear_modules(sub.projections for sub in more)):
        return [*more], True
    own: list[SubLayer] = []
    for other in more:
        if same := [sub for sub in subs if _is_one_call(sub, other)]:
            for sub in same:
                sub.x, sub.h = joint_states(sub.x, sub.h, other.h, sub.projections, other.projections, layer)
        else:
            other.calls_again = linear_modules([other.projections]) <= known
            own.append(other)
    return own, False


def _is_one_call(sub: SubLayer, other: SubLayer) -> bool:
    """Whether what two streams get is computed by one call of the last Linear, or of any."""
    nodes, others = ({p.node for p in one.projections.values()} for one in (sub, other))
    last = sub.projections.get("o") or sub.projections.get("down")
    return not nodes.isdisjoint(others) if last is None else last.node in others
