"""Reads and replaces the states of a layer for a pass, as equations do."""

from __future__ import annotations

from typing import Any

from torch import fx

from peftc.dataflow.nodes import is_edit
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.functions import cast_like
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor, operations, products
from peftc.rewriting.edits import RegionEdit, RegionState
from peftc.rewriting.insert import EquationInserter, Inserter

OPERANDS = ("x", "c", "res")  # states that are what some code reads


class StateAccess(EquationInserter):
    """One state of a layer, in place of an equation of it."""

    def __init__(self, inserter: Inserter, edit: RegionEdit, name: str) -> None:
        first = edit.assigns[0]
        super().__init__(inserter, edit, ir.Assign(name, first.value, first.source), {}, ())
        self.comment = comment_of(edit)
        self.new: fx.Node | None = None
        self.casts = False

    def write(self, new: fx.Node, casts: bool) -> None:
        """Replaces the state. `casts`: whether the value may have another dtype."""
        self.new, self.casts = new, casts
        name, state = self.assign.state, self.edit.states[self.assign.state]
        if name.rpartition(".")[2] in OPERANDS and state.definitions:
            self.write_operand(state)
        else:
            self.insert()

    def value(self) -> Any:
        assert self.new is not None
        self.move_after(self.new)
        # What passes and edits have read of the state stays as it was.
        self.nodes += [node for node in self.graph.nodes if is_new(node) or is_edit(node)]
        like = self.read(self.assign.state)
        return self.function(cast_like, self.new, like) if self.casts else self.new

    def term(self, term: ir.Term) -> Any:
        return self.value() if term is self.assign.value else super().term(term)

    def write_operand(self, state: RegionState) -> None:
        """Replaces what the readers of a state read. Raises: P445."""
        lookup = self.inserter.lookup
        node = self.inserter.latest(lookup.node_of(state, self.assign.state))
        readers = [reader for anchor in state.definitions for reader in self.readers(anchor, node)]
        plain = state.rows is None and state.dims is None and not state.image
        if not plain or not readers:
            message = f"`{self.assign.state}` cannot be replaced alone: other code reads the same value"
            raise PeftcError(Diagnostic("P445", message, help="replace the `h` of what reads it"))
        self.start_after(node)
        new = self.value()
        for reader in dict.fromkeys(readers):
            reader.replace_input_with(node, new)
        for other, nodes in lookup.nodes.items():  # later edits read what is there now
            if set(other.definitions) & set(state.definitions) and nodes == [node]:
                lookup.nodes[other] = [new]

    def readers(self, anchor: Anchor, node: fx.Node) -> list[fx.Node]:
        trace = self.inserter.trace
        if anchor.kind == "product":
            every = [product.node for product, _ in products(anchor, trace)]
        elif anchor.kind == "operand":
            nodes = operations(anchor.module, anchor.key[0], trace)
            index = anchor.key[1].find_in([n.meta["origin"][2] for n in nodes])
            every = [] if index is None else [nodes[index]]
        else:
            every = [n for n in node.users if n.op == "call_module" and n.target == anchor.module]
        return [reader for reader in every if node in reader.all_input_nodes]


def comment_of(edit: RegionEdit) -> str:
    return f"pass {edit.edit}"


def is_new(node: fx.Node) -> bool:
    """Whether the pass that runs has added a node."""
    return "origin" not in node.meta and node.op not in ("placeholder", "output")
