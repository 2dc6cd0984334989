"""A small training run on real text has the loss curve of PEFT's."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftc
from tests import zoo

STEPS, BATCH, TOKENS, LAYERS = 40, 4, 32, 2
MODULES = {
    "attn.self.q": "self_attn.q_proj",
    "attn.self.v": "self_attn.v_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
EQUATIONS = {"lora": "h += lora(x, r=4, alpha=8)", "dora": "w = magnitude(w + lowrank(r=4, alpha=8))"}


def text() -> Tensor:
    """The docstrings of some modules of the standard library, as bytes."""
    parts: list[str] = []
    for module in (argparse, ast, inspect, json, textwrap):
        tree = ast.parse(inspect.getsource(module))
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        parts += [doc for node in nodes if (doc := ast.get_docstring(node))]
    return torch.tensor(list("\n".join(parts).encode()), dtype=torch.long)


def batches() -> list[Tensor]:
    ids, generator = text(), torch.Generator().manual_seed(0)
    starts = torch.randint(len(ids) - TOKENS, (STEPS, BATCH), generator=generator)
    return [torch.stack([ids[start : start + TOKENS] for start in row.tolist()]) for row in starts]


def base() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    zoo.randomise(model, torch.Generator().manual_seed(0))
    return model


def curve(model: Any, trained: list[nn.Parameter]) -> Tensor:
    """The losses of all steps, (STEPS,)."""
    model.train()
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses: list[Tensor] = []
    for batch in batches():
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def models(method: str) -> tuple[nn.Module, Any]:
    """Compiled and PEFT's, with the same first values."""
    sites = " | ".join(f"layer[*].{role.replace('.self', '')}" for role in MODULES)
    ours = peftc.compile(f"peft 1\n\nedit a at {sites} {{ {EQUATIONS[method]} }}\n", base(), seed=0)
    modules = sorted(name.rpartition(".")[2] for name in MODULES.values())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=method == "dora")
    theirs: Any = peft.get_peft_model(base(), config).double()  # pyright: ignore[reportArgumentType]
    downs = [key for key in peftc.parameters(ours) if key.endswith(".A")]
    assert len(downs) == len(MODULES) * LAYERS
    with torch.no_grad():
        for key in downs:
            layer, role = re.search(r"layer\[(\d+)\]\.(.*)/", key).groups()  # pyright: ignore[reportOptionalMemberAccess]
            linear: Any = theirs.get_submodule(f"base_model.model.model.layers.{layer}.{MODULES[role]}")
            linear.lora_A["default"].weight.copy_(peftc.parameters(ours)[key])
    return ours, theirs


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", EQUATIONS)
def test_a_run_has_the_loss_curve_of_peft(method: str) -> None:
    ours, theirs = models(method)
    own = curve(ours, list(peftc.parameters(ours).values()))
    others = curve(theirs, [p for p in theirs.parameters() if p.requires_grad])
    torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-9)
    assert own[-5:].mean() < own[:5].mean() - 0.5  # it learns
