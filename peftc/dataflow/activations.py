"""Values that depend on an argument, and views of parameters."""

from torch import fx, nn

from peftc.dataflow.nodes import example, first_input
from peftc.dataflow.operations import LAYOUT, Op, op_of
from peftc.dataflow.values import upstream, writes_into


def is_activation(node: object) -> bool:
    """Whether a value depends on an argument of the layer, or on learned states, and not on other
    parameters alone.
    """

    def is_start(node: fx.Node) -> bool:
        return node.op == "placeholder" or _is_learned_state(node)

    return isinstance(node, fx.Node) and any(map(is_start, upstream(node, is_start)))


def _is_learned_state(node: fx.Node) -> bool:
    """Whether a value is a parameter that is repeated for each example of an argument."""
    # Seen in: no transformers model, but the latents of Flamingo's resampler
    source = first_input(node) if op_of(node) is Op.EXPAND else None
    sizes = [n for n in node.all_input_nodes if n is not source and isinstance(example(n), int)]
    return source is not None and bool(sizes) and parameter_of(source) is not None


def parameter_of(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The parameter that a value is a view of, and the operations between them, first to last."""
    steps: list[fx.Node] = []
    while node.op != "get_attr":
        source = None if any(writes_into(node)) else first_input(node)
        if source is None or op_of(node) not in (*LAYOUT, Op.CAST, Op.ITEM) or op_of(node) is Op.ROLL:
            return None
        steps.insert(0, node)
        node = source
    return (node, steps) if isinstance(example(node), nn.Parameter) else None
