"""A diagram as a graph of Graphviz, to lay out and to change with its programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from peftc.pictures.graph import Content, Diagram, Edge, Node, Panel
from peftc.pictures.layout import label_lines
from peftc.pictures.svg import LIGHT

SHAPES = {"stream": "plaintext", "point": "point", "join": "circle"}


def to_dot(diagram: Diagram) -> str:
    """A directed graph with a cluster for each panel; below it the edits with their counts."""
    lines = ["digraph peftc {"]
    legend = (
        f"{one.name}: {'; '.join(one.equations)}: {one.stored:,} stored, {one.sites} sites" for one in diagram.edits
    )
    label = "\n".join([diagram.title, *legend])
    lines.append(f"  graph [rankdir=BT newrank=true fontname=Helvetica labeljust=l label={quoted(label, left=True)}]")
    lines.append("  node [shape=box style=rounded fontname=Helvetica]")
    lines.append("  edge [fontname=Courier fontsize=11]")
    for i, panel in enumerate(diagram.panels):
        lines += [f"  subgraph cluster_p{i} {{", f"    graph [label={quoted(panel.title)}]"]
        lines += _nodes(diagram, panel.content, f"p{i}", "")
        lines += [f"    {_edge(diagram, edge, panel, f'p{i}')}" for edge in panel.content.edges]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def quoted(text: str, left: bool = False) -> str:
    """A string of the language of Graphviz; `left`: its lines begin on the left."""
    line_end = "\\l" if left else "\\n"
    escaped = re.sub(r"[\x00-\x09\x0b-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", line_end) + (line_end if left else "") + '"'


def attributes(values: Mapping[str, object]) -> str:
    return "[" + " ".join(f"{name}={quoted(str(value))}" for name, value in values.items()) + "]"


def _nodes(diagram: Diagram, content: Content, panel: str, frame: str) -> Iterator[str]:
    for node in content.nodes:
        if node.frame == frame:
            yield f"    {panel}{node.id} {attributes(_looks(diagram, node))}"
    for one in content.frames:
        if one.parent == frame:
            yield f"    subgraph cluster_{panel}{one.id} {{"
            yield f"    graph [style=rounded label={quoted(one.name)}]"
            yield from _nodes(diagram, content, panel, one.id)
            yield "    }"


def _looks(diagram: Diagram, node: Node) -> dict[str, object]:
    looks: dict[str, object] = {"label": "\n".join(node.lines)}
    if node.kind in SHAPES:
        looks["shape"] = SHAPES[node.kind]
    if node.title:
        looks["tooltip"] = node.title
    if node.change is not None:
        color = LIGHT[diagram.color(node.change.edit)]
        looks |= {"color": color, "fillcolor": f"{color}22", "penwidth": 2}
        looks["style"] = "rounded,filled" + (",dashed" if node.change.folds else "")
    return looks


def _edge(diagram: Diagram, edge: Edge, panel: Panel, prefix: str) -> str:
    looks: dict[str, object] = {}
    if lines := label_lines(edge, panel.count):
        looks["label"] = "\n".join(lines)
    if edge.change is not None:
        looks["color"] = LIGHT[diagram.color(edge.change.edit)]
        if edge.change.folds:
            looks["style"] = "dashed"
    if edge.kind == "order":
        looks["style"] = "invis"
    if edge.kind == "spine":
        looks |= {"penwidth": 3, "weight": 40}
    if not edge.heads:
        looks["arrowhead"] = "none"
    return f"{prefix}{edge.source} -> {prefix}{edge.target} {attributes(looks)}"
