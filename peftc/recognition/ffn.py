"""The Linears of one feed-forward network: `up`, `gate` and `down` around an activation."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.recognition.graph import features, nodes
from peftc.recognition.graph.features import IsLinear

Found = tuple[fx.Node, Slice | None]


@dataclass(frozen=True)
class Projection:
    """A Linear in a role: the node that calls it, and the rows of its output that play the role."""

    node: fx.Node
    rows: Slice | None = None


def before(hidden: fx.Node, root: nn.Module, is_linear: IsLinear = nodes.is_linear) -> dict[str, Projection]:
    """The Linears that make a hidden activation: `up` alone, or `gate` and `up`; none where it cannot be told which is which."""
    product = nodes.stripped(hidden, root)
    operands = factors(product, root, is_linear)
    while len(fed := {operand: found for operand, found in operands.items() if found}) == 1 and len(operands) == 2:
        product = nodes.stripped(next(iter(fed)), root)  # without a factor that no Linear makes
        operands = factors(product, root, is_linear)
    parts = [found[0] for found in fed.values() if len(found) == 1]
    if len(parts) == 2 and parts[0] != parts[1]:
        return gated(dict(zip(fed, parts, strict=True)), root)
    ups = features.source_linears(hidden, root, is_linear=is_linear)
    return {"up": Projection(*ups[0])} if len(ups) == 1 else {}


def factors(product: fx.Node, root: nn.Module, is_linear: IsLinear) -> dict[fx.Node, list[Found]]:
    """The two factors of a product, element by element, each with what feeds it; none of any other node."""
    named = ("mul", "mul_") if product.op == "call_method" else (operator.mul, torch.mul)
    given = product.all_input_nodes if product.target in named else []
    return {n: features.source_linears(n, root, is_linear=is_linear) for n in given} if len(given) == 2 else {}


def gated(operands: dict[fx.Node, Found], root: nn.Module) -> dict[str, Projection]:
    """z = act(gate(x)) * up(x): `up` reaches the product untouched, or at least by no activation; `gate` through one."""
    direct = [features.untouched(operand, linear, root) for operand, (linear, _) in operands.items()]
    if not any(direct):
        direct = [features.affine(operand, linear, root) for operand, (linear, _) in operands.items()]
    if direct[0] == direct[1]:
        return {}
    return {"up" if d else "gate": Projection(*found) for d, found in zip(direct, operands.values(), strict=True)}
