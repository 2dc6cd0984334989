"""A traced layer: its graph, together with the module that it was traced from."""

from functools import cached_property

from torch import fx, nn

from peftc.addressing.sites import FeatureDims, Slice
from peftc.dataflow.linear_code import has_own_forward, returns_other_features
from peftc.dataflow.matrices import MatrixProduct, matrix_product
from peftc.dataflow.nodes import example, first_input, is_tensor, module_path, shape
from peftc.dataflow.normalization import Normalization, normalization
from peftc.dataflow.operations import LAYOUT, Op, module_op, op_of
from peftc.dataflow.values import upstream, value_users
from peftc.modules.walk import submodule

# Operations that keep the values of one tensor, but for rounding, dropout, limits and layout.
PASSING = frozenset({Op.CAST, Op.RESHAPE, Op.CLAMP, Op.DROPOUT})

READS = frozenset({*LAYOUT, Op.CAST, Op.ITEM})  # operations on a parameter that keep its values
PRODUCTS = frozenset({Op.LINEAR, Op.MATMUL})
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_pointwise(module: nn.Module) -> bool:
    """Whether a convolution multiplies the features of each position by one matrix."""
    if not isinstance(module, CONVOLUTIONS) or module.groups != 1:
        return False
    return {*module.kernel_size} == {1} and {*module.padding} <= {0, *"valid"}


