"""A diagram as SVG: panels, and below them the edits with their counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peftc.diagnostics.markup import clean
from peftc.pictures.graph import COLORS, Diagram, Edge, EditFacts, Frame, Node, Panel
from peftc.pictures.labels import wrapped
from peftc.pictures.layout import LINE, MEDIUM, SMALL, Box, Layout, Point, label_lines, layout_of, width_of

ID = "peftc"
GAP, MARGIN, TITLE = 28, 14, 30
WIDEST_ROW = 560  # pixels: letters of 13 have 9 where a screen has 400
NARROWEST = 400
ARROW = 7
LIGHT = ("#1d4ed8", "#b45309", "#047857", "#be185d", "#6d28d9", "#0e7490", "#b91c1c", "#4d7c0f")
DARK = ("#93c5fd", "#fcd34d", "#6ee7b7", "#f9a8d4", "#c4b5fd", "#67e8f9", "#fca5a5", "#bef264")
assert len(LIGHT) == len(DARK) == COLORS


def style(scope: str = "") -> str:
    """The style sheet. `scope`: what stands before each selector."""
    light = "--ink:#1f2937;--soft:#6b7280;--line:#4b5563;--box:#f3f4f6;--paper:#ffffff;"
    dark = "--ink:#e5e7eb;--soft:#9ca3af;--line:#9ca3af;--box:#1f2937;--paper:#0d1117;"
    light += "".join(f"--c{i}:{color};" for i, color in enumerate(LIGHT))
    dark += "".join(f"--c{i}:{color};" for i, color in enumerate(DARK))
    colors = "".join(f".e{i}{{--own:var(--c{i})}}" for i in range(COLORS))
    return (
        f".peftc{{{light}}}@media (prefers-color-scheme:dark){{.peftc{{{dark}}}}}"
        ".peftc .paper{fill:var(--paper)}"
        f".peftc text{{fill:var(--ink);font:{MEDIUM}px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}}"
        ".peftc .mid{text-anchor:middle}"
        f".peftc .mono{{font:{SMALL}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}}"
        ".peftc .head{font-weight:600}.peftc .soft{fill:var(--soft)}"
        ".peftc .box,.peftc .norm{fill:var(--box);stroke:var(--line);stroke-width:1.2}"
        ".peftc .frame{fill:none;stroke:var(--soft);stroke-width:1}"
        ".peftc .point{fill:var(--line)}.peftc .join{fill:var(--paper);stroke:var(--line);stroke-width:1.2}"
        ".peftc .edge{fill:none;stroke:var(--line);stroke-width:1.3}.peftc .tip{fill:var(--line)}"
        ".peftc .spine{stroke:var(--ink);stroke-width:2.6}.peftc .spine.tip{fill:var(--ink);stroke:none}"
        + colors.replace(".e", ".peftc .e")
        + ".peftc .edit .card{fill:var(--own);fill-opacity:.13;stroke:var(--own);stroke-width:1.6}"
        ".peftc .edit .edge{stroke:var(--own);stroke-width:1.8}.peftc .edit .tip{fill:var(--own)}"
        ".peftc .edit .join{stroke:var(--own);stroke-width:1.6}.peftc .edit .count,.peftc .edit .name{fill:var(--own)}"
        ".peftc .folds .card,.peftc .folds .edge,.peftc .folds .join{stroke-dasharray:5 3.5}"
        ".peftc .chip{stroke-width:2.4}"
    )


def number(value: float) -> str:
    return f"{value + 0.0:.1f}".removesuffix(".0").replace("-0.0", "0")


def text(x: float, y: float, content: str, classes: str) -> str:
    return f'<text x="{number(x)}" y="{number(y)}" class="{classes}">{clean(content)}</text>'


def to_svg(diagram: Diagram, width: float = WIDEST_ROW, panels: Sequence[Panel] | None = None, id: str = ID) -> str:
    """An SVG document, for light and dark. `width`: of panels side by side, in pixels;
    `panels`: some of them, for a page that has the style sheet, under another `id`.

    Raises: P590 without pygraphviz.
    """
    shown, legend = (diagram.panels, True) if panels is None else (panels, False)
    title = diagram.title if panels is None else ", ".join(panel.title for panel in panels)
    about = diagram.description if panels is None else "; ".join(map(_summary_of, panels))
    layouts = [(panel, layout_of(panel)) for panel in shown]
    rows = _rows(layouts, width)
    widths = [sum(w for w, _ in map(_extent, row)) + GAP * (len(row) - 1) for row in rows]
    inner = max([NARROWEST - 2 * MARGIN if legend else 0, *widths])
    parts: list[str] = []
    y: float = MARGIN
    for row in rows:
        height = max(h for _, h in map(_extent, row))
        x: float = MARGIN
        for panel, layout in row:
            own, tall = _extent((panel, layout))
            parts.append(_panel(diagram, panel, layout, x, y + height - tall))
            x += own + GAP
        y += height + GAP
    if legend and diagram.edits:
        lines, y = _legend(diagram, y - GAP / 2, inner)
        parts += lines
    full, height = inner + 2 * MARGIN, y - GAP + MARGIN + (GAP if legend and diagram.edits else 0)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="peftc" viewBox="0 0 {number(full)} {number(height)}" '
        f'width="{number(full)}" role="img" aria-labelledby="{id}-title {id}-desc">'
        f'<title id="{id}-title">{clean(title)}</title><desc id="{id}-desc">{clean(about)}</desc>'
        + (f"<style>{style()}</style>" if id == ID else "")
        + f'<rect class="paper" width="{number(full)}" height="{number(height)}" rx="8"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _summary_of(panel: Panel) -> str:
    texts = [f"{one.edit} ({one.insertion}): {one.equation}" for one in panel.content.changes]
    return f"{panel.title}: " + ("; ".join(dict.fromkeys(texts)) or "no edits")


def _extent(one: tuple[Panel, Layout]) -> tuple[float, float]:
    panel, layout = one
    return max(layout.width, width_of(panel.title, MEDIUM, True)), layout.height + TITLE


def _rows(layouts: Sequence[tuple[Panel, Layout]], widest: float) -> list[list[tuple[Panel, Layout]]]:
    """Panels side by side as far as their letters stay legible on a small screen."""
    rows: list[list[tuple[Panel, Layout]]] = []
    width = 0.0
    for one in layouts:
        own = _extent(one)[0]
        if rows and width + GAP + own <= widest:
            rows[-1].append(one)
            width += GAP + own
        else:
            rows.append([one])
            width = own
    return rows


def _panel(diagram: Diagram, panel: Panel, layout: Layout, x: float, y: float) -> str:
    content = panel.content
    parts = [f'<g class="panel" data-layers="{panel.count}">', text(x, y + 14, panel.title, "mono head")]
    parts.append(f'<g transform="translate({number(x)} {number(y + TITLE)})">')
    parts += [_frame(one, layout.frames[one.id]) for one in content.frames]
    curves = zip(content.edges, layout.curves, strict=True)
    parts += [_edge(diagram, edge, curve) for edge, curve in curves if edge.kind != "order"]
    parts += [_node(diagram, one, layout.nodes[one.id]) for one in content.nodes]
    parts += [_label(diagram, panel, edge, box) for edge, box in zip(content.edges, layout.labels, strict=True) if box]
    return "\n".join([*parts, "</g></g>"])


def _classes(diagram: Diagram, edit: str, folds: bool) -> str:
    return f"edit e{diagram.color(edit)}" + (" folds" if folds else "")


def _frame(frame: Frame, box: Box) -> str:
    shadow = ""
    if frame.stacked:
        shadow = "".join(_rect(Box(box.x + d, box.y - d, box.width, box.height), "frame", 8) for d in (6, 3))
    label = text(box.left + 8, box.top + box.height - 7, frame.name, "soft")
    return f"<g><title>{clean(frame.title or frame.name)}</title>{shadow}{_rect(box, 'frame', 8)}{label}</g>"


def _rect(box: Box, classes: str, radius: float) -> str:
    return (
        f'<rect x="{number(box.left)}" y="{number(box.top)}" width="{number(box.width)}" '
        f'height="{number(box.height)}" rx="{number(radius)}" class="{classes}"/>'
    )


def _node(diagram: Diagram, node: Node, box: Box) -> str:
    classes = _classes(diagram, node.change.edit, node.change.folds) if node.change else "frozen"
    title = f"<title>{clean(node.title)}</title>" if node.title else ""
    data = ""
    if node.kind == "edit" and node.change:
        change = node.change
        data = (
            f' data-edit="{clean(change.edit)}" data-insertion="{change.insertion}" data-state="{change.state}"'
            f' data-stored="{change.stored}" data-sites="{change.sites}" data-shared="{str(change.shared).lower()}"'
        )
    return f'<g class="{classes}"{data}>{title}{_shape(node, box)}</g>'


def _shape(node: Node, box: Box) -> str:
    middle = box.y + 5
    match node.kind:
        case "point":
            return f'<circle cx="{number(box.x)}" cy="{number(box.y)}" r="3" class="point"/>'
        case "join":
            circle = f'<circle cx="{number(box.x)}" cy="{number(box.y)}" r="10" class="join"/>'
            return circle + text(box.x, middle, node.lines[0], "mid")
        case "stream":
            return text(box.x, middle, node.lines[0], "mono mid head")
        case "gate":
            return _rect(box, "card", box.height / 2) + text(box.x, middle, node.lines[0], "mono mid")
        case "edit":
            top = box.top + 18
            lines = [
                text(box.x, top + LINE * i, line, "mid head name" if i == 0 else "mono mid")
                for i, line in enumerate(node.lines)
            ]
            return _rect(box, "card", 6) + "".join(lines)
        case "stack":
            shadow = "".join(_rect(Box(box.x + d, box.y - d, box.width, box.height), "box", 5) for d in (6, 3))
            return shadow + _rect(box, "box", 5) + text(box.x, middle, node.lines[0], "mid")
        case _:
            return _rect(box, node.kind, 12 if node.kind == "norm" else 5) + text(box.x, middle, node.lines[0], "mid")


def _edge(diagram: Diagram, edge: Edge, points: Sequence[Point]) -> str:
    start, rest = points[0], points[1:]
    last = rest[-1]
    if edge.heads:  # the last point is the tip, the one before it the end of the curve
        rest = rest[:-1]
    curve = " ".join(f"{number(x)},{number(y)}" for x, y in rest)
    kind = " spine" if edge.kind == "spine" else ""
    path = f'<path d="M{number(start[0])},{number(start[1])} C{curve}" class="edge{kind}"/>'
    tip = _tip(rest[-1], last, kind) if edge.heads else ""
    if edge.change is None:
        return path + tip
    return f'<g class="{_classes(diagram, edge.change.edit, edge.change.folds)}">{path}{tip}</g>'


def _tip(base: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    dx, dy = end[0] - base[0], end[1] - base[1]
    length = (dx * dx + dy * dy) ** 0.5 or 1
    ux, uy = dx / length, dy / length
    bx, by = end[0] - ux * ARROW, end[1] - uy * ARROW
    half = ARROW * 0.45
    points = ((bx - uy * half, by + ux * half), (bx + uy * half, by - ux * half), end)
    return f'<path d="M{" L".join(f"{number(x)},{number(y)}" for x, y in points)} z" class="tip{kind}"/>'


def _label(diagram: Diagram, panel: Panel, edge: Edge, box: Box) -> str:
    assert edge.change is not None
    lines = label_lines(edge, panel.count)
    top, left = box.top + LINE - 4, box.left + 6
    equation = len(lines) - bool(edge.change.stored)
    texts = [
        text(left, top + LINE * i, line, "mono" if i < equation else "mono count head") for i, line in enumerate(lines)
    ]
    return f'<g class="{_classes(diagram, edge.change.edit, edge.change.folds)} label">{"".join(texts)}</g>'


def _legend(diagram: Diagram, y: float, inner: float) -> tuple[list[str], float]:
    """Each edit with its equation and counts. Returns: also where it ends."""
    width = int((inner - 34) / (SMALL * 0.602))
    parts = ['<g class="legend">']
    for one in diagram.edits:
        y += 12
        lines = [*(line for equation in one.equations for line in wrapped(equation, width)), *_summary(one, width)]
        parts.append(f'<g class="{_classes(diagram, one.name, one.folds)}" data-name="{clean(one.name)}">')
        parts.append(f'<rect x="{MARGIN}" y="{number(y)}" width="22" height="14" rx="4" class="card chip"/>')
        parts.append(text(MARGIN + 32, y + 12, one.name, "head name"))
        for line in lines:
            y += LINE
            parts.append(text(MARGIN + 32, y + 12, line, "mono"))
        parts.append("</g>")
        y += LINE
    parts.append("</g>")
    return parts, y


def _summary(one: EditFacts, width: int) -> Iterable[str]:
    sites = f"{one.sites} site{'s' * (one.sites != 1)}"
    yield from wrapped(f"{one.stored:,} stored, {sites}, {'folds (dashed)' if one.folds else 'does not fold'}", width)
