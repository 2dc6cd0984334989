"""Where experts keep their matrices: in modules of a list, or in the slices of one parameter; and
the router, the product whose result decides which experts a token goes to.

Code of stacked experts picks a matrix out of a parameter for each expert, multiplies what is routed
to it by that matrix, and goes on as any feed-forward network. The products with picked matrices are
its Linears. Dataflow gives their roles, the rows of each in a fused `gate`-and-`up` matrix, and
whether a matrix is stored (out, in) or (in, out).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, is_tensor, module_path, output_of, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import upstream, value_users
from peftc.observation.sample_forward import structure_key
from peftc.recognition.ffn import Projection, input_projections


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of `count` equal slices, one an expert; `transposed`: each is stored (in, out).
    `owner` and `reader` are modules of the layer; `d_out`, `d_in` the features of a whole slice.
    """

    owner: str
    attribute: str
    count: int
    reader: str
    transposed: bool
    d_out: int
    d_in: int


@dataclass(frozen=True)
class StackedLinear:
    """One Linear of every expert: its parameter, the rows of each slice (None: all), its bias."""

    weight: StackedParameter
    rows: Slice | None = None
    bias: StackedParameter | None = None


@dataclass(frozen=True)
class StackedExperts:
    """Experts whose matrices are slices of parameters."""

    module: str
    count: int
    roles: Mapping[str, StackedLinear]


@dataclass(frozen=True)
class ExpertModules:
    """Experts that are modules in a list; `roles`: the Linears of each by their names in it."""

    module: str
    members: tuple[str, ...]
    roles: Mapping[str, str]

    @property
    def count(self) -> int:
        return len(self.members)


Experts = StackedExperts | ExpertModules


class ExpertGraph(LayerGraph):
    """The code of experts, in which products with slices of parameters are Linears, too."""

    def is_linear(self, node: object) -> bool:
        return super().is_linear(node) or (isinstance(node, fx.Node) and picked_matrix(node) is not None)


def stacked_experts(module: str, code: LayerGraph) -> StackedExperts | None:
    """The experts of which code picks the matrices. `module`: its name in the layer."""
    # Seen in: most mixtures of experts
    code = ExpertGraph(code.graph, code.root)
    downs = {p: matrix for p in source_linears(code, output_of(code.graph)) if (matrix := picked_matrix(p[0]))}
    down = next(iter(downs)) if len({matrix.parameter.target for matrix in downs.values()}) == 1 else None
    hidden = first_input(down[0]) if down is not None else None
    if down is None or hidden is None:
        return None
    projections = {"down": Projection(*down)} | input_projections(hidden, code)
    roles = {role: linear for role, p in projections.items() if (linear := _stacked_linear(p, module)) is not None}
    counts = {linear.weight.count for linear in roles.values()}
    return StackedExperts(module, counts.pop(), roles) if roles and len(counts) == 1 else None


def multiplies_slices(code: LayerGraph) -> bool:
    """Whether code multiplies by slices of parameters, as that of experts does."""
    # Seen in: LongCat, whose experts would be untraced without it
    return any(picked_matrix(node) is not None for node in code.graph.nodes)


@dataclass(frozen=True, eq=False)
class PickedMatrix:
    """A slice of a parameter as an operand. `transposed`: against (out, in)."""

    parameter: fx.Node
    count: int
    transposed: bool


def picked_matrix(product: fx.Node) -> PickedMatrix | None:
    """The matrix of one expert that a product multiplies by."""
    op = op_of(product)
    if op not in (Op.LINEAR, Op.MATMUL) or product.target is torch.einsum or len(product.args) < 2:
        return None
    operand, transposed = product.args[2 if name_of(product) == "baddbmm" else 1], op is Op.MATMUL
    node, sizes = operand, list[tuple[int, ...]]()
    while isinstance(node, fx.Node) and node.op != "get_attr":
        sizes.append(shape(node))
        swaps = name_of(node) in ("t", "T", "mT") or node.args[1:] in ((-1, -2), (-2, -1), (1, 2), (2, 1))
        if op_of(node) is Op.PERMUTE and swaps:
            transposed = not transposed
        elif not picks(node) and op_of(node) not in (Op.CAST, Op.RESHAPE):
            return None
        node = first_input(node)
    if not isinstance(node, fx.Node) or not isinstance(example(node), nn.Parameter):
        return None
    count = next((size[0] for size in reversed([*sizes, shape(node)]) if len(size) == 3), None)
    return PickedMatrix(node, count, transposed) if count is not None else None


def picks(node: fx.Node) -> bool:
    """Whether one slice is taken by its number, or several by theirs."""
    if op_of(node) is not Op.SELECT or len(node.args) < 2:
        return False
    index = example(node.args[1])
    is_index = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.is_floating_point())
    return is_index or name_of(node) == "index_select"