class LayerGraph:
    """The nodes of a graph, and the modules that they call by their names in `root`."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph, self.root = graph, root
        self._modules: dict[str, nn.Module] = {}
        self._products: dict[fx.Node, MatrixProduct | None] = {}
        self._linears: dict[fx.Node, bool] = {}
        self._module_ops: dict[fx.Node, Op] = {}
        self._norms: dict[fx.Node, Normalization | None] = {}
        self.over_tokens: dict[fx.Node, bool] = {}  # Linears that sum over tokens
        self.feature_dims_of: dict[fx.Node, set[int]] = {}  # of values, by `dims_of`
        self.sources: dict[object, list[tuple[fx.Node, Slice | None]]] = {}  # of `source_linears`

    def module(self, node: fx.Node) -> nn.Module | None:
        if node.op != "call_module":
            return None
        name = str(node.target)
        if name not in self._modules:
            self._modules[name] = submodule(self.root, name)
        return self._modules[name]

    def op(self, node: fx.Node) -> Op:
        if (module := self.module(node)) is None:
            return op_of(node)
        if node not in self._module_ops:
            self._module_ops[node] = self._module_op(node, module)
        return self._module_ops[node]

    def _module_op(self, node: fx.Node, module: nn.Module) -> Op:
        if self.is_linear(node):
            return Op.LINEAR
        op = module_op(module)
        return Op.MODULE if op is Op.NORM and isinstance(example(node), tuple) else op

    def product(self, node: fx.Node) -> MatrixProduct | None:
        """The product with a bare parameter at a node."""
        if node.op == "call_module":
            return None
        if node not in self._products:
            self._products[node] = matrix_product(node)
        return self._products[node]

    def product_count(self, parameter: str, rows: Slice | None) -> int:
        """How many operations multiply by these rows of a parameter."""
        products = [p for n in self.graph.nodes if (p := self.product(n)) is not None]
        parts = [p.weight.rows for p in products if p.weight.parameter == parameter]
        others = [n for n in self.uses(parameter) if self.product(n) is None and op_of(n) in PRODUCTS]
        return len(others) + sum(rows is None or part is None or rows.overlaps(part) for part in parts)

    def is_read_besides(self, parameter: str) -> bool:
        """Whether code computes with a parameter, and not by multiplying by it as a matrix."""
        return any(self.product(n) is None and op_of(n) not in PRODUCTS for n in self.uses(parameter))

    @cached_property
    def further_reads(self) -> list[tuple[str, str]]:
        """The parameters of modules that the graph calls with which code around the call computes,
        too, each with the module of that code.
        """
        # Seen in: no transformers model, but feed-forward parts whose `down` is the transposed `up`
        calls = {str(n.target) for n in self.graph.nodes if n.op == "call_module"}
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and is_tensor(n)]
        further = [n for n in reads if any(name in calls for name in _enclosing(str(n.target)))]
        pairs = dict.fromkeys((str(n.target), module_path(n)) for n in further if self.uses(str(n.target)))
        return list(pairs)

    def uses(self, parameter: str) -> list[fx.Node]:
        """The operations that read a parameter, behind those that change its layout."""
        uses = dict[fx.Node, None]()
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == parameter]
        for read in reads:  # which grows
            users = value_users(read)
            reads += [user for user in users if op_of(user) in READS]
            uses |= dict.fromkeys(user for user in users if op_of(user) not in READS)
        return list(uses)

    def normalization(self, node: fx.Node) -> Normalization | None:
        """The norm that code of the layer computes itself, up to a node."""
        if node not in self._norms:
            self._norms[node] = normalization(node, self.is_plain_norm)
        return self._norms[node]

    def input_of(self, linear: fx.Node) -> fx.Node | None:
        """What a Linear reads."""
        product = self.product(linear)
        return first_input(linear) if product is None else product.x

    def output_of(self, linear: fx.Node) -> fx.Node:
        """What a Linear computes, its bias included."""
        product = self.product(linear)
        return linear if product is None else product.result

    def feature_dims(self, linear: fx.Node) -> FeatureDims:
        """Where the features are in the result of a Linear."""
        if (product := self.product(linear)) is not None:
            return product.d_out
        last = 1 if isinstance(self.module(linear), CONVOLUTIONS) else len(shape(linear)) - 1
        return FeatureDims(tuple(d for d in range(len(shape(linear))) if d != last), (last,))

    def width(self, linear: fx.Node) -> int:
        """The number of features that a Linear computes."""
        return self.feature_dims(linear).width(shape(linear))

    def is_linear(self, node: object) -> bool:
        """Whether a node multiplies by one matrix: a Linear, or a product with a bare parameter."""
        return isinstance(node, fx.Node) and (self.is_linear_module(node) or self.product(node) is not None)

    def is_linear_module(self, node: object) -> bool:
        """Whether a node calls a module of one matrix: nn.Linear, Conv1D, a quantised Linear."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return False
        if node not in self._linears:
            self._linears[node] = self._calls_linear(node)
        return self._linears[node]

    def _calls_linear(self, node: fx.Node) -> bool:
        module = self.module(node) if is_tensor(node) else None
        if isinstance(module, CONVOLUTIONS):
            sizes = shape(node)
            return is_pointwise(module) and len(sizes) == module.weight.ndim and sizes[1] == module.out_channels
        if module is None or getattr(getattr(module, "weight", None), "ndim", 0) != 2:
            return False
        # Seen in: product-key memories, whose values are an EmbeddingBag
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or returns_other_features(node, module):
            return False
        if isinstance(module, nn.Linear):
            widths = shape(first_input(node))[-1:], shape(node)[-1:]
            return not has_own_forward(module) or widths == ((module.in_features,), (module.out_features,))
        return example(node).shape[-1] in module.weight.shape  # pyright: ignore

    def mixes_features(self, node: fx.Node) -> bool:
        """Whether a node is a convolution that sums over features: not a depthwise one."""
        module = self.module(node)
        return isinstance(module, CONVOLUTIONS) and module.groups != module.in_channels

    def is_norm(self, node: fx.Node) -> bool:
        """Whether a node calls a norm, or ends one with a weight in the layer's own code."""
        own = self.normalization(node)
        is_norm = self.op(node) is Op.NORM if node.op == "call_module" else own is not None and own.weight is not None
        return is_norm and not any(self._goes_on(node, user) for user in node.users)

    def is_plain_norm(self, node: fx.Node) -> bool:
        """Whether a node calls a norm without parameters, whose result code may scale."""
        # Seen in: no transformers model, but x-transformers
        module = self.module(node)
        return module is not None and module_op(module) is Op.NORM and not any(True for _ in module.parameters())

    def norm_name(self, norm: fx.Node) -> str:
        """The module of a norm, or the parameter by which code of the layer scales."""
        own = None if norm.op == "call_module" else self.normalization(norm)
        return str(norm.target) if own is None or own.weight is None else own.weight.parameter

    def _goes_on(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a norm does not end at `node`, but behind a user of it."""
        norm = self.normalization(user)
        return norm is not None and node in norm.nodes

    def linears(self, nodes: set[fx.Node]) -> list[fx.Node]:
        """The Linears among some nodes, in the order in which they run."""
        return sorted(filter(self.is_linear, nodes))

    def passes_through(self, node: fx.Node) -> fx.Node | None:
        """The tensor whose values `node` keeps; None where it computes."""
        return first_input(node) if self.op(node) in PASSING else None

    def stripped(self, node: fx.Node) -> fx.Node:
        """`node` without the dropouts, casts and reshapes behind it."""
        while (source := self.passes_through(node)) is not None:
            node = source
        return node

    def without_norms(self, node: fx.Node) -> fx.Node:
        """`node` without the norms behind it, and what else keeps its values."""
        while self.is_norm(node := self.stripped(node)):
            norm = self.normalization(node)
            source = first_input(node) if norm is None else norm.x
            if source is None:
                break
            node = source
        return node

    def first_of_final_linears(self, h: fx.Node) -> fx.Node:
        """The first of the consecutive Linears at the end of `h`; `h` if it ends with none."""
        # Seen in: Zamba, Zamba 2
        node = self.stripped(h)
        while self.is_linear(node) and (source := self.input_of(node)) is not None:
            before = self.stripped(source)
            if not self.is_linear(before):
                return node
            node = before
        return h

    def consumer_linear(self, node: fx.Node, within: set[fx.Node]) -> fx.Node | None:
        """The nearest Linear downstream of a value; of several, one that no other one reads."""
        seen: set[fx.Node] = set()
        queue, linears = [node], list[fx.Node]()
        while queue:
            for user in value_users(queue.pop(0)):
                if user in within and user not in seen:
                    seen.add(user)
                    (linears if self.is_linear(user) else queue).append(user)
        if len(linears) < 2:
            return next(iter(linears), None)
        behind = {n: set(upstream(n)) for n in linears}
        return next((n for n in linears if not any(n in behind[other] for other in linears if other is not n)), None)


def _enclosing(parameter: str) -> list[str]:
    """The modules around a parameter: `a` and `a.b` of `a.b.weight`."""
    *parts, _ = parameter.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
