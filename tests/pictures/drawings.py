"""Pictures of tiny models, read as XML."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

from torch import nn
from transformers import PretrainedConfig

import peftc
from peftc.planning.report.plan import Plan

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class EditBox:
    """A box of an edit in a picture: what it says of itself, and how often its panel is there."""

    edit: str
    insertion: str
    state: str
    stored: int
    sites: int
    shared: bool
    folds: bool
    layers: int

    @property
    def total(self) -> int:
        return self.stored * self.sites * max(self.layers, 1)


def boxes(svg: str) -> list[EditBox]:
    result: list[EditBox] = []
    for panel in groups(svg, "panel"):
        for group in panel.iter(f"{SVG}g"):
            if name := group.get("data-edit"):
                result.append(
                    EditBox(
                        name,
                        group.get("data-insertion", ""),
                        group.get("data-state", ""),
                        int(group.get("data-stored", "")),
                        int(group.get("data-sites", "")),
                        group.get("data-shared") == "true",
                        "folds" in group.get("class", "").split(),
                        int(panel.get("data-layers", "")),
                    )
                )
    return result


def groups(svg: str, word: str) -> list[ElementTree.Element]:
    """The groups of a class."""
    return [one for one in ElementTree.fromstring(svg).iter(f"{SVG}g") if word in one.get("class", "").split()]


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def drawn(spec: str, model: nn.Module | PretrainedConfig) -> tuple[str, Plan]:
    """The SVG of a spec on a model, and its plan."""
    return peftc.show(spec, model, cache=False).svg(), peftc.plan(spec, model, cache=False)
