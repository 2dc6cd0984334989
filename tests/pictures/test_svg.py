"""Pictures say what plans say: every edit with its count, in sequence or in parallel, dashed where
it folds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import peftc
from peftc.pictures.layout import Box, layout_of
from peftc.pictures.svg import SMALL, WIDEST_ROW
from tests import zoo
from tests.pictures.drawings import SVG, EditBox, boxes, drawn, groups, texts

ROOT = Path(__file__).resolve().parents[2]
SPECS = {
    "mam": "edit prefix at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"
    "edit ffn at layer[*].ffn { h += 4 * adapter(x, r=5, act=relu, init=lora, bias=true) }",
    "houlsby": "edit attn at layer[*].attn { h += adapter(h, r=4, act=gelu) }\n"
    "edit ffn at layer[*].ffn { h += adapter(h, r=4, act=gelu) }",
    "linears": "edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2, alpha=4) }\n"
    "edit o at layer[*].attn.o { w += lowrank(r=2) }",
    "order": "edit a at layer[*].ffn { h += 2 * adapter(x, r=4, act=relu) }\n"
    "edit b at layer[*].ffn { h += gate(h) * adapter(h, r=2, act=relu) }\n"
    "edit c at layer[*].ffn { h *= vector(init=1) }\n"
    "train norms = [w] at layer[*].norm",
}
MODELS = ("bart", "llama", "t5", "vit", "mixtral", "bert", "gpt2")


def text(name: str) -> str:
    return f"peft 1\n{SPECS[name]}\n"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("species", MODELS)
def test_a_picture_has_the_plan_in_it(name: str, species: str) -> None:
    svg, plan = drawn(text(name), zoo.config(species))
    data = json.loads(plan.model_dump_json())
    assert {box.edit for box in boxes(svg)} == {edit["name"] for edit in data["edits"]}
    for edit in data["edits"]:
        own = [box for box in boxes(svg) if box.edit == edit["name"]]
        assert {box.folds for box in own} == {edit["foldable"]}
        if not any(box.shared for box in own):
            assert sum(box.total for box in own) == edit["stored"]
        assert sum(box.sites * max(box.layers, 1) for box in own) == number_of_sites(edit)
        assert f"{edit['stored']:,} stored" in " ".join(texts(svg))


def number_of_sites(edit: dict[str, object]) -> int:
    def size(ends: list[int] | None) -> int:
        return 1 if ends is None else ends[1] - ends[0] + 1

    return sum(size(one.get("layers")) * size(one.get("numbers")) for one in edit["sites"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SPECS)
def test_what_reads_h_is_in_sequence(name: str) -> None:
    """Judged by the text: the input of the form that is added."""
    svg, _ = drawn(text(name), zoo.config("bart"))
    for statement in re.findall(r"edit (\w+) at [^{]*{ (\w+) (\S+) (.*?) }", SPECS[name]):
        edit, state, operator, value = statement
        if state == "w":
            expected = "weight"
        elif operator == "*=":
            expected = "scaling"
        elif state == "kv" or re.search(r"(adapter|lora)\(x", value):
            expected = "parallel"
        else:
            expected = "sequential"
        assert {box.insertion for box in boxes(svg) if box.edit == edit} == {expected}


def test_dashes_are_in_the_style_of_what_folds_alone() -> None:
    svg, plan = drawn(
        text("linears") + "edit a at layer[*].ffn { h += adapter(x, r=2, act=relu) }\n", zoo.config("bart")
    )
    assert [edit.foldable for edit in plan.edits] == [True, True, False]
    style = ElementTree.fromstring(svg).find(f"{SVG}style")
    assert style is not None
    rules = re.findall(r"([^{}]+){[^{}]*stroke-dasharray", style.text or "")
    assert all(part.startswith(".peftc .folds ") for rule in rules for part in rule.split(","))
    for group in groups(svg, "edit"):
        names = group.get("class", "").split()
        assert ("folds" in names) == (names[1] != "e2")


def test_gates_and_scales_stand_on_the_arrow() -> None:
    svg, _ = drawn(text("order"), zoo.config("bert"))
    assert {"× 2", "× gate(h)"} <= set(texts(svg))
    assert "α = 4" in texts(drawn(text("linears"), zoo.config("bert"))[0])


def test_edits_of_one_site_join_in_the_order_of_the_spec() -> None:
    """From the ffn upwards: what comes later in the text is further from it."""
    (panel,) = peftc.show(text("order"), zoo.config("bert"), cache=False).diagram.panels
    content, layout = panel.content, layout_of(panel)
    joins = {node.change.edit: layout.nodes[node.id].y for node in content.nodes if node.kind == "join" and node.change}
    assert list(joins) == ["a", "b", "c"]
    assert joins["a"] > joins["b"] > joins["c"]


def test_the_spine_is_straight_and_nothing_overlaps() -> None:
    for name in SPECS:
        for species in ("bart", "llama", "bert"):
            for panel in peftc.show(text(name), zoo.config(species), cache=False).diagram.panels:
                content, layout = panel.content, layout_of(panel)
                ends = {end for edge in content.edges if edge.kind == "spine" for end in (edge.source, edge.target)}
                assert len({round(layout.nodes[end].x) for end in ends}) == 1
                drawn_boxes = [*layout.nodes.values(), *(label for label in layout.labels if label)]
                pairs = [(a, b) for i, a in enumerate(drawn_boxes) for b in drawn_boxes[:i] if overlap(a, b)]
                assert not pairs, (name, species)


def overlap(one: Box, other: Box) -> bool:
    wide = abs(one.x - other.x) < (one.width + other.width) / 2 - 2
    return wide and abs(one.y - other.y) < (one.height + other.height) / 2 - 2


def test_experts_are_one_stack() -> None:
    spec = "peft 1\nedit up at layer[*].ffn.experts[*].up { w += lowrank(r=2) }\n"
    svg, plan = drawn(spec, zoo.config("mixtral"))
    (box,) = boxes(svg)
    assert (box.sites, box.layers, box.total) == (4, 3, plan.edits[0].stored)
    assert "experts[0..3] × 4" in texts(svg)


def test_prompts_and_modules_by_name_have_panels_of_their_own() -> None:
    spec = "peft 1\nedit tokens at input.embed { h = concat(prompt(len=4), h) }\n"
    svg, plan = drawn(spec, zoo.config("t5"))
    (box,) = boxes(svg)
    assert (box.insertion, box.total) == ("tokens", plan.edits[0].stored)
    spec = 'peft 1\nedit own at "vit.embeddings.**" { w += lowrank(r=1) }\nedit head at head { h += lora(x, r=2) }\n'
    config = zoo.config("vit")
    names = [
        m.name for m in peftc.sites(config, cache=False).modules if m.name.startswith("vit.embeddings") and m.called
    ]
    spec = spec.replace("vit.embeddings.**", next(name for name in names if name.endswith("projection")))
    svg, plan = drawn(spec, config)
    assert {box.edit: box.total for box in boxes(svg)} == {edit.name: edit.stored for edit in plan.edits}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 4).softmax(-1)
        return self.o(weights @ self.v(x))


class Block(nn.Module):
    """A hand-written layer: both sub-layers read the same norm, and are added together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.ffn(h)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_sub_layers_of_a_hand_written_layer_read_one_norm() -> None:
    spec = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\nedit f at layer[*].ffn { h += lora(x, r=2) }\n"
    picture = peftc.show(spec, Stack(), sample={"x": torch.zeros(1, 3, 16)})
    (panel,) = picture.diagram.panels
    (norm,) = [node.id for node in panel.content.nodes if node.kind == "norm"]
    frames = {node.id: node.frame for node in panel.content.nodes}
    readers = {frames[edge.target] for edge in panel.content.edges if edge.source == norm}
    assert panel.count == 2
    assert readers == {frame.id for frame in panel.content.frames} or len(readers) == 2
    plan = peftc.plan(spec, Stack(), sample={"x": torch.zeros(1, 3, 16)})
    assert {box.edit: box.total for box in boxes(picture.svg())} == {edit.name: edit.stored for edit in plan.edits}


