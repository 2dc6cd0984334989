"""Experts that are modules in lists, and the networks beside them that every token goes to."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input
from peftc.modules.walk import submodule
from peftc.observation.layer_keys import structure_key
from peftc.recognition.ffn import Projection, input_projections
from peftc.recognition.moe.matrices import StackedExperts


@dataclass(frozen=True)
class ExpertModules:
    """Experts that are modules. `linears`: of each role, the Linear of each expert. `members`: the
    modules that are an expert each; () where each role has a list of its own.
    """

    module: str
    linears: Mapping[str, tuple[str, ...]]
    members: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(next(iter(self.linears.values())))

    @property
    def roles(self) -> Iterable[str]:
        return self.linears


Experts = StackedExperts | ExpertModules
Network = dict[str, str]  # the Linear of each role, by its name in a module


def expert_modules(module: str, networks: Iterable[Network], root: nn.Module) -> list[ExpertModules]:
    """The experts among the networks of a module, of which the code calls one of several of the
    same structure, or each: the longest list first. `module`: the name of `root` in the layer.
    """
    # Seen in: NLLB-MoE, Switch Transformers; and loops over experts written by hand
    lists: dict[frozenset[tuple[str, tuple[str, ...]]], ExpertModules] = {}
    for network in networks:
        if (experts := _experts_like(network, module, root)) is not None:
            lists.setdefault(frozenset(experts.linears.items()), experts)
    linears = [name for experts in lists.values() for names in experts.linears.values() for name in names]
    if len(set(linears)) < len(linears):
        return []  # an expert whose Linears have other roles than those of the others
    return sorted(lists.values(), key=lambda experts: -experts.count)


def networks_beside(module: str, networks: Iterable[Network], root: nn.Module) -> list[Network]:
    """The networks of `up` and `down` that are in no list of experts."""
    # Seen in: no transformers model, but experts written by hand beside one for all tokens
    alone = [n for n in networks if "up" in n and _experts_like(n, module, root) is None]
    return [{role: f"{module}.{name}".strip(".") for role, name in network.items()} for network in alone]


def networks_of(result: fx.Node, body: Collection[fx.Node], code: LayerGraph) -> list[Network]:
    """The Linears of code that compute its result, each with those that compute its input."""
    networks: list[Network] = []
    for node, rows in source_linears(code, result):
        hidden = first_input(node)
        if hidden is None or node.op != "call_module" or node not in body:
            continue
        projections = {**input_projections(hidden, code), "down": Projection(node, rows)}
        own = {role: p.node for role, p in projections.items() if p.rows is None and p.node in body}
        whole = {role: str(linear.target) for role, linear in own.items() if linear.op == "call_module"}
        if "down" in whole:
            networks.append(whole)
    return networks


def _experts_like(network: Network, module: str, root: nn.Module) -> ExpertModules | None:
    """The experts of which a network is one; None if it is in no list of several."""
    if (one := _list_element(network, root)) is not None:
        members = _same_structure(one, root)
        linears = {role: tuple(m + name[len(one) :] for m in members) for role, name in network.items()}
    else:
        members = []
        linears = {role: tuple(_same_structure(name, root)) for role, name in network.items()}
        numbers = {name.rpartition(".")[2] for name in network.values()}
        counts = {len(names) for names in linears.values()}
        if len(numbers) > 1 or len(counts) > 1 or counts == {1} or len(network) < 2:
            return None
    full = {role: tuple(f"{module}.{name}".strip(".") for name in names) for role, names in linears.items()}
    return ExpertModules(module, full, tuple(f"{module}.{name}".strip(".") for name in members))


def _list_element(network: Network, root: nn.Module) -> str | None:
    """The module that contains all of a network, and that has equal ones beside it."""
    names = list(network.values())
    parts = names[0].split(".")
    for end in range(1, len(parts)):
        one = ".".join(parts[:end])
        if not all(name.startswith(f"{one}.") for name in names):
            return None
        if len(_same_structure(one, root)) > 1:
            return one
    return None


def _same_structure(name: str, root: nn.Module) -> list[str]:
    """The modules beside one, and itself, that have its structure."""
    container, key = name.rpartition(".")[0], structure_key(submodule(root, name))
    children = submodule(root, container).named_children()
    return [f"{container}.{n}".strip(".") for n, child in children if structure_key(child) == key]
