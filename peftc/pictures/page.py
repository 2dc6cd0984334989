"""A page that stands alone: the figure, the plan, the equations, the sites and the code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from peftc.addressing.sites import SiteTable
from peftc.diagnostics.markup import clean, lines_of
from peftc.pictures.code import GeneratedCode, code_section
from peftc.pictures.graph import Diagram
from peftc.pictures.page_style import NOTEBOOK_STYLE, SCRIPT, STYLE
from peftc.pictures.svg import style, to_svg
from peftc.planning.report.plan import Plan, percent
from peftc.planning.report.site_tree import site_rows


def to_page(diagram: Diagram, plan: Plan, table: SiteTable, spec: str, code: Sequence[GeneratedCode]) -> str:
    """An HTML document without references to other files. Raises: P590 without pygraphviz."""
    sections = (
        ("figure", "Figure", figure(diagram)),
        ("plan", "Plan", _plan(diagram, plan)),
        ("equations", "Equations", (f'<pre class="find" tabindex="0"><code>{lines_of(spec)}</code></pre>',)),
        ("sites", "Sites", _sites(plan, table)),
        ("code", "Code", code_section(code) if code else ("<p>No code is generated.</p>",)),
    )
    links = "".join(f'<a href="#{id}">{title}</a>' for id, title, _ in sections)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{clean(diagram.title)}</title><style>{style()}{STYLE}</style></head>",
        '<body class="peftc"><a class="skip" href="#figure">Skip to the figure</a>',
        f"<header><h1>{clean(diagram.title)}</h1>",
        f"<p>{plan.model.parameters:,} parameters; {plan.totals.stored:,} stored "
        f"({percent(plan.totals.stored, plan.totals.base)})</p>",
        f'<nav aria-label="Sections">{links}</nav>',
        '<search><label for="query">Search</label><input id="query" type="search" autocomplete="off" '
        'placeholder="edit, site, code" aria-keyshortcuts="/">'
        '<output for="query" aria-live="polite"></output></search>',
        "</header><main>",
    ]
    for id, title, lines in sections:
        parts += [f'<section id="{id}"><h2>{title}</h2>', *lines, "</section>"]
    return "\n".join([*parts, f"</main><script>{SCRIPT}</script></body></html>", ""])


def notebook_html(diagram: Diagram) -> str:
    """The figure and the edits, for the output of a cell."""
    return _notebook(*figure(diagram), *edits_table(diagram))


def figure_html(diagram: Diagram) -> str:
    """The figure alone, for the output of a cell."""
    return _notebook(*figure(diagram))


def _notebook(*parts: str) -> str:
    return "\n".join(['<div class="peftc">', f"<style>{style()}{NOTEBOOK_STYLE}</style>", *parts, "</div>"])


def figure(diagram: Diagram) -> Iterator[str]:
    """Each panel as a picture of its own: they stand side by side as far as there is room."""
    yield '<div class="panels">'
    for i, panel in enumerate(diagram.panels):
        yield f'<figure class="panel">{to_svg(diagram, panels=[panel], id=f"panel{i}")}</figure>'
    yield "</div>"


def edits_table(diagram: Diagram) -> Iterator[str]:
    """The edits with their colours, equations and counts."""
    yield '<div class="wide" role="region" tabindex="0" aria-label="Edits"><table><thead><tr><th>edit<th>equation<th>at'
    yield '<th class="number">sites<th class="number">stored<th>folds<th>at init</tr></thead><tbody>'
    for one in diagram.edits:
        equations = "<br>".join(f"<code>{clean(equation)}</code>" for equation in one.equations)
        folds = f"{'yes' if one.folds else 'no'}: {clean(one.reason)}"
        init = "the model is unchanged" if one.identity else "the model's output changes"
        yield (
            f'<tr class="find"><th scope="row">{chip(diagram, one.name)}<td>{equations}<td><code>{clean(one.at)}</code>'
            f'<td class="number">{one.sites:,}<td class="number">{one.stored:,}<td>{folds}<td>{init}</tr>'
        )
    yield "</tbody></table></div>"


def chip(diagram: Diagram, edit: str) -> str:
    folds = " dashed" if next(one for one in diagram.edits if one.name == edit).folds else ""
    return f'<span class="edit-chip e{diagram.color(edit)}{folds}">{clean(edit)}</span>'


def _plan(diagram: Diagram, plan: Plan) -> Iterator[str]:
    yield from edits_table(diagram)
    counts = ((name, getattr(plan.totals, name)) for name in ("trained", "stored", "changed", "served"))
    cells = "".join(f"<div><dt>{name}<dd>{n:,}<dd>{percent(n, plan.totals.base)}</div>" for name, n in counts)
    yield f'<dl class="totals">{cells}</dl>'
    if plan.expectations:
        items = (f"<li>{'holds' if e.holds else 'fails'}: <code>{clean(e.text)}</code>" for e in plan.expectations)
        yield f"<ul>{''.join(items)}</ul>"
    if diagram.warnings:
        yield f'<ul class="warnings">{"".join(f"<li>{clean(text)}" for text in diagram.warnings)}</ul>'


def _sites(plan: Plan, table: SiteTable) -> Iterator[str]:
    """The tree of layers, with the edits at each site."""
    paths = {one.name: {_names(part.path) for part in one.sites.ranges} for one in plan.edits}
    numbers = {one.name: i for i, one in enumerate(plan.edits)}
    above: list[str] = []
    open_levels = 0
    yield '<div class="tree">'
    rows = site_rows(table)
    depths = [(len(row[0]) - len(row[0].lstrip())) // 2 for row in rows]
    for i, (name, module, shape, parameters, states) in enumerate(rows):
        depth = min(depths[i], len(above))
        while open_levels > depth:
            yield "</details>"
            open_levels -= 1
        above = [*above[:depth], _names(name.strip())]
        path = ".".join(above)
        edits = [edit for edit, own in paths.items() if path in own]
        chips = "".join(f'<span class="edit-chip e{numbers[edit] % 8}">{clean(edit)}</span>' for edit in edits)
        about = " ".join(text for text in (module, shape and f"[{shape}]", parameters, states) if text)
        line = f"<code>{clean(name.strip())}</code> {chips} <small>{clean(about)}</small>"
        if i + 1 < len(rows) and depths[i + 1] > depth:
            yield f'<details{" open" if depth < 2 else ""}><summary class="find">{line}</summary>'
            open_levels += 1
        else:
            yield f'<div class="leaf find">{line}</div>'
    yield "</details>" * open_levels + "</div>"


def _names(path: str) -> str:
    """A path without numbers: `encoder.layer.attn.self`."""
    return re.sub(r"\[[^\]]*\]| ×.*| run .*", "", path)
