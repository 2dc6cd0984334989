"""A picture of a plan in the formats that it can be saved in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path

from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.filesystem.atomic import replace_text
from peftc.filesystem.bounded_read import printable_path
from peftc.pictures.code import GeneratedCode
from peftc.pictures.dot import to_dot
from peftc.pictures.graph import Diagram
from peftc.pictures.mermaid import to_markdown
from peftc.pictures.page import notebook_html, to_page
from peftc.pictures.panels import diagram_of
from peftc.pictures.svg import WIDEST_ROW, to_svg
from peftc.planning.on_table import plan_on_table
from peftc.planning.report.plan import Plan
from peftc.syntax import ast

FORMATS = (".svg", ".html", ".md", ".dot")


@dataclass(frozen=True)
class Picture:
    """One layer of each kind of a model, with what a spec adds to it. Notebooks show it.

    Attributes:
        diagram: what is drawn, before it has places.
        plan: the plan of the spec.
        table: the sites of the model.
        spec: the text of the expanded spec.
        width: how wide panels side by side may be, in pixels.
    """

    diagram: Diagram = field(repr=False)
    plan: Plan = field(repr=False)
    table: SiteTable = field(repr=False)
    spec: str = field(repr=False)
    width: float = WIDEST_ROW
    listing: Callable[[], Sequence[GeneratedCode]] = field(default=tuple, repr=False, compare=False)

    def svg(self) -> str:
        """The picture alone, for light and dark backgrounds.

        Raises:
            PeftcError: P590 (pygraphviz is not installed).
        """
        return to_svg(self.diagram, self.width)

    def markdown(self) -> str:
        """Flowcharts of Mermaid and a table of the edits, as Markdown."""
        return to_markdown(self.diagram)

    def dot(self) -> str:
        """A graph in the language of Graphviz."""
        return to_dot(self.diagram)

    def html(self) -> str:
        """A page that stands alone: also the sites, and the generated code beside the model's.

        Raises:
            PeftcError: P590 (pygraphviz is not installed); P4xx (the code cannot be generated).
        """
        return to_page(self.diagram, self.plan, self.table, self.spec, self.listing())

    def text(self, suffix: str) -> str:
        """The picture in the format of a file's ending. Raises: P590, P591."""
        match suffix.lower():
            case ".svg":
                return self.svg()
            case ".html":
                return self.html()
            case ".md":
                return self.markdown()
            case ".dot":
                return self.dot()
            case _:
                raise unknown_format(suffix)

    def save(self, path: str | PathLike[str]) -> Path:
        """Writes the picture in the format of the file's ending: `.svg`, `.html`, `.md` or `.dot`.

        Args:
            path: of the file. A file that is there is replaced.

        Raises:
            PeftcError: P590 (pygraphviz is not installed), P591 (the ending), P592 (the file
                cannot be written).
        """
        target = Path(fspath(path))
        return write(target, self.text(target.suffix))

    def _repr_svg_(self) -> str | None:
        return drawn_or_none(self.diagram, lambda diagram: to_svg(diagram, self.width))

    def _repr_html_(self) -> str | None:
        return drawn_or_none(self.diagram, notebook_html)

    def __str__(self) -> str:
        return self.diagram.description


def check_format(suffix: str) -> None:
    """Raises: P591 for the ending of a file that is no format of pictures."""
    if suffix.lower() not in FORMATS:
        raise unknown_format(suffix)


def unknown_format(suffix: str) -> PeftcError:
    endings = join_names(FORMATS, last="or")
    return PeftcError(Diagnostic("P591", f"the file of a picture ends in {endings}, not in `{suffix}`"))


def sites_svg(table: SiteTable) -> str | None:
    """The layers of a model alone; None without pygraphviz."""
    nothing = ast.Spec(1, ())
    result = plan_on_table(table, nothing)
    return drawn_or_none(diagram_of(table, result.plan, result.site_edits, nothing, ()), to_svg)


def drawn_or_none(diagram: Diagram, make: Callable[[Diagram], str]) -> str | None:
    """What `make` draws; None without pygraphviz: a notebook then shows what else there is."""
    try:
        return make(diagram)
    except PeftcError as error:
        if error.diagnostics[0].code != "P590":
            raise
        return None


def write(target: Path, text: str) -> Path:
    """Replaces a file. Raises: P592."""
    try:
        if target.exists():
            replace_text(target, text)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PeftcError(Diagnostic("P592", f"cannot write {printable_path(target)}: {reason}")) from error
    return target
