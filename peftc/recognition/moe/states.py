"""The states at the sites of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from peftc.addressing.sites import INPUT, OUTPUT, ActivationRef, Slice, StackedSlice, State, WeightRef
from peftc.forms import shapes
from peftc.recognition.moe.listed import Listed
from peftc.recognition.moe.router import Router
from peftc.recognition.moe.stacked import Experts, Role, StackedParameter
from peftc.recognition.non_layer_sites import weight_states

ROLES = ("gate", "up", "down")
FullName = Callable[[str], str]  # of a module by its name in the layer

Found = tuple[tuple[int, str], str, dict[str, State]]


def expert_states(found: Experts | Listed, root: nn.Module, full: FullName) -> Iterator[Found]:
    """For every role of every expert: ((number, role), module, states)."""
    for number in range(found.count):
        for role in ROLES:
            if role not in found.roles:
                continue
            if isinstance(found, Listed):
                name = f"{found.members[number]}.{found.roles[role]}"
                yield (number, role), full(name), linear_states(full(name), root.get_submodule(name))
            else:
                yield (number, role), full(found.module), piece_states(found.roles[role], number, full)


def piece_states(role: Role, number: int, full: FullName) -> dict[str, State]:
    """`w` and `b` of one Linear of one expert, which are pieces of parameters."""
    shape = shapes.Weight(role.rows.width if role.rows else role.weight.d_out, role.weight.d_in)
    states = {"w": State("w", shape, weight=piece(role.weight, role.rows, number, full))}
    if role.bias is not None:
        states["b"] = State("b", shapes.Vector(shape.d_out), weight=piece(role.bias, role.rows, number, full))
    return states


def piece(bank: StackedParameter, rows: Slice | None, number: int, full: FullName) -> WeightRef:
    slab = StackedSlice(number, bank.count, full(bank.reader))
    return WeightRef(full(bank.owner), bank.attribute, rows, bank.transposed, slab)


def linear_states(name: str, module: nn.Module) -> dict[str, State]:
    """The states of a Linear of its own; its input are the tokens that were sent to it."""
    states = weight_states(name, module)
    shape = states["w"].shape
    assert isinstance(shape, shapes.Weight)
    states["x"] = State("x", shapes.Tokens(shape.d_in), ActivationRef(INPUT))
    states["h"] = State("h", shapes.Tokens(shape.d_out), ActivationRef(OUTPUT))
    return states


def router_states(router: Router, full: FullName) -> dict[str, State]:
    """`w` and `b` of a router."""
    names = {"w": router.weight} | ({"b": router.bias} if router.bias is not None else {})
    found: dict[str, State] = {}
    for state, name in names.items():
        owner, _, attribute = name.rpartition(".")
        d_out, d_in = router.logits.meta["example"].shape[-1], router.x.meta["example"].shape[-1]
        shape = shapes.Weight(d_out, d_in) if state == "w" else shapes.Vector(d_out)
        found[state] = State(state, shape, weight=WeightRef(full(owner), attribute))
    return found
