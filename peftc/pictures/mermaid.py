"""A diagram as Markdown, with a flowchart of Mermaid for each panel."""

from __future__ import annotations

import re
from collections.abc import Iterator

from peftc.pictures.graph import Content, Diagram, Edge, Node, Panel
from peftc.pictures.layout import label_lines
from peftc.pictures.svg import LIGHT

SHAPES = {
    "stream": ("((", "))"),
    "point": ("((", "))"),
    "join": ("((", "))"),
    "norm": ("([", "])"),
    "gate": ("([", "])"),
    "stack": ("[[", "]]"),
}


def to_markdown(diagram: Diagram) -> str:
    """A page: a flowchart for each panel, and a table of the edits."""
    parts = [f"# {markdown(diagram.title)}", ""]
    for panel in diagram.panels:
        parts += [f"## {markdown(panel.title)}", "", "```mermaid", *_flowchart(diagram, panel), "```", ""]
    if diagram.edits:
        parts += ["| edit | equation | sites | stored | folds |", "|---|---|---|---|---|"]
        for one in diagram.edits:
            equations = "<br>".join(map(markdown, one.equations))
            folds = markdown(f"{'yes' if one.folds else 'no'}: {one.reason}")
            parts.append(f"| {markdown(one.name)} | {equations} | {one.sites} | {one.stored:,} | {folds} |")
        parts.append("")
    return "\n".join(parts)


def markdown(text: str) -> str:
    """Text of which no character means anything to Markdown or HTML."""
    return re.sub(r"[^\w ,.:()=+-]|_", lambda match: f"&#{ord(match[0])};", re.sub(r"\s", " ", text))


def quoted(text: str) -> str:
    """Text in a flowchart, between quotation marks."""
    return '"' + re.sub(r"[^\w ,.:=×·+‖Σα÷…-]", lambda match: f"#{ord(match[0])};", re.sub(r"\s", " ", text)) + '"'


def _flowchart(diagram: Diagram, panel: Panel) -> Iterator[str]:
    content = panel.content
    yield "flowchart BT"
    title = re.sub(r"[^\w .,×-]", " ", panel.title)
    yield f"  accTitle: {title}"
    yield from _nodes(content, "")
    styles: list[tuple[int, str]] = []
    for i, edge in enumerate(content.arrows):
        yield "  " + _edge(edge, panel.count)
        if edge.change is not None:
            styles.append((i, LIGHT[diagram.color(edge.change.edit)]))
    for edit in dict.fromkeys(change.edit for change in content.changes):
        color = LIGHT[diagram.color(edit)]
        dashes = ",stroke-dasharray:5 4" if next(c for c in content.changes if c.edit == edit).folds else ""
        yield f"  classDef e{_number(diagram, edit)} stroke:{color},stroke-width:2px,fill:{color}22{dashes}"
        own = [node.id for node in content.nodes if node.change is not None and node.change.edit == edit]
        yield f"  class {','.join(own)} e{_number(diagram, edit)}"
    for color in dict.fromkeys(color for _, color in styles):
        yield f"  linkStyle {','.join(str(i) for i, own in styles if own == color)} stroke:{color}"


def _number(diagram: Diagram, edit: str) -> int:
    return [one.name for one in diagram.edits].index(edit)


def _nodes(content: Content, frame: str, indent: str = "  ") -> Iterator[str]:
    for node in content.nodes:
        if node.frame == frame:
            yield indent + _node(node)
    for one in content.frames:
        if one.parent == frame:
            yield f"{indent}subgraph {one.id} [{quoted(one.name)}]"
            yield from _nodes(content, one.id, indent + "  ")
            yield f"{indent}end"


def _node(node: Node) -> str:
    before, behind = SHAPES.get(node.kind, ("[", "]"))
    lines = "<br>".join(quoted(line)[1:-1] for line in node.lines) or " "
    return f'{node.id}{before}"{lines}"{behind}'


def _edge(edge: Edge, layers: int) -> str:
    lines = "<br>".join(quoted(line)[1:-1] for line in label_lines(edge, layers))
    if edge.kind == "spine":
        arrow = "==>"
    elif edge.change is not None and edge.change.folds:
        arrow = "-.->"
    else:
        arrow = "-->" if edge.heads else "---"
    label = f'|"{lines}"|' if lines else ""
    return f"{edge.source} {arrow}{label} {edge.target}"
