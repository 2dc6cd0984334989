"""Pictures in other formats, names that mean something there, and what is refused."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import peftc
from peftc.cli.main import main
from peftc.pictures.dot import to_dot
from peftc.pictures.graph import Diagram
from peftc.pictures.mermaid import to_markdown
from peftc.pictures.svg import to_svg
from tests import zoo
from tests.pictures.drawings import texts
from tests.pictures.test_svg import text

HOSTILE = "\"><script>alert(1)</script>&amp;'`]|{}#;\\N\\\n```\x00\x1b--> end %% ‮]]>"


def hostile(diagram: Diagram) -> Diagram:
    """The same with a name that means something in every format, in the place of every text."""

    def node(one: Any) -> Any:
        change = None if one.change is None else edited(one.change)
        return replace(one, lines=tuple(HOSTILE for _ in one.lines), title=HOSTILE, change=change)

    def edited(change: Any) -> Any:
        return replace(change, edit=HOSTILE, equation=HOSTILE, short=HOSTILE, paths=(HOSTILE,))

    def panel(one: Any) -> Any:
        edges = (replace(e, change=None if e.change is None else edited(e.change)) for e in one.content.edges)
        frames = (replace(f, name=HOSTILE, title=HOSTILE) for f in one.content.frames)
        content = replace(
            one.content, nodes=tuple(map(node, one.content.nodes)), edges=tuple(edges), frames=tuple(frames)
        )
        return replace(one, name=HOSTILE, content=content)

    edits = (replace(e, name=HOSTILE, equations=(HOSTILE,), at=HOSTILE, reason=HOSTILE) for e in diagram.edits)
    return Diagram(HOSTILE, HOSTILE, tuple(map(panel, diagram.panels)), tuple(edits), 1, 1, (HOSTILE,))


@pytest.fixture(scope="module")
def picture() -> Any:
    return peftc.show(text("linears"), zoo.config("mixtral"), cache=False)


def test_hostile_names_are_text_in_svg(picture: Any) -> None:
    svg = to_svg(hostile(picture.diagram))
    root = ElementTree.fromstring(svg)
    assert not [one.tag for one in root.iter() if one.tag.endswith("script")]
    assert any("<script>alert(1)</script>" in one for one in texts(svg))
    assert "\x00" not in svg
    assert "\x1b" not in svg


def test_hostile_names_are_text_in_graphviz(picture: Any) -> None:
    graph = import_module("pygraphviz").AGraph(string=to_dot(hostile(picture.diagram)))
    (one, *_) = [node for node in graph.nodes() if node.attr["shape"] == "box"]
    assert "<script>alert(1)</script>" in one.attr["label"]
    number = sum(len(panel.content.nodes) for panel in picture.diagram.panels)
    assert len(graph.nodes()) == number


def test_hostile_names_are_text_in_mermaid(picture: Any) -> None:
    page = to_markdown(hostile(picture.diagram))
    assert "<script" not in page
    assert page.count("```") == 2 * len(picture.diagram.panels)
    for chart in re.findall(r"```mermaid\n(.*?)```", page, re.S):
        for line in chart.splitlines():
            for label in re.findall(r'"([^"]*)"', line):
                assert not re.search(r"[<>\[\]{}|`\\]", label.replace("<br>", "")), line
            assert line.count('"') % 2 == 0


def test_a_flowchart_has_the_edits_of_the_plan(picture: Any) -> None:
    page = picture.markdown()
    assert "flowchart BT" in page
    for name in ("qv", "o"):
        assert re.search(rf'n\d+\["{name}<br>', page)
        assert f"| {name} | " in page
    assert "-.->" in page, "what folds is dashed"


def test_a_graph_has_the_edits_of_the_plan(picture: Any) -> None:
    graph = import_module("pygraphviz").AGraph(string=picture.dot())
    labels = [node.attr["label"] for node in graph.nodes()]
    assert any(label.startswith("qv\\nlora") for label in labels)
    assert all("dashed" in node.attr["style"] for node in graph.nodes() if node.attr["label"].startswith("qv\\n"))


def test_the_command_writes_what_the_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, config = tmp_path / "spec.peft", tmp_path / "config.json"
    spec.write_text(text("mam"))
    zoo.config("bart").to_json_file(str(config), use_diff=False)
    for ending in (".svg", ".md", ".dot"):
        target = tmp_path / "new" / f"picture{ending}"
        assert main(["show", str(spec), "--model", str(config), "-o", str(target)]) == 0
        assert capsys.readouterr().out == f"wrote {target}\n"
        assert target.read_text(encoding="utf-8") == peftc.show(spec, str(config)).text(ending)
    again = tmp_path / "new" / "picture.svg"
    assert main(["show", str(spec), "--model", str(config), "-o", str(again), "--width", "2000"]) == 0
    assert "translate" in again.read_text(encoding="utf-8")


def test_other_endings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], picture: Any) -> None:
    spec = tmp_path / "spec.peft"
    spec.write_text(text("mam"))
    assert main(["show", str(spec), "--model", "facebook/bart-base", "-o", str(tmp_path / "a.png")]) == 1
    assert "error[P591]" in capsys.readouterr().err
    with pytest.raises(peftc.PeftcError) as caught:
        picture.save(tmp_path / "picture.pdf")
    assert caught.value.diagnostics[0].code == "P591"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, picture: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(peftc.PeftcError) as caught:
        picture.save(tmp_path / "file" / "picture.dot")
    assert caught.value.diagnostics[0].code == "P592"


def test_without_the_library_a_picture_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, picture: Any
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pygraphviz":
            raise ImportError("No module named 'pygraphviz'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("peftc.pictures.layout.import_module", missing)
    monkeypatch.setattr("peftc.pictures.layout.layout_of", import_module("peftc.pictures.layout").layout_of.__wrapped__)
    monkeypatch.setattr("peftc.pictures.svg.layout_of", import_module("peftc.pictures.layout").layout_of)
    with pytest.raises(peftc.PeftcError) as caught:
        picture.save(tmp_path / "picture.svg")
    assert caught.value.diagnostics[0].code == "P590"
    assert 'pip install "peftc[show]"' in (caught.value.diagnostics[0].help or "")
    assert picture._repr_svg_() is None
    assert picture.save(tmp_path / "picture.dot").exists()
    assert picture.save(tmp_path / "picture.md").exists()
