"""Places for a panel's nodes and curves for its edges, by Graphviz."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.pictures.graph import Content, Edge, Node, Panel
from peftc.pictures.labels import count_text, wrapped

SMALL, MEDIUM = 13, 14  # of letters, in pixels
MONOSPACE = 0.602  # of the size: the width of a letter of a monospaced font
SANS = 0.60  # more than the mean of a proportional font
LINE = 17  # pixels from line to line
EQUATION = 26  # characters of a line of an equation
SIZES = {"point": (6, 6), "join": (22, 22)}  # of what has no text beside itself
WEIGHTS = {"spine": 40, "skip": 2, "flow": 12, "change": 1, "weight": 1, "order": 0}  # how straight an edge is
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """The middle and the size of what is drawn, in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def top(self) -> float:
        return self.y - self.height / 2


@dataclass(frozen=True)
class Layout:
    """Where everything of a panel is: nodes and frames by id, edges in order."""

    width: float
    height: float
    nodes: dict[str, Box]
    frames: dict[str, Box]
    curves: tuple[tuple[Point, ...], ...]  # start and Bézier points
    labels: tuple[Box | None, ...]


def require_library() -> Any:
    """The module pygraphviz. Raises: P590 if it is not installed."""
    try:
        return import_module("pygraphviz")
    except ImportError as error:
        message = f"a picture needs pygraphviz, which lays it out: {error}"
        help_ = 'install it with `pip install "peftc[show]"`; `.md` and `.dot` need no layout'
        raise PeftcError(Diagnostic("P590", message, help=help_)) from error


def label_lines(edge: Edge, layers: int) -> tuple[str, ...]:
    """What is written at an arrow: the equation, the stored count, and whether it folds."""
    if edge.change is None or not edge.label:
        return ()
    count = count_text(edge.change, layers)
    text = edge.change.short if edge.change.equation else ""
    return tuple(line for line in (*wrapped(text, EQUATION), count) if line)


def width_of(text: str, size: int, mono: bool) -> float:
    return len(text) * size * (MONOSPACE if mono else SANS)


def size_of(node: Node) -> tuple[int, int]:
    """Width and height of a node with its text, in pixels."""
    if node.kind in SIZES:
        width, height = SIZES[node.kind]
        return width, 20 if node.kind == "point" and node.frame else height  # room for the border
    if node.kind == "edit":
        widths = [width_of(line, MEDIUM if i == 0 else SMALL, i > 0) for i, line in enumerate(node.lines)]
        return _even(max(widths) + 18), LINE * len(node.lines) + 10
    width = max(width_of(line, MEDIUM, node.kind == "gate") for line in node.lines)
    if node.kind == "stream":
        return _even(width + 8), 20
    return (_even(width + 14), 24) if node.kind in ("norm", "gate") else (_even(max(width + 20, 44)), 30)


def label_size(lines: tuple[str, ...]) -> tuple[int, int]:
    return _even(max(width_of(line, SMALL, True) for line in lines) + 10), LINE * len(lines) + 2


def _even(width: float) -> int:
    return 2 * round(width / 2)


@lru_cache(maxsize=64)
def layout_of(panel: Panel) -> Layout:
    """The places of a panel. Frames are around what the edges have put side by side; Graphviz keeps
    others out where that does not, at the price of a stream that is less straight.

    Raises: P590 without pygraphviz.
    """
    layout = _graphviz_layout(panel, _dot(panel, clusters=False))
    return _graphviz_layout(panel, _dot(panel, clusters=True)) if _crowded(panel.content, layout) else layout


def _graphviz_layout(panel: Panel, dot: str) -> Layout:
    content, graph = panel.content, require_library().AGraph(string=dot)
    graph.layout(prog="dot")

    def point(text: str) -> Point:
        x, y = map(float, text.split(","))
        return x, -y

    nodes = {one.id: Box(*point(graph.get_node(one.id).attr["pos"]), *size_of(one)) for one in content.nodes}
    points = {one.id: nodes[one.id] for one in content.nodes if one.kind == "point"}
    curves: list[tuple[Point, ...]] = []
    labels: list[Box | None] = []
    for i, edge in enumerate(content.edges):
        drawn = graph.get_edge(edge.source, edge.target, key=str(i))
        curves.append(_to_points(_curve(drawn.attr["pos"], point), edge, points))
        lines = label_lines(edge, panel.count)
        labels.append(Box(*point(drawn.attr["lp"]), *label_size(lines)) if lines else None)
    frames = _frames(content, nodes, labels)
    return _at_origin(Layout(0, 0, nodes, frames, tuple(curves), tuple(labels)))


def _frames(content: Content, nodes: dict[str, Box], labels: Sequence[Box | None]) -> dict[str, Box]:
    """The frames around what is in them, from the inside to the outside."""
    homes = {node.id: node.frame for node in content.nodes}
    inside: dict[str, list[Box]] = {one.id: [] for one in content.frames}
    for id, home in homes.items():
        inside.setdefault(home, []).append(nodes[id])
    for edge, label in zip(content.edges, labels, strict=True):
        if label is not None:
            inside[homes[edge.source]].append(label)
    frames: dict[str, Box] = {}
    for one in reversed(content.frames):
        around = _around(inside[one.id])
        bottom = 6
        width = max(around.width + 16, width_of(one.name, MEDIUM, False) + 16)
        left = around.left - 8
        frames[one.id] = Box(left + width / 2, around.y + bottom / 2 - 1, width, around.height + 10 + bottom)
        inside[one.parent].append(frames[one.id])
    return frames


