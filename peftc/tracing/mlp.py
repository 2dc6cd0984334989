"""The Linears of one feed-forward network: `up`, `gate` and `down` around an activation."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx, nn

from peftc.tracing import features, graphs
from peftc.tracing.features import IsLinear
from peftc.tracing.sites import Slice


@dataclass(frozen=True)
class Projection:
    """A Linear in a role: the node that calls it, and the rows of its output that play the role."""

    node: fx.Node
    rows: Slice | None = None


def before(hidden: fx.Node, root: nn.Module, is_linear: IsLinear = graphs.is_linear) -> dict[str, Projection]:
    """The Linears that make a hidden activation: `up` alone, or `gate` and `up`."""
    product = graphs.stripped(hidden, root)
    found: dict[str, Projection] = {}
    if product.target in (operator.mul, torch.mul) and len(product.all_input_nodes) == 2:
        found = gated(product, root, is_linear)
        if "up" in found:
            return found
    played = {p.node for p in found.values()}
    ups = [p for p in features.feeding(hidden, root, is_linear=is_linear) if p[0] not in played]
    return {**found, "up": Projection(*ups[0])} if len(ups) == 1 else found


def gated(product: fx.Node, root: nn.Module, is_linear: IsLinear = graphs.is_linear) -> dict[str, Projection]:
    """z = act(gate(x)) * up(x): `up` reaches the product untouched, or at least by no activation; `gate` through one."""
    operands = [(operand, features.feeding(operand, root, is_linear=is_linear)) for operand in product.all_input_nodes]
    if any(len(found) != 1 for _, found in operands):
        return {}
    direct = [features.untouched(operand, found[0][0], root) for operand, found in operands]
    bent = [not features.affine(operand, found[0][0], root) for operand, found in operands]
    if not any(direct) and bent[0] != bent[1]:
        direct = [not b for b in bent]
    return {"up" if d else "gate": Projection(*found[0]) for d, (_, found) in zip(direct, operands, strict=True)}
