"""The base as a specification: it runs with hooks that compute the equations of the edits where the plan says that they act."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from peftc.addressing.sites import Site, Slice
from peftc.forms.shapes import Tokens
from peftc.planning import ir
from peftc.verification.witness.forms import Forms
from peftc.verification.witness.interpreter import Interpreter, Pair, features, weight_of, with_features, with_weight
from peftc.verification.witness.locations import ROLES, Location, Locator, Unreachable, states_of
from peftc.verification.witness.operations import Label, Operations, flattened
from peftc.verification.witness.outputs import first_tensor, with_first

Place = tuple[str, str]  # an edit and the path of a site


@dataclass(frozen=True)
class Bound:
    """A state of a site at a location."""

    site: Site
    state: str
    rows: Slice | None


@dataclass(frozen=True)
class Write:
    """Equation `index` of an edit, which writes the state at a location."""

    placed: ir.SiteEdit
    index: int
    rows: Slice | None


@dataclass
class Hooked:
    """A module, the locations at it, and the layers that it is."""

    module: nn.Module
    bound: list[Location] = field(default_factory=list[Location])
    watched: list[Location] = field(default_factory=list[Location])
    roots: dict[str, None] = field(default_factory=dict[str, None])


class Witness:
    """Hooks and intercepted operations on `base` for all edits that can be located; `unreached` says of the others why.

    `trained`: values of base parameters that `train` names, by dotted name. `mark` is called with the edit, the site and the value, if
    there is one, before an edit acts, and without a value before the module whose result it changes is over. `arrival` is called with what arrives at each attention in `watched`: the name of
    its site, `q`, `k` or `v`, and the value.
    """

    def __init__(
        self,
        base: nn.Module,
        placed: Iterable[ir.SiteEdit],
        sites: Mapping[str, Site],
        forms: Forms,
        trained: Mapping[str, Tensor],
    ) -> None:
        self.base, self.trained = base, trained
        self.locator, self.interpreter = Locator(sites), Interpreter(forms, base)
        self.operations = Operations(self)
        self.bound: dict[Location, list[Bound]] = defaultdict(list)
        self.writes: dict[Location, list[Write]] = defaultdict(list)
        self.prompts: list[ir.SiteEdit] = []
        self.unreached: dict[Place, str] = {}
        self.mark: Callable[[Place, Any], None] = unmarked
        self.arrival: Callable[[str, str, Tensor], None] | None = None
        self.watched: dict[str, Location] = {}  # attentions, by the path of the sub-layer
        self.beside: dict[Location, None] = {}  # the results of sub-layers that are in one layer with those of edits
        self.hooked: list[Hooked] | None = None
        self.inside: Counter[str] = Counter()
        self.streams: dict[str, tuple[int, ...]] = {}
        self.reached: set[Location] = set()
        self.paths: dict[str, set[str]] = defaultdict(set)  # of sites, by the layer that they are in
        self.placed: dict[str, set[int]] = defaultdict(set)  # edits at sites, likewise
        self.swapped: dict[str, list[tuple[nn.Module, str, Tensor]]] = {}
        for one in placed:
            modules = {id(base.get_submodule(use.site.module)): use for use in reversed([*one.uses()])}
            for use in reversed(modules.values()):  # several, where their weights are tied
                self.add(use)
        for root in dict.fromkeys(
            location.root for location in self.bound if location.kind in ("sum", "residual", "total")
        ):
            self.beside |= dict.fromkeys(self.locator.results(root))

    def add(self, placed: ir.SiteEdit) -> None:
        """Binds the states of an edit at a site to locations."""
        place = (placed.edit, placed.site.path)
        if any(instance.form.picks(instance.form.fill(instance.args)) for instance in placed.instances):
            self.unreached[place] = "its form picks positions, which the model's stack tells it"
            return
        if any(isinstance(a.value, ir.Concat) and isinstance(a.value.shape, Tokens) for a in placed.assigns):
            self.prompts.append(placed)
            return
        try:
            located = {name: self.locator.of(placed.site, name) for name in states_of(placed)}
            rows = {name: self.locator.rows(placed.site, name) for name in located}
        except Unreachable as reason:
            self.unreached[place] = str(reason)
            return
        for name, location in located.items():
            self.paths[location.root].add(placed.site.path)
            self.placed[location.root].add(id(placed))
            if all(one.site.path != placed.site.path or one.state != name for one in self.bound[location]):
                self.bound[location].append(Bound(placed.site, name, rows[name]))
        for index, assign in enumerate(placed.assigns):
            self.writes[located[assign.state]].append(Write(placed, index, rows[assign.state]))

    # Running ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def acting(self) -> Generator[None]:
        """Inside the block the base computes what the spec says."""
        self.reached = set()
        with ExitStack() as stack:
            stack.callback(self.restore)
            for name, value in self.trained.items():
                self.swap("", self.base.get_parameter(name), value)
            for hooked in self.hooks():
                self.hook(hooked, stack)
            stack.enter_context(self.operations)
            yield

    def missing(self) -> list[Write]:
        """The writes that the last calls did not come to."""
        return [w for location, writes in self.writes.items() if location not in self.reached for w in writes]

    def hooks(self) -> list[Hooked]:
        """The modules to hook: those of locations and the layers around them. A module may have several names."""
        if self.hooked is None:
            found: dict[int, Hooked] = {}
            for location in self.every():
                for name in (location.module, location.root):
                    module = self.base.get_submodule(name)
                    found.setdefault(id(module), Hooked(module))
            for location in self.bound:
                found[id(self.base.get_submodule(location.module))].bound.append(location)
            for location in (*self.watched.values(), *self.beside):
                found[id(self.base.get_submodule(location.module))].watched.append(location)
            for location in self.every():
                found[id(self.base.get_submodule(location.root))].roots[location.root] = None
            self.hooked = list(found.values())
        return self.hooked

    def hook(self, hooked: Hooked, stack: ExitStack) -> None:
        here, roots, module = hooked.bound, hooked.roots, hooked.module
        outputs = [location for location in here if location.kind not in ("input", "weight", *ROLES)]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.operations.paused:  # an equation calls the module
                return None
            for root in roots:
                self.begin(root, (args, kwargs))
            for location in here:
                if location.kind == "input" and self.inside[location.root]:
                    value = first_tensor((args, kwargs))
                    args, kwargs = with_first((args, kwargs), self.passed(location, value))
            return args, kwargs

        def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if self.operations.paused:
                return None
            self.announce(outputs)
            for location in here:
                if location.kind == "output" and self.inside[location.root]:
                    result = with_first(result, self.passed(location, first_tensor(result)))
            self.follow([*here, *hooked.watched], result)
            return result

        def leave(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            for root in () if self.operations.paused else roots:
                self.end(root)

        handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        if roots:
            handles.append(module.register_forward_hook(leave, always_call=True))
        for handle in handles:
            stack.callback(handle.remove)

    def begin(self, root: str, arguments: Any) -> None:
        """A call of a layer: new values, and the weights that its edits make."""
        self.inside[root] += 1
        self.interpreter.forget(self.paths[root], self.placed[root])
        first = first_tensor(arguments)
        if first is not None:
            self.streams[root] = tuple(first.shape[:-1])
        self.weights(root)

    def end(self, root: str) -> None:
        self.inside[root] -= 1
        self.operations.drop(location.owner for location in self.every() if location.root == root and location.owner)
        self.restore(root)

    def every(self) -> list[Location]:
        return [*self.bound, *self.watched.values(), *self.beside]

    def follow(self, locations: Iterable[Location], result: Any) -> None:
        """Labels the results of modules whose way to an operation is followed."""
        value = first_tensor(result)
        for location in locations:
            if value is not None and location.owner and self.inside[location.root]:
                what = "query" if location.kind in ROLES else "sum"
                self.operations.label(value, Label(what, location.owner))

    def announce(self, locations: Iterable[Location]) -> None:
        for location in locations:
            for write in self.writes.get(location, ()):
                self.mark((write.placed.edit, write.placed.site.path), None)

    # Values ----------------------------------------------------------------------------------------------------------

    def passed(self, location: Location, value: Any) -> Any:
        """A value after the edits that write it there; what equations read of it is kept."""
        self.reached.add(location)
        if location not in self.bound:
            return value
        with self.own():
            self.note(location, value)
            for write in self.writes.get(location, ()):
                value = self.written(location, write, value)
                self.note(location, value)
        return value

    @contextmanager
    def own(self) -> Generator[None]:
        """Inside the block operations are those of equations, not of the model."""
        before, self.operations.paused = self.operations.paused, True
        try:
            yield
        finally:
            self.operations.paused = before

    def note(self, location: Location, value: Any) -> None:
        for bound in self.bound[location]:
            self.interpreter.values[bound.site.path, bound.state] = self.seen(location, bound.site, bound.rows, value)

    def seen(self, location: Location, site: Site, rows: Slice | None, value: Any) -> Any:
        """A value as the equations of a site see it: its rows, with a batch."""
        if not isinstance(value, Tensor):
            return value
        stream = self.streams.get(location.root)
        if site.layer_input is not None and flattened(value, stream):
            assert stream is not None
            value = value.unflatten(0, stream)
        return features(rows, value)

    def written(self, location: Location, write: Write, value: Any) -> Any:
        self.mark((write.placed.edit, write.placed.site.path), value)
        seen = self.seen(location, write.placed.site, write.rows, value)
        new = self.interpreter.assign(write.placed, write.index, seen)
        if not isinstance(value, Tensor):
            return new
        if write.rows is None:
            return new.reshape(value.shape) if new.numel() == value.numel() else new
        return with_features(write.rows, value, new.reshape(*value.shape[:-1], -1))

    def weights(self, root: str) -> None:
        """Exchanges the parameters that equations of `w` and `b` write, for one call of a layer."""
        with self.own():
            for location, bound in self.bound.items():
                if location.kind == "weight" and location.root == root:
                    self.reached.add(location)
                    for one in bound:
                        self.read_weight(one.site, one.state)
            order = {id(w.placed): i for i, w in enumerate(w for found in self.writes.values() for w in found)}
            writes = [
                w for loc, found in self.writes.items() if (loc.kind, loc.root) == ("weight", root) for w in found
            ]
            for write in sorted(writes, key=lambda w: (order[id(w.placed)], w.index)):
                self.write_weight(root, write)

    def read_weight(self, site: Site, state: str) -> Tensor:
        ref = site.states[state].weight
        assert ref is not None
        parameter = vars(self.base.get_submodule(ref.module))["_parameters"][ref.attribute]
        self.interpreter.values[site.path, state] = value = weight_of(parameter, ref)
        return value

    def write_weight(self, root: str, write: Write) -> None:
        site, state = write.placed.site, write.placed.assigns[write.index].state
        ref = site.states[state].weight
        assert ref is not None
        self.mark((write.placed.edit, site.path), None)
        new = self.interpreter.assign(write.placed, write.index, self.read_weight(site, state))
        module = self.base.get_submodule(ref.module)
        parameter = vars(module)["_parameters"][ref.attribute]
        self.exchange(root, module, ref.attribute, with_weight(parameter, ref, new))
        self.read_weight(site, state)

    def exchange(self, root: str, module: nn.Module, attribute: str, value: Tensor) -> None:
        parameters = vars(module)["_parameters"]
        self.swapped.setdefault(root, []).append((module, attribute, parameters[attribute]))
        parameters[attribute] = value

    def swap(self, root: str, parameter: Tensor, value: Tensor) -> None:
        """Puts another tensor wherever the base has this parameter."""
        for module in self.base.modules():
            for attribute, present in list(vars(module)["_parameters"].items()):
                if present is parameter:
                    self.exchange(root, module, attribute, value)

    def restore(self, root: str | None = None) -> None:
        """Gives modules their own parameters again: those of one layer, or all."""
        for name in [root] if root is not None else list(reversed(self.swapped)):
            for module, attribute, value in reversed(self.swapped.pop(name, [])):
                vars(module)["_parameters"][attribute] = value

    # What operations show (the protocol of `Observer`) ---------------------------------------------------------------

    def at(self, kind: str, owner: str) -> list[Location]:
        return [location for location in self.bound if location.kind == kind and location.owner == owner]

    def attention(self, owner: str, query: Tensor, pair: Pair) -> tuple[Tensor, Pair]:
        with self.own():
            for location in self.at("query", owner):
                query = self.passed(location, query)
            for location in self.at("keys", owner):
                pair = Pair(self.passed(location, pair.key), pair.value)
            for location in self.at("values", owner):
                pair = Pair(pair.key, self.passed(location, pair.value))
            for location in self.at("pair", owner):
                pair = self.passed(location, pair)
        return query, pair

    def arrived(self, owner: str, state: str, value: Tensor) -> None:
        if self.arrival is not None and owner in self.watched:
            self.arrival(owner, state, value)

    def heads(self, owner: str, result: Tensor) -> Tensor:
        for location in self.at("heads", owner):
            result = self.passed(location, result.transpose(1, 2)).transpose(1, 2)
        return result

    def reads_residual(self, owner: str) -> bool:
        return bool(self.at("residual", owner))

    def residual(self, owner: str, value: Tensor) -> None:
        for location in self.at("residual", owner):
            self.passed(location, value)

    def result(self, owner: str, value: Tensor) -> Tensor:
        for location in self.at("sum", owner):
            value = self.passed(location, value)
        return value

    def total(self, owners: Collection[str], value: Tensor) -> Tensor:
        for location in [one for one in self.bound if one.kind == "total" and one.owner in owners]:
            value = self.passed(location, value)
        return value


def unmarked(place: Place, value: Any) -> None:
    """Nobody records where edits act."""
