"""The reference model: forward hooks on the base evaluate the equations of the edits."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from peftc.addressing.sites import Site, Slice
from peftc.forms.shapes import Tokens
from peftc.planning import ir
from peftc.verification.reference.interpreter import (
    FormModules,
    Interpreter,
    features,
    weight_of,
    with_features,
    with_weight,
)
from peftc.verification.reference.locations import (
    ATTENTION_KINDS,
    EditKey,
    Kind,
    Location,
    Locator,
    ReferenceUnavailable,
    key_of,
    states_of,
)
from peftc.verification.reference.operations import Label, OperationInterceptor
from peftc.verification.reference.outputs import first_tensor, with_first_tensor


@dataclass(frozen=True)
class ObservedState:
    site: Site
    state: str
    rows: Slice | None


@dataclass(frozen=True)
class StateWrite:
    """Equation `index` of an edit, number `order` of all, which writes the state at a location."""

    site_edit: ir.SiteEdit
    index: int
    rows: Slice | None
    order: int

    @property
    def depth(self) -> int:
        """Edits of inner sites come first: `hidden` before the `z` of its ffn."""
        return self.site_edit.site.path.count(".")


def ignore(*args: Any) -> None:
    pass


class ReferenceModel:
    """Hooks and intercepted operations on `base`, for all edits whose states can be located."""

    def __init__(
        self,
        base: nn.Module,
        site_edits: Iterable[ir.SiteEdit],
        sites: Mapping[str, Site],
        forms: FormModules,
        trained: Mapping[str, Tensor],  # values of the base parameters that `train` names, by dotted name
    ) -> None:
        self.base, self.trained = base, trained
        self.locator, self.interpreter = Locator(sites), Interpreter(forms, base)
        self.operations = OperationInterceptor(self)
        self.states: dict[Location, list[ObservedState]] = defaultdict(list)
        self.writes: dict[Location, list[StateWrite]] = defaultdict(list)
        self.prompts: list[ir.SiteEdit] = []
        self.unavailable: dict[EditKey, str] = {}  # why an edit is not evaluated at a site
        self.on_edit = ignore
        self.on_operand: Callable[[str, str, Tensor], None] = ignore  # path of the sub-layer; `q`, `k`, `v`; value
        self.watched: dict[str, Location] = {}  # attentions, by the path of the sub-layer
        self.sub_layer_results: dict[Location, None] = {}  # in layers whose residual sums are edited
        self.depth: Counter[str] = Counter()  # open calls, by layer
        self.leading_shapes: dict[str, tuple[int, ...]] = {}  # (batch, tokens) of the input, by layer
        self.reached: set[Location] = set()
        self.replaced: dict[str, ExitStack] = {}  # restores parameters, by layer
        for site_edit in site_edits:
            uses: dict[tuple[int, ...], ir.SiteEdit] = {}  # several where layers share weights or parts
            for use in site_edit.uses():
                modules = (use.site.module, use.site.root)
                uses.setdefault(tuple(id(base.get_submodule(name)) for name in modules), use)
            for use in uses.values():
                self._bind(use)
        for root in {location.root: None for location in self.states if location.kind in ("sum", "residual", "total")}:
            self.sub_layer_results |= dict.fromkeys(self.locator.sub_layer_results(root))

    def _bind(self, site_edit: ir.SiteEdit) -> None:
        if any(instance.form.selects_positions(instance.form.fill(instance.args)) for instance in site_edit.instances):
            self.unavailable[key_of(site_edit)] = "its form selects positions, which it receives from the model's stack"
            return
        if any(isinstance(a.value, ir.Concat) and isinstance(a.value.shape, Tokens) for a in site_edit.assigns):
            self.prompts.append(site_edit)
            return
        try:
            locations = {name: self.locator.location(site_edit.site, name) for name in states_of(site_edit)}
            rows = {name: self.locator.rows(site_edit.site, name) for name in locations}
        except ReferenceUnavailable as reason:
            self.unavailable[key_of(site_edit)] = str(reason)
            return
        for name, location in locations.items():
            if all(s.site.path != site_edit.site.path or s.state != name for s in self.states[location]):
                self.states[location].append(ObservedState(site_edit.site, name, rows[name]))
        for index, assign in enumerate(site_edit.assigns):
            write = StateWrite(site_edit, index, rows[assign.state], sum(map(len, self.writes.values())))
            self.writes[locations[assign.state]].append(write)
            # the result of a loop's body may be that of its last sub-layer, whose edits come first
            self.writes[locations[assign.state]].sort(
                key=lambda write: (bool(write.site_edit.site.parts), -write.depth)
            )

    # Hooks ----------------------------------------------------------------------------------------

    @contextmanager
    def active(self, on_edit: Callable[[EditKey, Any], None] = ignore) -> Generator[None]:
        """Inside the block the base computes what the spec says.

        `on_edit` receives an edit and a value that it will change; None before its module returns.
        """
        self.on_edit, self.reached = on_edit, set()
        with ExitStack() as stack:
            stack.callback(lambda: [self._restore_parameters(root) for root in list(reversed(self.replaced))])
            for name, value in self.trained.items():
                parameter = self.base.get_parameter(name)
                for module in self.base.modules():  # several modules may share it
                    for attribute, current in list(vars(module)["_parameters"].items()):
                        if current is parameter:
                            self._replace_parameter("", module, attribute, value)
            self._register_hooks(stack)
            stack.enter_context(self.operations)
            yield

    def unreached_writes(self) -> list[StateWrite]:
        return [w for location, writes in self.writes.items() if location not in self.reached for w in writes]

    def _all_locations(self) -> Collection[Location]:
        return dict.fromkeys([*self.states, *self.watched.values(), *self.sub_layer_results])

    def _register_hooks(self, stack: ExitStack) -> None:
        def on_input(name: str, function: Callable[[Any], Any]) -> None:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:  # paused: an equation calls the module
                return None if self.operations.paused else function((args, kwargs))

            stack.callback(self.base.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)

        def on_output(name: str, function: Callable[[Any], Any], always: bool = False) -> None:
            def hook(_: nn.Module, args: Any, result: Any) -> Any:
                return None if self.operations.paused else function(result)

            stack.callback(self.base.get_submodule(name).register_forward_hook(hook, always_call=always).remove)

        # The hooks of one module run in the order of their registration.
        locations = self._all_locations()
        roots = {location.root: None for location in locations}
        for root in roots:
            on_input(root, partial(self._begin_layer, root))
        for location in (one for one in locations if one.kind == "input"):
            on_input(location.module, partial(self._edit_first_tensor, location))
        for location in (one for one in self.writes if one.kind in ("output", "sum", "residual", "total")):
            on_output(location.module, partial(self._announce_edits, location))
        for location in (one for one in locations if one.kind == "output"):
            on_output(location.module, partial(self._edit_first_tensor, location))
        for location in (one for one in locations if one.owner):
            on_output(location.module, partial(self._label, location))
        for root in roots:
            on_output(root, partial(self._end_layer, root), always=True)

    def _begin_layer(self, root: str, arguments: Any) -> None:
        self.depth[root] += 1
        self.interpreter.forget(root)
        if (first := first_tensor(arguments)) is not None:
            self.leading_shapes[root] = tuple(first.shape[:-1])
        self._edit_weights(root)

    def _end_layer(self, root: str, result: Any) -> None:
        self.depth[root] -= 1
        self.operations.drop(location.owner for location in self._all_locations() if location.root == root)
        self._restore_parameters(root)

    def _announce_edits(self, location: Location, result: Any) -> None:
        for write in self.writes[location]:
            self.on_edit(key_of(write.site_edit), None)

    def _edit_first_tensor(self, location: Location, value: Any) -> Any:
        if not self.depth[location.root]:
            return None
        return with_first_tensor(value, self.apply_edits(location, first_tensor(value)))

    def _label(self, location: Location, result: Any) -> None:
        """Labels a module's result, so that the operation that uses it can be identified."""
        value = first_tensor(result)
        if value is not None and self.depth[location.root]:
            self.operations.label(value, Label("query" if location.kind in ATTENTION_KINDS else "sum", location.owner))

    # Values ---------------------------------------------------------------------------------------

    def apply_edits(self, location: Location, value: Any) -> Any:
        """Applies the edits that write a value, and stores its states before and after each."""
        self.reached.add(location)
        if location not in self.states:
            return value
        with self.operations.pause():
            self._store(location, value)
            for write in self.writes.get(location, ()):
                value = self._apply(location, write, value)
                self._store(location, value)
        return value

    def _store(self, location: Location, value: Any) -> None:
        for observed in self.states[location]:
            state = self._site_value(location, observed.site, observed.rows, value)
            self.interpreter.values[location.root, observed.site.path, observed.state] = state

    def _site_value(self, location: Location, site: Site, rows: Slice | None, value: Any) -> Any:
        """A value as the equations of a site see it: its own features, with a batch dimension."""
        if not isinstance(value, Tensor):
            return value
        shape = self.leading_shapes.get(location.root)
        if site.layer_input is not None and shape is not None and len(shape) == value.ndim == 2:
            value = value.unflatten(0, shape) if len(value) == prod(shape) else value
        return features(rows, value)

    def _apply(self, location: Location, write: StateWrite, value: Any) -> Any:
        self.on_edit(key_of(write.site_edit), value)
        current = self._site_value(location, write.site_edit.site, write.rows, value)
        new = self.interpreter.assign(write.site_edit, write.index, current)
        if not isinstance(value, Tensor):
            return new
        if write.rows is None:
            return new.reshape(value.shape) if new.numel() == value.numel() else new
        return with_features(write.rows, value, new.reshape(*value.shape[:-1], -1))

    # Parameters -----------------------------------------------------------------------------------

    def _edit_weights(self, root: str) -> None:
        """Replaces the parameters that equations of `w` and `b` write, for one call of a layer."""
        locations = [location for location in self.states if (location.kind, location.root) == ("weight", root)]
        with self.operations.pause():
            for location in locations:
                self.reached.add(location)
                for observed in self.states[location]:
                    self._read_weight(observed.site, observed.state)
            writes = (write for location in locations for write in self.writes.get(location, ()))
            for write in sorted(writes, key=lambda write: write.order):
                self._write_weight(root, write)

    def _read_weight(self, site: Site, state: str) -> Tensor:
        ref = site.states[state].weight
        assert ref is not None
        parameter = vars(self.base.get_submodule(ref.module))["_parameters"][ref.attribute]
        self.interpreter.values[site.root, site.path, state] = value = weight_of(parameter, ref)
        return value

    def _write_weight(self, root: str, write: StateWrite) -> None:
        site, state = write.site_edit.site, write.site_edit.assigns[write.index].state
        ref = site.states[state].weight
        assert ref is not None
        self.on_edit(key_of(write.site_edit), None)
        new = self.interpreter.assign(write.site_edit, write.index, self._read_weight(site, state))
        module = self.base.get_submodule(ref.module)
        parameter = vars(module)["_parameters"][ref.attribute]
        self._replace_parameter(root, module, ref.attribute, with_weight(parameter, ref, new))
        self._read_weight(site, state)

    def _replace_parameter(self, root: str, module: nn.Module, attribute: str, value: Tensor) -> None:
        parameters = vars(module)["_parameters"]
        self.replaced.setdefault(root, ExitStack()).callback(parameters.__setitem__, attribute, parameters[attribute])
        parameters[attribute] = value

    def _restore_parameters(self, root: str) -> None:
        self.replaced.pop(root, ExitStack()).close()

    # The protocol `OperationHandler` --------------------------------------------------------------

    def observes(self, kind: Kind, owner: str) -> bool:
        return any((location.kind, location.owner) == (kind, owner) for location in self.states)

    def edit(self, kind: Kind, owners: Collection[str], value: Any) -> Any:
        for location in [one for one in self.states if one.kind == kind and one.owner in owners]:
            value = self.apply_edits(location, value)
        return value
