"""The router: the product whose result decides which experts a token goes to, or how much of each
it gets.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx, nn

from peftc.addressing.sites import MatrixLayout
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import reaches, upstream, value_operands, value_users
from peftc.modules.walk import submodule
from peftc.recognition.moe.lists import ExpertModules, Experts
from peftc.recognition.moe.matrices import ExpertGraph


@dataclass(frozen=True, eq=False)
class Router:
    """The node of the logits, what it reads, the features of both, and the parameters by their
    names in the layer. `inside_leaf`: these nodes are in a module that could not be traced, not in
    the layer's graph. `layout`: of a weight that is no matrix (out, in).
    """

    logits: fx.Node
    x: fx.Node
    d_out: int
    d_in: int
    weight: str
    bias: str | None = None
    inside_leaf: bool = False
    layout: MatrixLayout | None = None

    def inside(self, module: str) -> "Router":
        """The router with names of the layer, of one that is in a module which is a leaf."""
        bias = None if self.bias is None else f"{module}.{self.bias}"
        return replace(self, weight=f"{module}.{self.weight}", bias=bias, inside_leaf=True)


def find_router(inputs: Iterable[fx.Node], count: int, body: set[fx.Node], layer: LayerGraph) -> Router | None:
    """The router: the nearest product upstream of the inputs of `count` experts that has a value
    for each and reaches them by a choice among its values.
    """
    nodes = (n for node in inputs for n in upstream(node, lambda n: n not in body))
    routers = [r for n in nodes if (r := _router_at(n, layer))]
    wide = [r for r in routers if shape(r.logits)[-1] >= count and _is_chosen_from(r.logits, body)]
    return max(wide, key=lambda r: r.logits) if wide else None


def find_soft_router(experts: Experts, result: fx.Node, body: set[fx.Node], code: LayerGraph) -> Router | None:
    """The router of experts that all run, each on every token: a product whose values, after a
    softmax, weight what the experts compute.
    """
    # Seen in: no transformers model, but soft mixtures of experts written by hand
    code = ExpertGraph(code.graph, code.root)
    nodes = [n for n in upstream(result, lambda n: n not in body) if n in body]
    own = [n for n in nodes if _is_of(experts, n, code)]
    for node in nodes:
        router = _router_at(node, code) if node not in own else None
        if router is not None and code.width(node) % experts.count == 0 and _weights(node, own, body, code):
            return router
    return None


def routing_leaves(graph: fx.Graph, root: nn.Module) -> set[str]:
    """The leaves with a matrix of their own that return more than a tensor: experts, weights.
    PyTorch's recurrent networks do, too, and route nothing.
    """
    # Seen in: Phi MoE, Qwen2 MoE, GLM-4 MoE Lite
    leaves = {str(n.target) for n in graph.nodes if n.op == "call_module" and not is_tensor(n)}
    return {name for name in leaves if has_matrix(submodule(root, name))}


def has_matrix(module: nn.Module) -> bool:
    return not isinstance(module, nn.RNNBase) and any(p.ndim == 2 for p in module.parameters(recurse=False))


def _is_of(experts: Experts, node: fx.Node, code: ExpertGraph) -> bool:
    """Whether a node is a product with a matrix of an expert."""
    if isinstance(experts, ExpertModules):
        names = (name for linears in experts.linears.values() for name in linears)
        return node.op == "call_module" and any(f".{name}".endswith(f".{node.target}") for name in names)
    return code.picked(node) is not None


def _weights(logits: fx.Node, experts: list[fx.Node], body: set[fx.Node], code: LayerGraph) -> bool:
    """Whether a softmax of some logits multiplies what experts compute."""
    seen, stack = {logits}, [(logits, False)]
    while stack:
        node, is_weight = stack.pop()
        for user in value_users(node):
            if user in seen or user not in body or user in experts:
                continue
            seen.add(user)
            operands = [n for n in value_operands(user) if n is not node]
            is_product = code.op(user) in (Op.MUL, Op.MATMUL)
            if is_weight and is_product and any(reaches(e, n) for n in operands for e in experts):
                return True
            stack.append((user, is_weight or code.op(user) is Op.SOFTMAX))
    return False


def _router_at(node: fx.Node, layer: LayerGraph) -> Router | None:
    """A product with one matrix, by a Linear or with a bare parameter."""
    if not is_tensor(node) or not layer.is_linear(node) or (x := layer.input_of(node)) is None:
        return None
    if node.op == "call_module":
        has_bias = getattr(layer.module(node), "bias", None) is not None
        bias = f"{node.target}.bias" if has_bias else None
        return Router(node, x, layer.width(node), shape(x)[-1], f"{node.target}.weight", bias)
    product = layer.product(node)
    if product is None or product.weight.rows is not None:
        return None
    bias = product.bias.parameter if product.bias is not None and product.bias.rows is None else None
    d_in, weight = product.d_in.width(shape(x)), product.weight
    return Router(product.result, x, product.width, d_in, weight.parameter, bias, layout=weight.layout)


def _is_chosen_from(logits: fx.Node, body: set[fx.Node]) -> bool:
    """Whether some of the values are chosen by their order."""
    # Seen in: attention over experts; blocks of features would be experts without it
    seen, stack = {logits}, [logits]
    while stack:
        users = value_users(stack.pop())
        if any(op_of(user) is Op.CHOICE or name_of(user) == "gather" for user in users):
            return True
        stack += [user for user in users if user in body and user not in seen]
        seen.update(users)
    return False
