"""Experts that are modules in lists, and the networks beside them that every token goes to."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx, nn

from peftc.addressing.sites import Slice
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
    modules that are an expert each; () where each role has a list of its own. `rows`: of a role
    that has some rows of its Linears.
    """

    module: str
    linears: Mapping[str, tuple[str, ...]]
    members: tuple[str, ...] = ()
    rows: Mapping[str, Slice] = field(default_factory=dict[str, Slice])

    @property
    def count(self) -> int:
        return len(next(iter(self.linears.values())))

    @property
    def roles(self) -> Iterable[str]:
        return self.linears


@dataclass(frozen=True)
class LinearRows:
    """A Linear by its name in a module, and the rows of it that have a role: all, if None."""

    name: str
    rows: Slice | None = None


Experts = StackedExperts | ExpertModules
Network = dict[str, LinearRows]  # the Linear of each role


def expert_modules(module: str, networks: Iterable[Network], root: nn.Module) -> list[ExpertModules]:
    """The experts among the networks of a module, of which the code calls one of several of the
    same structure, or each: the longest list first. `module`: the name of `root` in the layer.
    """
    # Seen in: NLLB-MoE, Switch Transformers; and loops over experts written by hand
    lists: dict[frozenset[tuple[str, tuple[str, ...]]], ExpertModules] = {}
    for network in networks:
        if (experts := _experts_like(network, module, root)) is not None:
            lists.setdefault(frozenset(experts.linears.items()), experts)
    roles = ((experts.rows.get(role), names) for experts in lists.values() for role, names in experts.linears.items())
    linears = [(name, rows) for rows, names in roles for name in names]
    if len(set(linears)) < len(linears):
        return []  # an expert whose Linears have other roles than those of the others
    return sorted(lists.values(), key=lambda experts: -experts.count)


def networks_beside(module: str, networks: Iterable[Network], root: nn.Module) -> list[Network]:
    """The networks of `up` and `down` that are in no list of experts."""
    # Seen in: no transformers model, but experts written by hand beside one for all tokens
    alone = [n for n in networks if "up" in n and _experts_like(n, module, root) is None]
    return [{role: replace(p, name=f"{module}.{p.name}".strip(".")) for role, p in n.items()} for n in alone]


def networks_of(result: fx.Node, body: Collection[fx.Node], code: LayerGraph) -> list[Network]:
    """The Linears of code that compute its result, each with those that compute its input."""
    networks: list[Network] = []
    for node, rows in source_linears(code, result):
        hidden = first_input(node)
        if hidden is None or node.op != "call_module" or node not in body:
            continue
        projections = {**input_projections(hidden, code), "down": Projection(node, rows)}
        own = {role: p for role, p in projections.items() if p.node in body and p.node.op == "call_module"}
        if rows is None and "down" in own:
            networks.append({role: LinearRows(str(p.node.target), p.rows) for role, p in own.items()})
    return networks


def _experts_like(network: Network, module: str, root: nn.Module) -> ExpertModules | None:
    """The experts of which a network is one; None if it is in no list of several."""
    if (one := _list_element(network, root)) is not None:
        members = _same_structure(one, root)
        linears = {role: tuple(m + p.name[len(one) :] for m in members) for role, p in network.items()}
    else:
        members = []
        linears = {role: tuple(_same_structure(p.name, root)) for role, p in network.items()}
        numbers = {p.name.rpartition(".")[2] for p in network.values()}
        counts = {len(names) for names in linears.values()}
        if len(numbers) > 1 or len(counts) > 1 or counts == {1} or len(network) < 2:
            return None
    full = {role: tuple(f"{module}.{name}".strip(".") for name in names) for role, names in linears.items()}
    rows = {role: p.rows for role, p in network.items() if p.rows is not None}
    return ExpertModules(module, full, tuple(f"{module}.{name}".strip(".") for name in members), rows)


def _list_element(network: Network, root: nn.Module) -> str | None:
    """The module that contains all of a network, and that has equal ones beside it."""
    names = [p.name for p in network.values()]
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
