"""The states of an attention: the result of each head, and rows that join its keys and values."""

from torch import fx

from peftc.dataflow.features import separates
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import shape
from peftc.dataflow.values import value_users
from peftc.forms import shapes
from peftc.recognition.attention.manual_attention import joined_shape
from peftc.recognition.attention.patterns import Attention


def attention_heads(attention: Attention) -> fx.Node | None:
    """The result of an attention as (batch, tokens, heads, d_head)."""
    if attention.sort == "linear":
        return None
    q, v, users = shape(attention.q), shape(attention.v), [attention.out]
    for _ in range(4):
        if len(users) != 1 or len(q) != 4 or len(v) != 4:
            break
        if shape(users[0]) == (q[0], q[2], q[1], v[3]):
            return users[0] if attention.sort == "interface" or users[0] is not attention.out else None
        users = value_users(users[0])
    return None


def pair_shape(attention: Attention, q_width: int | None, layer: LayerGraph) -> shapes.KeyValue | None:
    """The rows that can be joined to keys and values; None where none can."""
    if attention.sort == "linear":
        return None  # no softmax shares weights between joined rows and the others
    if attention.sort == "written":
        return joined_shape(attention, q_width, layer)
    k, v = shape(attention.k), shape(attention.v)
    if len(k) != 4 or len(v) != 4 or k[:3] != v[:3]:
        return None
    if not all(separates(node, -1, layer) for node in (attention.k, attention.v)):
        return None  # features attend to features
    return shapes.KeyValue(k[1], k[3], None if v[3] == k[3] else v[3])