def _around(boxes: Sequence[Box]) -> Box:
    left, right = min(box.left for box in boxes), max(box.left + box.width for box in boxes)
    top, bottom = min(box.top for box in boxes), max(box.top + box.height for box in boxes)
    return Box((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)


def _crowded(content: Content, layout: Layout) -> bool:
    """Whether something is in a frame, or in its way, that does not belong there."""
    parents = {one.id: one.parent for one in content.frames}

    def within(home: str, frame: str) -> bool:
        return home == frame or (home != "" and within(parents[home], frame))

    homes = {node.id: node.frame for node in content.nodes}
    boxes = [(homes[id], box) for id, box in layout.nodes.items()]
    boxes += [(homes[e.source], box) for e, box in zip(content.edges, layout.labels, strict=True) if box is not None]
    spines = [curve for edge, curve in zip(content.edges, layout.curves, strict=True) if edge.kind == "spine"]
    boxes += [("", Box(x, y, 6, 6)) for curve in spines for x, y in curve]
    strange = any(
        _overlap(box, frame) and not within(home, id) for id, frame in layout.frames.items() for home, box in boxes
    )
    frames = list(layout.frames.items())
    return strange or any(
        _overlap(frame, other) and not within(id, name) and not within(name, id)
        for id, frame in frames
        for name, other in frames
    )


def _overlap(one: Box, other: Box) -> bool:
    wide = abs(one.x - other.x) < (one.width + other.width) / 2
    return wide and abs(one.y - other.y) < (one.height + other.height) / 2


def _at_origin(layout: Layout) -> Layout:
    """The same with the upper left corner at (0, 0)."""
    points = [Box(x, y, 2, 2) for curve in layout.curves for x, y in curve]
    labels = [label for label in layout.labels if label is not None]
    all_around = _around([*layout.nodes.values(), *layout.frames.values(), *points, *labels])
    dx, dy = -all_around.left, -all_around.top

    def moved(box: Box) -> Box:
        return Box(box.x + dx, box.y + dy, box.width, box.height)

    return Layout(
        all_around.width,
        all_around.height,
        {id: moved(box) for id, box in layout.nodes.items()},
        {id: moved(box) for id, box in layout.frames.items()},
        tuple(tuple((x + dx, y + dy) for x, y in curve) for curve in layout.curves),
        tuple(None if label is None else moved(label) for label in layout.labels),
    )


def _curve(text: str, point: Callable[[str], Point]) -> tuple[Point, ...]:
    """The points of `pos`: the end of an arrow comes first there."""
    parts = text.replace("\\\n", "").split()
    end = [point(part[2:]) for part in parts if part.startswith("e,")]
    return (*(point(part) for part in parts if not part.startswith(("e,", "s,"))), *end)


def _to_points(curve: tuple[Point, ...], edge: Edge, points: Mapping[str, Box]) -> tuple[Point, ...]:
    """A curve that begins and ends in the middle of dots, which have room around them."""
    if (start := points.get(edge.source)) is not None:
        curve = ((start.x, start.y), *curve[1:])
    if (end := points.get(edge.target)) is not None and not edge.heads:
        curve = (*curve[:-1], (end.x, end.y))
    return curve


def _dot(panel: Panel, clusters: bool) -> str:
    """The graph without texts: numbers for names, boxes of fixed sizes."""
    content = panel.content
    graph = "rankdir=BT newrank=true nodesep=0.3 ranksep=0.24 splines=spline"
    lines = [
        "digraph {",
        f"graph [{graph}{'' if clusters else ' ordering=out'}]",
        'node [shape=box fixedsize=true label=""]',
        "edge [arrowsize=0.6]",
    ]
    on_spine = {end for edge in content.edges if edge.kind == "spine" for end in (edge.source, edge.target)}
    for node in content.nodes:
        width, height = size_of(node)
        group = " group=spine" if node.id in on_spine else ""
        shape = " shape=circle" if width == height else ""
        lines.append(f"{node.id} [width={width / 72:.4f} height={height / 72:.4f}{group}{shape}]")
    for i, edge in enumerate(content.edges):
        own = edge.change is not None and edge.change.insertion == "sequential"
        options = [f"key={i}", f"weight={WEIGHTS['flow' if own and edge.kind == 'change' else edge.kind]}"]
        if texts := label_lines(edge, panel.count):
            options.append(f"label={_blank(*label_size(texts))}")
        if not edge.heads:
            options.append("arrowhead=none")
        lines.append(f"{edge.source} -> {edge.target} [{' '.join(options)}]")
    return "\n".join([*lines, *(_cluster(content, "") if clusters else ()), "}"])


def _cluster(content: Content, parent: str) -> Iterator[str]:
    for one in content.frames:
        if one.parent == parent:
            own = (node.id for node in content.nodes if node.frame == one.id)
            yield f"subgraph cluster_{one.id} {{ graph [margin=14]"
            yield from own
            yield from _cluster(content, one.id)
            yield "}"


def _blank(width: int, height: int) -> str:
    """A label of a size."""
    table = f'<TABLE BORDER="0" FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}"><TR><TD></TD></TR></TABLE>'
    return f"<{table}>"