def test_letters_are_legible_on_a_small_screen() -> None:
    """A row of panels is no wider than letters of nine pixels need at 400; one panel may be."""
    for name in ("mam", "houlsby", "order"):
        svg, _ = drawn(text(name), zoo.config("t5"))
        width = float(ElementTree.fromstring(svg).get("width", "0"))
        assert width <= WIDEST_ROW + 30
        assert SMALL * 400 / width > 8.7


def test_the_svg_is_accessible() -> None:
    svg, plan = drawn(text("mam"), zoo.config("bart"))
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    title, about = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert about is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {about.get('id')}"
    assert all(f"{edit.name}: " in (about.text or "") for edit in plan.edits)
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r"href|url\(|@import|<script", svg)


CODE = """
import sys, peftc
from tests import zoo
picture = peftc.show(sys.argv[1], zoo.config("bart"), cache=False)
print(picture.svg(), picture.markdown(), picture.dot())
"""


def test_a_picture_does_not_depend_on_the_run() -> None:
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", CODE, text("order")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    picture = peftc.show(text("order"), zoo.config("bart"))
    assert ran.stdout == f"{picture.svg()} {picture.markdown()} {picture.dot()}\n"


def test_an_edit_box_counts_its_layers() -> None:
    assert EditBox("a", "parallel", "h", 5, 2, False, False, 3).total == 30
