"""Products with parameters that are not known as those of two matrices."""

from collections.abc import Collection

from torch import fx

from peftc.dataflow.activations import is_activation
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, shape
from peftc.dataflow.operations import Op, op_of
from peftc.dataflow.values import upstream, value_operands
from peftc.recognition.token_mixing import is_weighted

_PRODUCTS = frozenset({Op.MATMUL, Op.LINEAR, Op.CONVOLUTION, Op.OTHER})


def unknown_matrices(nodes: Collection[fx.Node], layer: LayerGraph) -> list[fx.Node]:
    """The parameters of such products among some nodes."""
    # Seen in: no transformers model, but `torch.linalg.multi_dot`, and code that computes weights
    calls = [n for n in nodes if n.op != "call_module" and layer.op(n) in _PRODUCTS and layer.product(n) is None]
    products = [n for n in calls if is_tensor(n) and is_activation(n) and not _is_depthwise(n)]
    others = {operand for n in products for operand in value_operands(n) if not is_activation(operand)}
    behind = {parameter for operand in others for parameter in upstream(operand) if parameter.op == "get_attr"}
    return sorted(n for n in behind if is_weighted(n, layer))


def _is_depthwise(node: fx.Node) -> bool:
    """Whether a convolution computes each feature from one."""
    # Seen in: Mamba 2, Bamba
    return op_of(node) is Op.CONVOLUTION and shape(node.args[1])[1:2] == (1,)
