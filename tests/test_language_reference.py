"""The tables and the figure of docs/language.md are those of the code: every state at every site
with its shape, and selectors that parse.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

import peftc
from peftc.addressing.sites import Site
from peftc.syntax.vocabulary import STACKS
from tests import zoo

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "language.md").read_text(encoding="utf-8")

# The numbers of a model for the symbols of the table.
ZOO = {"d": 32, "H": 4, "G": 4, "e": 8, "f": 48, "E": 4, "V": zoo.VOCAB}
MODELS = {
    "bart": ZOO,
    "mbart": ZOO,
    "gpt2": ZOO,
    "roberta": ZOO,
    "t5-gated": ZOO,
    "llama": {**ZOO, "G": 2},
    "qwen2": {**ZOO, "G": 2},
    "qwen3": {**ZOO, "G": 2, "e": 12},
    "mixtral": {**ZOO, "G": 2},
    "qwen2-moe": {**ZOO, "G": 2, "f": 24},
    "mamba": ZOO,
}
OWN_NAMES = re.compile(r"mixer\.(in|x|dt|out)_proj|shared_expert_gate")  # Linears without a role


def documented() -> dict[str, dict[str, str]]:
    """The states of each site of the table, with their shapes in symbols."""
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*) \|$", TEXT.partition("## States at sites")[2], re.M)
    return {
        site: dict(re.findall(r"`(\w+)` ([^·|]+?)(?: · |$)", states.replace("H·e", "He").replace("G·e", "Ge")))
        for site, states in rows
    }


def in_numbers(shape: str, sizes: dict[str, int]) -> str:
    """`[…, H heads, e]` as `[…, 4 heads, 8]`."""
    sizes = sizes | {"He": sizes["H"] * sizes["e"], "Ge": sizes["G"] * sizes["e"]}
    return re.sub(r"\b(He|Ge|[dHGefEV])\b", lambda m: str(sizes[m[1]]), shape)


@cache
def sites(name: str) -> tuple[Site, ...]:
    if name == "mamba":
        config = transformers.MambaConfig(vocab_size=zoo.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
        return peftc.sites(transformers.MambaForCausalLM(config)).sites
    if name == "qwen2-moe":
        experts = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        config = transformers.Qwen2MoeConfig(vocab_size=zoo.VOCAB, hidden_size=32, **heads, **experts)
        return peftc.sites(transformers.Qwen2MoeForCausalLM(config)).sites
    return peftc.sites(zoo.build(name)).sites


def row_of(site: Site) -> str:
    """`decoder.layer[0].attn.self.q` stands in the row `layer.attn.q`."""
    names = [name for name, _ in site.steps if name not in STACKS]
    if names[-1] not in ("self", "cross"):
        names = [name for name in names if name not in ("self", "cross")]
    return ".".join(names)


@pytest.mark.parametrize("name", MODELS)
def test_every_state_is_in_the_table_with_its_shape(name: str) -> None:
    table = documented()
    for site in sites(name):
        row = row_of(site)
        if not OWN_NAMES.search(row):
            shown = {state: in_numbers(shape, MODELS[name]) for state, shape in table[row].items()}
            assert {state: str(s.shape) for state, s in site.states.items()}.items() <= shown.items(), site.path


def test_every_state_of_the_table_is_at_a_site() -> None:
    present: defaultdict[str, set[str]] = defaultdict(set)
    for name in MODELS:
        for site in sites(name):
            present[row_of(site)] |= site.states.keys()
    assert {site: set(states) for site, states in documented().items()} == {
        row: states for row, states in present.items() if not OWN_NAMES.search(row)
    }


def test_the_figure_has_the_states_of_a_layer() -> None:
    drawn: defaultdict[str, list[str]] = defaultdict(list)
    for element in ElementTree.parse(DOCS / "figures" / "states.svg").iter():
        if site := element.get("data-site"):
            drawn[site] += (element.text or "").split()
    others = ("attn.cross", "router", "experts", "shared", "mixer", "q.norm", "k.norm")
    layer = {
        site: set(states)
        for site, states in documented().items()
        if site.startswith("layer") and not any(other in site for other in others)
    }
    assert {site: set(states) for site, states in drawn.items()} == layer
    assert all(len(states) == len(set(states)) for states in drawn.values())


def selectors() -> Iterator[str]:
    table = TEXT.partition("A selector says which:")[2].partition("\n\nEvery part")[0]
    for row in re.findall(r"^\| (`.*`) \| ", table, re.M):
        yield from (text.replace(r"\|", "|") for text in re.findall(r"`([^`]+)`", row))


@pytest.mark.parametrize("selector", list(selectors()))
def test_the_selectors_parse(selector: str) -> None:
    assert peftc.parse(f"peft 1\ntrain t = [w] at {selector}\n").statements
