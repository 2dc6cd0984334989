"""Models put together at random from the styles of research code: their roles are those of the
source, and random edits compute their equations, for tokens and batches that the sample did not
have, too.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from benchmarks.foreign_checks.roles import compared
from benchmarks.foreign_models.case import Case, Stack
from tests.laws.harness import randomise
from tests.styles.attentions import CORES, OUTPUTS, PROJECTIONS, SPLITS, Attention, Part
from tests.styles.blocks import BLOCKS, MODELS, Model
from tests.styles.networks import NETWORKS

EDITS = {  # equations by site
    "attn": ("h += adapter(x, r=4, act=tanh)", "h += lora(h, r=2)", "h *= vector(init=1)"),
    "attn.q": ("h += lora(x, r=2)", "w += lowrank(r=2)"),
    "attn.v": ("h += lora(x, r=2)", "w = magnitude(w + lowrank(r=2))"),
    "ffn": ("h += adapter(x, r=4, act=relu)", "h += adapter(h, r=4, act=relu)", "h += lora(z, r=2)"),
    "ffn.up": ("h += lora(x, r=2)", "h *= vector(init=1)"),
    "ffn.down": ("w += lowrank(r=2)", "h += lora(x, r=2)"),
    "ffn.hidden": ("h *= vector(init=1)",),
}


class Composition:
    """A model, its role table, and edits of it. `names`: of the styles."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        parts = [self.source.choice(kinds) for kinds in (PROJECTIONS, SPLITS, CORES, OUTPUTS)]
        self.attention: type[Part] = type("Attention", (*parts, Attention), {})
        self.network, self.block, self.model = map(self.source.choice, (NETWORKS, BLOCKS, MODELS))
        self.names = ", ".join(part.__name__ for part in (*parts, self.network, self.block, self.model))
        self.parts = parts

    def build(self) -> Model:
        model = self.model([(self.attention(), self.network()) for _ in range(4)], self.block)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model

    def case(self) -> Case:
        model = self.build()
        attn, ffn = model.names
        roles = {f"attn.{role}": f"{attn}.{name}" for part in self.parts for role, name in part.roles.items()}
        roles |= {f"ffn.{role}": f"{ffn}.{name}" for role, name in self.network.roles.items()}
        return Case(self.names, "hand-written", self.build, dict[str, Any], (Stack(model.layers, roles),))

    def spec(self, roles: set[str]) -> str:
        places = self.source.sample(sorted(EDITS.keys() & roles), 2)
        edits = (
            f"edit e{i} at layer[*].{site} {{ {self.source.choice(EDITS[site])} }}" for i, site in enumerate(places)
        )
        return "\n".join(["peft 2", *edits])


@pytest.mark.parametrize("seed", range(48))
def test_roles_are_those_of_the_source_and_edits_compute_their_equations(seed: int) -> None:
    torch.manual_seed(seed)
    composition = Composition(seed)
    case, model = composition.case(), composition.build().double().eval()
    batches = [{"x": torch.randn(batch, tokens, 6).double()} for batch, tokens in ((2, 6), (1, 4), (3, 10))]
    table = peftc.sites(model, sample=batches[0])
    comparison = compared(case, model, table)
    wrong = [line for line in comparison.wrong if ".norm at" not in line]
    assert (comparison.missing, wrong, table.untraced, table.unplaced) == ([], [], (), ()), composition.names
    paths = (".".join(name for name, _ in site.steps[2:]) for site in table.sites)
    spec = composition.spec({path.replace(".self", "") for path in paths})
    peftc.compile(spec, model, seed=0, sample=batches[0])
    randomise(peftc.parameters(model))
    for batch in batches:
        assert not peftc.verify(model, batch).findings, (composition.names, spec)
