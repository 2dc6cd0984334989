"""Runs a pass on the graph of a region, and checks what it has made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from peftc.dataflow.nodes import EDIT, ancestors, example, output_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.models.skeleton import stop_notes
from peftc.planning.pass_form import PassForm
from peftc.rewriting.anchors import find
from peftc.rewriting.edits import EQUATIONS, RegionEdit, RegionState
from peftc.rewriting.insert import Inserter
from peftc.rewriting.passes.node_values import NodeValues, is_unobserved
from peftc.rewriting.passes.region import Region, Replacement, code, completed
from peftc.rewriting.passes.state_access import comment_of, is_new
from peftc.rewriting.states import PASS


def insert_edits(inserter: Inserter, edits: Sequence[RegionEdit]) -> None:
    """Inserts edits and passes in their order. Raises: as `Inserter.insert` and `insert_pass`."""
    has_passes = any(edit.form is not None for edit in edits)
    for number, edit in enumerate(edits, 1):
        written = [assign.state for assign in edit.assigns] if edit.form is None else list(edit.form.replaced)
        if has_passes and written and all(is_absent(inserter, edit.states[name], name) for name in written):
            continue  # such as keys that a cache has already
        if edit.form is not None:
            insert_pass(inserter, edit, edits[number:])
        else:
            inserter.insert(edit)


def is_absent(inserter: Inserter, state: RegionState, name: str) -> bool:
    """Whether a call computes no such state."""
    if state.anchor is None:
        return False
    if state.anchor.kind == "argument":
        return find(state.anchor, inserter.trace) is None
    known = inserter.lookup.nodes.get(state)
    return not (inserter.lookup.candidates(state, name) if known is None else known)


def insert_pass(inserter: Inserter, edit: RegionEdit, later: Sequence[RegionEdit] = (), layer: str = "") -> Region:
    """Lets a pass rewrite a graph. `later`: the edits that come after it. `layer`: its path.

    Raises: P440 where its function fails, P441-P443 for what it does, P444 where it does something
    else than in its first run, P403 and P207 for states.
    """
    form = edit.form
    assert form is not None
    graph = inserter.graph
    before = Snapshot(inserter, later)
    region = Region(inserter, edit, form, form.layer or layer)
    try:
        form.function(region)
    except PeftcError as error:
        if layer or form.replaced or error.diagnostics[0].code != "P403":
            raise
        erase(filter(is_new, reversed(graph.nodes)))  # it replaces nothing, and what it reads is not there
        return region
    except Exception as error:  # the program's own code
        notes = stop_notes(error)
        raise PeftcError(Diagnostic("P440", f"the pass `{form.name}` failed", notes=notes)) from error
    check_graph(graph, form.name)
    before.check(form.name)
    run = completed(form, region)
    if not layer:
        check_repeated(form, run)
    new = [node for node in graph.nodes if is_new(node)]
    check_values(inserter, edit, run, region, before, bool(layer))
    for node in new:
        node.meta["origin"] = (EDIT, next(inserter.numbers), 0)
    for node in graph.nodes:
        if node.meta.get("origin", ("",))[0] == EDIT and EQUATIONS not in node.meta:
            node.meta[EQUATIONS] = (comment_of(edit),)
        if node.meta.get(EQUATIONS) == (comment_of(edit),):
            node.meta[PASS] = form.name
    return region


def erase(nodes: Iterable[fx.Node]) -> None:
    """Takes out nodes, users first."""
    for node in list(nodes):
        node.graph.erase_node(node)


class Snapshot:
    """A graph before a pass runs."""

    def __init__(self, inserter: Inserter, later: Sequence[RegionEdit]) -> None:
        self.inserter = inserter
        self.nodes = {node: code(node) for node in inserter.graph.nodes}
        self.unused = {node for node in self.nodes if is_unobserved(node)}
        states = [state for edit in later if edit.form is None for state in edit.states.values()]
        nodes = (node for state in states for node in inserter.lookup.nodes.get(state, ()))
        self.later = {node: bool(inserter.latest(node).users) for node in nodes}

    def changed(self, region: Region) -> list[fx.Node]:
        """The nodes of the model that the pass has changed, and not by replacing a state."""
        present = set(self.inserter.graph.nodes) - region._touched  # pyright: ignore[reportPrivateUsage]
        return [node for node, before in self.nodes.items() if node in present and code(node) != before]

    def check(self, name: str) -> None:
        """Raises: P441 where the pass took out what has an effect, or what a later edit reads."""
        present = set(self.inserter.graph.nodes)
        for node in self.unused - present:
            message = f"the pass `{name}` took out `{node.name}`, which has an effect: `{node.target}`"
            raise PeftcError(Diagnostic("P441", message, help="leave nodes without users in the graph"))
        for node, is_used in self.later.items():
            latest = self.inserter.latest(node)
            if latest not in present or (is_used and not latest.users):
                message = f"the pass `{name}` took out `{node.name}`, a state that a later edit reads"
                raise PeftcError(Diagnostic("P441", message, help="use `region.replace(name, value)`"))


def check_graph(graph: fx.Graph, name: str) -> None:
    """Raises: P441 for a graph that is none, or has an operand that no code can name."""
    try:
        graph.lint()
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        raise PeftcError(Diagnostic("P441", f"the pass `{name}` breaks the graph: {what}")) from error
    for node in filter(is_new, graph.nodes):
        leaves = tree_leaves((node.args, dict(node.kwargs)))
        tensors = [value for value in leaves if isinstance(value, torch.Tensor | nn.Module)]
        if tensors:
            message = f"`{node.name}` of the pass `{name}` has a {type(tensors[0]).__name__} as an operand"
            help_ = "make it a `region.buffer` or a `region.module`"
            raise PeftcError(Diagnostic("P441", message, help=help_))


def check_repeated(first: PassForm, again: PassForm) -> None:
    """Raises: P444 for other members or replaced states than in the first run."""
    runs = [([member.declaration for member in form.members], list(form.replaced)) for form in (first, again)]
    for what, one, other in zip(("members", "replaced states"), *runs, strict=True):
        if one != other:
            notes = (f"first: {one}", f"here: {other}")
            help_ = "let the function depend on the region alone, and make all members in each run"
            message = f"the pass `{first.name}` has other {what} than in its first run"
            raise PeftcError(Diagnostic("P444", message, notes=notes, help=help_))


def check_values(
    inserter: Inserter, edit: RegionEdit, run: PassForm, region: Region, snapshot: Snapshot, is_first: bool
) -> None:
    """Raises: P441 for a node that cannot run, P442 for another shape or kind of dtype than the
    model has, P443 for a state or a parameter that loses its gradient (in the first run).
    """
    own = edit.form if edit.form is not None and edit.form.members else run
    values = NodeValues(inserter.trace, f"{edit.place}.{run.name}", own, gradients=is_first)
    graph = inserter.graph
    before = {node: example(node) for node in (*filter(is_new, graph.nodes), *snapshot.changed(region))}
    values.evaluate(graph, [node for node in before if not is_unobserved(node)])
    added = (node for node in graph.nodes if node not in snapshot.nodes)  # also where it replaces a state
    values.evaluate(graph, [node for node in added if "example" not in node.meta and node.users])
    for node, value in before.items():
        if isinstance(value, torch.Tensor):
            check_like(run.name, f"`{node.name}`", value, values.values.get(node, value))
    replacements: Sequence[Replacement] = region._replacements  # pyright: ignore[reportPrivateUsage]
    for one in replacements:
        value = example(one.after)
        check_like(run.name, f"`{one.name}`, which is now `{one.after.name}`,", example(one.before), value)
        if is_first and not one.detached:
            check_gradient(run.name, one, values)
    check_parameters(run, edit, graph)


def check_like(name: str, what: str, before: object, after: object) -> None:
    """Raises: P442."""
    if not isinstance(before, torch.Tensor):
        return
    own = (list(before.shape), before.is_floating_point())
    if isinstance(after, torch.Tensor) and own == (list(after.shape), after.is_floating_point()):
        return
    here = f"{list(after.shape)}, {after.dtype}" if isinstance(after, torch.Tensor) else f"a {type(after).__name__}"
    message = f"the pass `{name}` changes {what} from {own[0]}, {before.dtype}, to {here}"
    raise PeftcError(Diagnostic("P442", message))


def check_gradient(name: str, one: Replacement, values: NodeValues) -> None:
    """Raises: P443 where no state of the model gets a gradient through a replaced one."""
    value = values.values.get(one.after, values.leaves.get(one.after))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    leaves = [leaf for leaf in values.leaves.values() if leaf.requires_grad]
    notes: tuple[str, ...] = ()
    gradients: list[object] = []
    try:
        if value.requires_grad and leaves:
            with values.mode, torch.enable_grad():
                gradients += torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        notes = (str(error).splitlines()[0],)
    if all(gradient is None for gradient in gradients) and one.after not in values.leaves:
        message = f"no state of the model has a gradient through `{one.after.name}`, which replaces `{one.name}`"
        help_ = "`region.replace(…, detached=True)` says that this is meant"
        raise PeftcError(Diagnostic("P443", f"the pass `{name}`: {message}", notes=notes, help=help_))


def check_parameters(run: PassForm, edit: RegionEdit, graph: fx.Graph) -> None:
    """Raises: P443 for a parameter that reaches no output."""
    used = {str(node.target) for node in ancestors(output_of(graph)) if node.op == "get_attr"}
    for member in run.members:
        if member.kind == "parameter" and f"{edit.place}.{run.name}.{member.name}" not in used:
            message = f"the parameter `{member.name}` of the pass `{run.name}` has no gradient"
            help_ = "replace a state by what it computes, or make it a `region.buffer`"
            raise PeftcError(Diagnostic("P443", message, help=help_))
