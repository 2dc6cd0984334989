"""Specs of several edits, compiled with perturbed parameters."""

from __future__ import annotations

import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise

EDITS = {  # equations at one place of a layer: several of them edit the same Linear
    "attn.v": (
        "h += lora(x, r=2)",
        "h *= vector(init=1)",
        "h += vector(init=0)",
        "h += adapter(h, r=2)",
        "h += adapter(x, r=2, act=none)",
        "w = magnitude(w + lowrank(r=2))",
        "w += lowrank(r=2)",
        "w = magnitude(w)",
        "h += lora(x, r=2)  w = magnitude(w + lowrank(r=1))",
    ),
    "attn.o": ("h += lora(x, r=2)", "h *= vector(init=1)", "h += adapter(h, r=2)", "w = magnitude(w)"),
    "attn": ("h *= vector(init=1)", "h += adapter(h, r=2, act=none)", "h += adapter(x, r=2)"),
    "ffn.hidden": ("h *= vector(init=1)", "h += adapter(h, r=2)", "h += lora(h, r=2)"),
    "ffn.down": ("h += lora(x, r=2)", "h *= vector(init=1)", "h += adapter(x, r=2)", "w = magnitude(w)"),
    "ffn": ("h *= vector(init=1)", "h += adapter(h, r=2)", "z *= vector(init=1)", "z += lora(z, r=2)"),
    "ffn.norm": ("w *= vector(init=1)",),
}
LINEAR = (
    "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }\n"
    "edit b at layer[*].ffn.hidden { h *= vector(init=1) }\n"
    "edit c at layer[*].attn.k { w = magnitude(w + lowrank(r=2)) }"
)
MIXED = "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\n" + LINEAR


def compiled(name: str, spec: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Before]:
    """A compiled model with perturbed parameters, and a snapshot from before compilation."""
    model = zoo.build(name, dtype)
    before = Before.of(model)
    peftc.compile("peft 1\n" + spec, model, seed=0)
    randomise(peftc.parameters(model))
    return model, before


@torch.no_grad()
def logits(name: str, model: nn.Module) -> torch.Tensor:
    return model(**zoo.inputs(name, model))[0]
