"""The states at the sites of a mixture of experts."""

from collections.abc import Callable, Iterator

from torch import nn

from peftc.addressing.sites import INPUT, OUTPUT, ActivationRef, Slice, StackedSlice, State, WeightRef
from peftc.forms import shapes
from peftc.modules.walk import submodule
from peftc.recognition.moe.lists import ExpertModules, Experts
from peftc.recognition.moe.matrices import StackedLinear, StackedParameter
from peftc.recognition.moe.routers import Router
from peftc.recognition.non_layer_sites import weight_states

ROLES = ("gate", "up", "down")
FullName = Callable[[str], str]  # of a module by its name in the layer


def expert_states(experts: Experts, root: nn.Module, full: FullName) -> Iterator[tuple[str, str, dict[str, State]]]:
    """For every role of the first expert: (role, module, states). The others have equal ones."""
    for role in (role for role in ROLES if role in experts.roles):
        if isinstance(experts, ExpertModules):
            name, rows = experts.linears[role][0], experts.rows.get(role)
            yield role, full(name), linear_states(full(name), submodule(root, name), rows)
        else:
            yield role, full(experts.module), _slice_states(experts.roles[role], 0, full)


def _slice_states(role: StackedLinear, number: int, full: FullName) -> dict[str, State]:
    """`w` and `b` of one Linear of one expert, which are slices of parameters."""
    shape = shapes.Weight(role.rows.width if role.rows else role.weight.d_out, role.weight.d_in)
    states = {"w": State("w", shape, weight=_slice(role.weight, role.rows, number, full))}
    if role.bias is not None:
        states["b"] = State("b", shapes.Vector(shape.d_out), weight=_slice(role.bias, role.rows, number, full))
    return states


def _slice(parameter: StackedParameter, rows: Slice | None, number: int, full: FullName) -> WeightRef:
    stacked = StackedSlice(number, parameter.count, full(parameter.reader))
    return WeightRef(full(parameter.owner), parameter.attribute, rows, parameter.transposed, stacked)


def linear_states(name: str, module: nn.Module, rows: Slice | None = None) -> dict[str, State]:
    """The states of a Linear of its own; its input are the tokens that were sent to it."""
    states = weight_states(name, module, rows)
    shape = states["w"].shape
    assert isinstance(shape, shapes.Weight)
    states["x"] = State("x", shapes.Tokens(shape.d_in), ActivationRef(INPUT))
    states["h"] = State("h", shapes.Tokens(shape.d_out), ActivationRef(OUTPUT, rows))
    return states


def router_states(router: Router, full: FullName) -> dict[str, State]:
    """`w` and `b` of a router."""
    names = {"w": router.weight} | ({"b": router.bias} if router.bias is not None else {})
    is_transposed = router.layout is not None and router.layout.is_transposed
    layout = None if is_transposed else router.layout
    states: dict[str, State] = {}
    for state, name in names.items():
        owner, _, attribute = name.rpartition(".")
        if state == "b":
            ref, shape = WeightRef(full(owner), attribute), shapes.Vector(router.d_out)
        else:
            ref = WeightRef(full(owner), attribute, transposed=is_transposed, layout=layout)
            shape = shapes.Weight(router.d_out, router.d_in)
        states[state] = State(state, shape, weight=ref)
    return states