def _stacked_linear(projection: Projection, module: str) -> StackedLinear | None:
    if (matrix := picked_matrix(projection.node)) is None:
        return None
    sizes = shape(matrix.parameter)
    d_in, d_out = math.prod(sizes) // matrix.count // sizes[-1], sizes[-1]
    if not matrix.transposed:
        d_in, d_out = d_out, d_in
    weight = _parameter(matrix.parameter, matrix.count, matrix.transposed, d_out, d_in, module)
    rows = projection.rows if projection.rows is not None and projection.rows.width < weight.d_out else None
    return StackedLinear(weight, rows, _bias_of(projection.node, module, weight))


def _parameter(node: fx.Node, count: int, transposed: bool, d_out: int, d_in: int, module: str) -> StackedParameter:
    owner, _, attribute = str(node.target).rpartition(".")
    owner, reader = (f"{module}.{name}".strip(".") for name in (owner, module_path(node)))
    return StackedParameter(owner, attribute, count, reader, transposed, d_out, d_in)


def _bias_of(product: fx.Node, module: str, weight: StackedParameter) -> StackedParameter | None:
    """The parameter whose slices are added to a product: one vector (out) an expert."""
    # Seen in: GPT-OSS, whose experts have no `b` without it
    operands = [*product.args[2:3], product.kwargs.get("bias")] if op_of(product) is Op.LINEAR else []
    for user in value_users(product):
        if op_of(user) is Op.ADD:
            operands += [a for a in user.args[:2] if a is not product]
    for value in operands:
        node = first_input(value) if isinstance(value, fx.Node) and picks(value) else None
        if node is not None and node.op == "get_attr" and shape(node) == (weight.count, weight.d_out):
            return _parameter(node, weight.count, False, weight.d_out, 1, module)
    return None


def expert_modules(module: str, code: LayerGraph) -> ExpertModules | None:
    """The experts in a module whose code calls one of several of the same structure."""
    # Seen in: NLLB-MoE, Switch Transformers
    downs = source_linears(code, output_of(code.graph))
    hidden = first_input(downs[0][0]) if len(downs) == 1 else None
    if hidden is None:
        return None
    projections = {"down": Projection(*downs[0])} | input_projections(hidden, code)
    names = {role: str(p.node.target) for role, p in projections.items() if p.rows is None}
    if (one := _member(list(names.values()), code.root)) is None:
        return None
    container, _, _ = one.rpartition(".")
    members = _same_structure(code.root.get_submodule(one), code.root.get_submodule(container))
    members = tuple(f"{module}.{container}.{name}".replace("..", ".").strip(".") for name in members)
    return ExpertModules(module, members, {role: name[len(one) + 1 :] for role, name in names.items()})


def _member(names: list[str], root: nn.Module) -> str | None:
    """The list element that contains all the named modules."""
    parts = names[0].split(".")
    for end in range(1, len(parts)):
        one, container = ".".join(parts[:end]), ".".join(parts[: end - 1])
        if not all(name.startswith(f"{one}.") for name in names):
            return None
        if len(_same_structure(root.get_submodule(one), root.get_submodule(container))) > 1:
            return one
    return None


def _same_structure(one: nn.Module, container: nn.Module) -> list[str]:
    """The children of `container` that have the structure of one of them."""
    key = structure_key(one)
    return [name for name, child in container.named_children() if structure_key(child) == key]


@dataclass(frozen=True, eq=False)
class Router:
    """The node of the logits, what it reads, and the parameters by their names in the layer.
    `inside_leaf`: these nodes are in a module that could not be traced, not in the layer's graph.
    """

    logits: fx.Node
    x: fx.Node
    weight: str
    bias: str | None = None
    inside_leaf: bool = False


def find_router(inputs: Iterable[fx.Node], count: int, body: set[fx.Node], layer: LayerGraph) -> Router | None:
    """The router: the nearest product upstream of the inputs of `count` experts that has a value
    for each and reaches them by a choice among its values.
    """
    nodes = (n for node in inputs for n in upstream(node, lambda n: n not in body))
    routers = [r for n in nodes if (r := _router_at(n, layer))]
    wide = [r for r in routers if shape(r.logits)[-1] >= count and _is_chosen_from(r.logits, body)]
    return max(wide, key=lambda r: r.logits) if wide else None


def _router_at(node: fx.Node, layer: LayerGraph) -> Router | None:
    """A product with one matrix, by a Linear or by `F.linear`."""
    if (x := first_input(node)) is None or not is_tensor(node) or layer.op(node) is not Op.LINEAR:
        return None
    if node.op == "call_module":
        has_bias = getattr(layer.module(node), "bias", None) is not None
        return Router(node, x, f"{node.target}.weight", f"{node.target}.bias" if has_bias else None)
    operands = [*node.args[1:], *node.kwargs.values()]
    names = [_parameter_name(value) for value in operands if isinstance(value, fx.Node)]
    return Router(node, x, names[0], names[1] if len(names) > 1 else None) if names and names[0] else None


def _parameter_name(node: fx.Node) -> str | None:
    """The name of the parameter that a value is, but for its dtype and layout."""
    while (op_of(node) is Op.CAST or name_of(node) == "t") and (source := first_input(node)) is not None:
        node = source
    return str(node.target) if node.op == "get_attr" and isinstance(example(node), nn.Parameter) else None


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
