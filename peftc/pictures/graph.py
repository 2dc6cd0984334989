"""A picture before it has places: one layer of each kind as nodes, edges and frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

NodeKind = Literal["stream", "point", "box", "stack", "norm", "join", "edit", "gate"]
EdgeKind = Literal["spine", "skip", "flow", "change", "weight", "order"]  # `order` is not drawn
Insertion = Literal["sequential", "parallel", "weight", "scaling", "tokens"]


@dataclass(frozen=True)
class Change:
    """What one equation of an edit does at one place of a layer.

    Attributes:
        edit: the name of the edit, or of the `train` statement.
        equation: as the spec has it, with the arguments of forms.
        short: the equation, with the inputs of forms alone.
        insertion: `sequential` if what is added reads the state that it is added to.
        stored: parameters in the saved adapter, at one site; of `shared`, of the whole edit.
        sites: of one layer.
        shared: whether several sites share the parameters.
        folds: whether the edit folds into the weights.
        state: what is written.
        paths: of the sites, relative to the layer.
    """

    edit: str
    equation: str
    short: str
    insertion: Insertion
    stored: int
    sites: int
    shared: bool
    folds: bool
    state: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A box, a joint or a dot. `lines`: what is written in it.

    Attributes:
        id: unique in its panel.
        frame: the id of the frame that it is in; "" for none.
        change: of a node that is added.
        title: more than fits, such as the path and the module of a site.
    """

    id: str
    kind: NodeKind
    lines: tuple[str, ...] = ()
    frame: str = ""
    change: Change | None = None
    title: str = ""


@dataclass(frozen=True)
class Edge:
    """An arrow. `label`: whether it bears the equation and the stored count of its change."""

    source: str
    target: str
    kind: EdgeKind = "flow"
    change: Change | None = None
    label: bool = False
    heads: bool = True  # an arrow head at the target


@dataclass(frozen=True)
class Frame:
    """A frame around nodes: a sub-layer, or the experts of one. `parent`: the frame around it."""

    id: str
    name: str
    parent: str = ""
    stacked: bool = False
    title: str = ""


@dataclass(frozen=True)
class Content:
    """What is drawn of a layer; equal for layers that look alike."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    frames: tuple[Frame, ...] = ()

    @property
    def arrows(self) -> tuple[Edge, ...]:
        """The edges that are drawn."""
        return tuple(edge for edge in self.edges if edge.kind != "order")

    @property
    def changes(self) -> tuple[Change, ...]:
        """What is added, in order."""
        return tuple(dict.fromkeys(node.change for node in self.nodes if node.kind == "edit" and node.change))


@dataclass(frozen=True)
class Panel:
    """One layer for all that look like it.

    Attributes:
        name: of the layers: `encoder.layer[0..11]`.
        count: how many there are; 0 for what is outside of layers.
    """

    name: str
    count: int
    content: Content

    @property
    def title(self) -> str:
        return f"{self.name} × {self.count}" if self.count > 1 else self.name


@dataclass(frozen=True)
class EditFacts:
    """An edit in the legend; all but `equations` and `at` as in `PlanEdit`."""

    name: str
    equations: tuple[str, ...]
    at: str
    sites: int
    stored: int
    folds: bool
    reason: str
    identity: bool


@dataclass(frozen=True)
class Diagram:
    """Everything that a picture shows, in the order in which it is shown."""

    title: str
    description: str
    panels: tuple[Panel, ...]
    edits: tuple[EditFacts, ...]
    stored: int
    base: int
    warnings: tuple[str, ...] = ()

    def color(self, edit: str) -> int:
        """The number of the colour of an edit."""
        return [one.name for one in self.edits].index(edit) % COLORS


COLORS = 8


@dataclass
class Builder:
    """Nodes, edges and frames in the order in which they are added."""

    nodes: list[Node] = field(default_factory=list[Node])
    edges: list[Edge] = field(default_factory=list[Edge])
    frames: list[Frame] = field(default_factory=list[Frame])

    def add(
        self,
        kind: NodeKind,
        *lines: str,
        frame: str = "",
        change: Change | None = None,
        title: str = "",
    ) -> str:
        """Adds a node; its id."""
        node = Node(f"n{len(self.nodes)}", kind, lines, frame, change, title)
        self.nodes.append(node)
        return node.id

    def frame(self, name: str, parent: str = "", stacked: bool = False, title: str = "") -> str:
        frame = Frame(f"f{len(self.frames)}", name, parent, stacked, title)
        self.frames.append(frame)
        return frame.id

    def content(self) -> Content:
        return Content(tuple(self.nodes), tuple(self.edges), tuple(self.frames))
