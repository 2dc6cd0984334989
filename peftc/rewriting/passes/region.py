"""What the function of a pass sees: a layer's graph, its hidden states, and members of its own."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx, nn

from peftc.dataflow.nodes import nodes_in
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names, nearest
from peftc.planning.pass_form import PassForm, PassMember
from peftc.rewriting.edits import RegionEdit
from peftc.rewriting.insert import Inserter
from peftc.rewriting.passes.node_values import NodeValues, without_example
from peftc.rewriting.passes.state_access import StateAccess

Initial = float | str | tuple[str, float] | Tensor | Callable[[Tensor], object]
_PLAIN = nn.Module()


@dataclass(frozen=True)
class Replacement:
    """A state that a pass has replaced. `before`: what it read there."""

    name: str
    before: fx.Node
    after: fx.Node
    detached: bool


class Region:
    """A layer as a pass sees it. The function of `peftc.apply` is called with one.

    Attributes:
        graph: the fx graph of the layer's forward, down to Linears, norms and activations. All of
            torch.fx works on it; what the pass adds may be any function of torch.
        site: the site's path in its layer, such as `ffn`; empty for the layer itself.
    """

    def __init__(self, inserter: Inserter, edit: RegionEdit, form: PassForm, layer: str) -> None:
        self.graph: fx.Graph = inserter.graph
        self.site = form.site
        self._inserter, self._edit, self._form, self._layer = inserter, edit, form, layer
        self._reads: dict[str, fx.Node] = {}
        self._members: dict[str, PassMember] = {}
        self._tensors: dict[str, fx.Node] = {}
        self._replacements: list[Replacement] = []
        self._reads_layer = False
        self._touched: set[fx.Node] = set()  # nodes whose operands are replaced states

    def __repr__(self) -> str:
        return f"Region(site={self.site!r}, states={list(self.states)})"

    # States ---------------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the layer's hidden states, as in `peftc.trace`: `ffn.h`, `attn.self.q.h`."""
        return tuple(self._edit.states)

    def __getitem__(self, name: str) -> fx.Node:
        """The node of a hidden state, after what acts before it.

        `node.meta["example"]` is a tensor without data, of its shape and dtype.

        Raises:
            PeftcError: P207 (no state of that name, or several), P403 (not in this call).
        """
        name = self._name(name)
        if name not in self._reads:
            self._reads[name] = node = StateAccess(self._inserter, self._edit, name).read(name)
            if "example" not in node.meta:  # a part of a value
                form = self._form if self._form.members else completed(self._form, self)
                values = NodeValues(self._inserter.trace, self._place, form)
                values.evaluate(self.graph, without_example(node))
        return self._reads[name]

    def replace(self, name: str, value: fx.Node, *, detached: bool = False) -> None:
        """Lets the layer compute with `value` where it had the state.

        Nodes of this pass that read the state keep what they read. An `x`, `c` or `res` is replaced
        for what reads it by this name, and stays for others.

        Args:
            name: of a state.
            value: a node of the same shape, which is cast to the dtype of the state.
            detached: allows a value through which no state of the layer gets a gradient.

        Raises:
            PeftcError: as `region[name]`; P440 (no node of this graph), P445 (several features of a
                larger value, which only some code reads).
        """
        name = self._name(name)
        if not isinstance(value, fx.Node) or value.graph is not self.graph:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self._refusal(f"`{name}` is replaced by {value!r}, which is no node of this graph")
        before = self[name]
        self._replacements.append(Replacement(name, before, value, detached))
        codes = {node: code(node) for node in self.graph.nodes}
        StateAccess(self._inserter, self._edit, name).write(value, bool(self._form.members or self._members))
        self._touched |= {node for node, before in codes.items() if code(node) != before}
        self._reads.pop(name)

    def width(self, name: str) -> int:
        """The number of features of a hidden state."""
        return int(self[name].meta["example"].shape[-1])

    def _name(self, name: str) -> str:
        matches = [key for key in self.states if key == name] or [k for k in self.states if k.endswith(f".{name}")]
        if len(matches) == 1:
            return matches[0]
        if matches:
            notes = (f"it could be {join_names(matches)}",)
            raise PeftcError(Diagnostic("P207", f"`{name}` is the name of {len(matches)} states", notes=notes))
        close = nearest(name, self.states)
        help_ = f"did you mean {join_names(close)}?" if close else None
        raise PeftcError(Diagnostic("P207", f"the layer has no state `{name}`", help=help_))

    # The place ------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The path of the site in the model, such as `encoder.layer[3].ffn`.

        A pass that reads it runs for each layer; others run once for layers that are alike.
        """
        return f"{self._layer_path()}.{self.site}".strip(".")

    @property
    def layer(self) -> int:
        """The number of the layer in its stack. A pass that reads it runs for each layer."""
        return int(self._layer_path().rpartition("[")[2].rstrip("]"))

    # Members --------------------------------------------------------------------------------------

    def parameter(self, name: str, shape: Sequence[int] | Tensor, init: Initial = 0.0) -> fx.Node:
        """A trained parameter of the site, saved under `<pass>/<site>/<pass>.<name>`.

        Args:
            name: of the parameter.
            shape: its sizes; or a tensor, whose sizes and values it has at every site.
            init: a number; a distribution as in equations ("kaiming", ("normal", 0.02)); a tensor;
                or a function that fills one, such as `nn.init.xavier_uniform_`. It is drawn once
                for each site, from the seed of the pass.
        """
        return self._tensor("parameter", name, shape, init)

    def buffer(self, name: str, shape: Sequence[int] | Tensor, init: Initial = 0.0) -> fx.Node:
        """As `parameter`, of a tensor that is saved and not trained."""
        return self._tensor("buffer", name, shape, init)

    def module(self, name: str, make: Callable[[], nn.Module] | nn.Module) -> str:
        """A module of the site, of the dtype and the device of the layer; its target in the graph.

        Args:
            name: of the module.
            make: makes it, once for each site, after `torch.manual_seed` for this site; or a module
                that is copied for each site.
        """
        trained = stored = 0
        if name not in self._members:
            module = self._checked_module(name, make)
            trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
            stored = sum(t.numel() for t in module.state_dict().values() if t.is_floating_point())
        self._add(PassMember(name, "module", make, (), trained, stored))
        return f"{self._place}.{name}"

    def call(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node behind its last operand.

        Args:
            target: a function, or what `module` returns.
            args: nodes and constants.
            kwargs: nodes and constants.
        """
        operands = nodes_in((args, kwargs))
        with self.graph.inserting_after(self._last(operands)):
            if isinstance(target, str):
                return self.graph.call_module(target, args, kwargs)
            return self.graph.call_function(target, args, kwargs)

    # Inside ---------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"{self._edit.place}.{self._form.name}"

    def _layer_path(self) -> str:
        if not self._layer:  # all layers that are alike share this run
            message = f"the pass `{self._form.name}` reads its place, and its first run did not"
            raise PeftcError(Diagnostic("P444", message, help="read `region.path` in each run"))
        self._reads_layer = True
        return self._layer

    def _last(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The last of some nodes, and at least the last argument."""
        last = next(iter(self.graph.nodes))
        for node in nodes:
            last = node if last < node else last
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        return last

    def _tensor(
        self, kind: Literal["parameter", "buffer"], name: str, shape: Sequence[int] | Tensor, init: Initial
    ) -> fx.Node:
        if isinstance(shape, Tensor):
            shape, init = shape.shape, shape
        sizes = tuple(map(int, shape))
        if any(size < 0 for size in sizes):
            raise self._refusal(f"`{name}` has the sizes {list(sizes)}", "sizes are whole numbers of at least 0")
        if isinstance(init, Tensor) and init.shape != sizes:
            message = f"`{name}` has the sizes {list(sizes)}, and its first values {list(init.shape)}"
            raise self._refusal(message, f"write `region.{kind}({name!r}, values)`")
        self._add(PassMember.tensor(kind, name, sizes, init))
        if name not in self._tensors:
            with self.graph.inserting_after(self._last(())):
                self._tensors[name] = self.graph.get_attr(f"{self._place}.{name}")
        return self._tensors[name]

    def _add(self, member: PassMember) -> None:
        name = member.name
        if not name.isidentifier() or keyword.iskeyword(name) or hasattr(_PLAIN, name) or name in RESERVED:
            raise self._refusal(f"`{name}` is no name of a parameter or a module", "give it another name")
        present = self._members.setdefault(name, member)
        if present.declaration != member.declaration:
            raise self._refusal(f"`{name}` is a {present.kind} of {list(present.shape)} already")

    def _checked_module(self, name: str, make: object) -> nn.Module:
        module = make() if callable(make) and not isinstance(make, nn.Module) else make
        if not isinstance(module, nn.Module):
            raise self._refusal(f"`{name}` is made by {make!r}, which gives no module")
        return module

    def _refusal(self, message: str, help_: str | None = None) -> PeftcError:
        return PeftcError(Diagnostic("P440", f"`{self._form.name}`: {message}", help=help_))


RESERVED = frozenset({"definition", "scopes", "form_args", "form_dims", "owner_module", "index", "task"})


def completed(form: PassForm, region: Region) -> PassForm:
    """The form of a pass after a run that has shown its members."""
    layer = region._layer if region._reads_layer else ""  # pyright: ignore[reportPrivateUsage]
    names = dict.fromkeys(r.name for r in region._replacements)  # pyright: ignore[reportPrivateUsage]
    return form.with_run(tuple(region._members.values()), tuple(names), layer)  # pyright: ignore[reportPrivateUsage]


def code(node: fx.Node) -> object:
    """What a node computes of its operands."""
    return node.op, node.target, node.args, node.kwargs
