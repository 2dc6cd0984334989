"""The pictures of the gallery: one layer with a recipe, as an SVG of few bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from peftc.illustration import show
from peftc.pictures.graph import COLORS
from peftc.pictures.svg import to_svg

NAMESPACE = "http://www.w3.org/2000/svg"
SVG = f"{{{NAMESPACE}}}"
TENTHS = 10  # coordinates have one decimal
STRAIGHT = 3  # tenths of a pixel that a line may be off
Point = tuple[int, int]  # in tenths


def picture(path: Path, model: str, cache: bool = True) -> str:
    """The panel of a recipe's picture with the most edits. The page has the counts."""
    diagram = show(path, model, cache=cache).diagram
    panel = max(diagram.panels, key=lambda one: len(one.content.changes))
    return compact(to_svg(diagram, panels=[panel]))


def compact(svg: str) -> str:
    """The same picture without what a page does not show of an image: tooltips and data."""
    ElementTree.register_namespace("", NAMESPACE)
    root = ElementTree.fromstring(svg)
    styled = set(re.findall(r"\.([a-z]\w*)", root.findtext(f"{SVG}style") or ""))
    for one in root.iter(f"{SVG}g"):
        words = [word for word in one.attrib.pop("class", "").split() if word in styled]
        if words:
            one.set("class", " ".join(words))
    for panel in root.findall(f"{SVG}g"):
        panel.attrib.pop("data-layers", None)
        for inner in panel.findall(f"{SVG}g"):
            inner[:] = [*_frames(inner), *_lines(inner), *_joined(_shapes(inner))]
    classes = {word for one in root.iter() for word in one.get("class", "").split()}
    for style in root.iter(f"{SVG}style"):
        style.text = _used(style.text or "", classes)
    for one in root.iter():
        if one.tag != f"{SVG}text":
            one.tail = None
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _used(style: str, classes: set[str]) -> str:
    """A style sheet without the rules and the colours of what is not there."""

    def rule(match: re.Match[str]) -> str:
        needs = [set(re.findall(r"\.([\w-]+)", one)) for one in match[1].split(",")]
        return match[0].replace(".peftc ", "") if any(own <= classes for own in needs) else ""

    for number in range(COLORS):
        if f"e{number}" not in classes:
            style = re.sub(rf"--c{number}:#\w+;", "", style)
    return re.sub(r"(\.peftc [^{}@]*)\{[^{}]*\}", rule, style)


def _is_line(one: Element) -> bool:
    return one.tag == f"{SVG}path" or (len(one) > 0 and all(child.tag == f"{SVG}path" for child in one))


def _frames(inner: Element) -> Iterator[Element]:
    """What is behind the lines."""
    for child in inner:
        if _is_line(child):
            return
        yield from _plain(child)


def _shapes(inner: Element) -> Iterator[Element]:
    """What is on the lines."""
    children = list(inner)
    first = next((i for i, child in enumerate(children) if _is_line(child)), len(children))
    for child in children[first:]:
        if not _is_line(child):
            yield from _plain(child)


def _plain(group: Element) -> Sequence[Element]:
    """A group without its title and data; its contents where it has no class of its own."""
    for title in group.findall(f"{SVG}title"):
        group.remove(title)
    for key in [key for key in group.attrib if key.startswith("data-")]:
        del group.attrib[key]
    return [group] if "class" in group.attrib or not len(group) else list(group)


def _joined(shapes: Iterator[Element]) -> list[Element]:
    """Groups of one class, one behind the other, are one."""
    result: list[Element] = []
    for one in shapes:
        last = result[-1] if result else None
        if last is not None and one.tag == last.tag == f"{SVG}g" and one.attrib == last.attrib:
            last.extend(one)
        else:
            result.append(one)
    return result


def _lines(inner: Element) -> Iterator[Element]:
    """One path for all lines of a class, and one for all their tips."""
    groups: dict[str, dict[str, list[str]]] = {}
    for child in inner:
        if _is_line(child):
            own = groups.setdefault("" if child.tag == f"{SVG}path" else child.get("class", ""), {})
            for path in child.iter(f"{SVG}path"):
                own.setdefault(path.get("class", ""), []).append(relative(path.get("d", "")))
    for group, paths in groups.items():
        holder = Element(f"{SVG}g", {"class": group} if group else {})
        for name, parts in paths.items():
            SubElement(holder, f"{SVG}path", {"class": name, "d": "".join(parts)})
        yield from ([holder] if group else list(holder))


def relative(path: str) -> str:
    """A path of `M`, `C`, `L` and `z` with steps for points, and lines for straight curves."""
    parts: list[str] = []
    at: Point = (0, 0)
    for command, text in re.findall(r"([MCLz])([^MCLz]*)", path):
        points = [_point(one) for one in text.split()]
        if command == "z":
            parts.append("z")
        elif command == "M":
            at = points[0]
            parts.append(f"M{_pair(*at)}")
        else:
            for i in range(0, len(points), 3 if command == "C" else 1):
                own = points[i : i + 3] if command == "C" else points[i : i + 1]
                parts.append(_step(at, own))
                at = own[-1]
    return "".join(parts)


def _step(at: Point, points: Sequence[Point]) -> str:
    x, y = points[-1][0] - at[0], points[-1][1] - at[1]
    if all(abs((px - at[0]) * y - (py - at[1]) * x) <= STRAIGHT * (abs(x) + abs(y)) for px, py in points):
        return f"v{_number(y)}" if x == 0 else f"h{_number(x)}" if y == 0 else f"l{_pair(x, y)}"
    numbers = "".join(_sign(_number(value)) for px, py in points for value in (px - at[0], py - at[1]))
    return f"c{numbers.lstrip()}"


def _point(text: str) -> Point:
    x, y = (round(float(part) * TENTHS) for part in text.split(","))
    return x, y


def _pair(x: int, y: int) -> str:
    return _number(x) + _sign(_number(y))


def _sign(number: str) -> str:
    """A number behind another one: a minus needs no space before it."""
    return number if number.startswith("-") else f" {number}"


def _number(tenths: int) -> str:
    whole, rest = divmod(abs(tenths), TENTHS)
    digits = f"{whole or ''}.{rest}" if rest else str(whole)
    return f"-{digits}" if tenths < 0 else digits
