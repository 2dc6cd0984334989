"""Rewriting passes on a small random Llama: functions of a layer's graph and its hidden states.

python examples/rewriting_passes.py
"""

from __future__ import annotations

import argparse
import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import peftc


def steer(region: Any) -> None:
    """A trained steering vector beside each ffn."""
    vector = region.parameter("v", (region.width("ffn.h"),), ("normal", 0.02))
    region.replace("ffn.h", region.call(torch.add, region["ffn.h"], vector))


class Moments(nn.Module):
    """Sums of activations and of their squares."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(2, d))
        self.register_buffer("tokens", torch.tensor(0))

    def forward(self, h: torch.Tensor) -> None:
        self.sums += torch.stack([(h.detach() ** n).sum((0, 1)) for n in (1, 2)])
        self.tokens += h[..., 0].numel()


def tap(region: Any) -> None:
    """Statistics of what each ffn computes."""
    moments = region.module("moments", Moments(region.width("ffn.h")))
    region.call(moments, region["ffn.h"])


def relu_squared(region: Any) -> None:
    """Another activation in each ffn."""
    activation = region.call(torch.square, region.call(torch.relu, region["ffn.gate.h"]))
    region.replace("ffn.z", region.call(operator.mul, activation, region["ffn.up.h"]))


def fake_quantize(region: Any) -> None:
    """What each ffn reads, rounded to eight bits; gradients pass through."""
    x = region["ffn.x"]
    region.replace("ffn.x", region.call(torch.fake_quantize_per_tensor_affine, x, 0.05, 0, -128, 127))


class Patch(nn.Module):
    """Keeps an activation, and puts it in the place of that of another prompt."""

    stored: torch.Tensor | None = None
    replaces = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.replaces and self.stored is not None:
            return torch.cat([h[:, :-1], self.stored[:, -1:]], 1)
        self.stored = h.detach()
        return h * 1


def patch(region: Any) -> None:
    """Activation patching: the last token of one prompt in another."""
    region.replace("h", region.call(region.module("patch", Patch), region["h"]))


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100)).eval()


def trained_steering(ids: torch.Tensor, steps: int = 20) -> list[float]:
    model = build()
    peftc.apply(steer, model, at="layer[*].ffn", seed=0)
    optimizer = torch.optim.Adam(peftc.parameters(model).values(), lr=0.05)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def statistics(ids: torch.Tensor) -> list[float]:
    """The standard deviation of each ffn's output."""
    model = build()
    peftc.apply(tap, model, at="layer[*].ffn")
    model(ids)
    modules: list[Any] = [module for module in model.modules() if isinstance(module, Moments)]
    means = [module.sums / module.tokens for module in modules]
    return [float((squares - mean**2).mean().sqrt()) for mean, squares in means]


@torch.no_grad()
def distances(ids: torch.Tensor) -> dict[str, float]:
    """How far each pass moves the logits."""
    before = build()(ids).logits
    moves: dict[str, float] = {}
    for function in (relu_squared, fake_quantize):
        model = peftc.apply(function, build(), at="layer[*].ffn")
        moves[function.__name__] = float((model(ids).logits - before).norm() / before.norm())
    return moves


@torch.no_grad()
def patching(clean: torch.Tensor, other: torch.Tensor) -> list[float]:
    """How much of the clean prompt's last logits comes back, by the layer that is patched."""
    base = build()
    targets = [F.log_softmax(base(ids).logits[:, -1], -1) for ids in (clean, other)]
    scores: list[float] = []
    for layer in range(base.config.num_hidden_layers):
        model = peftc.apply(patch, build(), at=f"layer[{layer}]")
        model(clean)
        for module in model.modules():
            if isinstance(module, Patch):
                module.replaces = True
        patched = F.log_softmax(model(other).logits[:, -1], -1)
        scores.append(float(1 - (patched - targets[0]).norm() / (targets[1] - targets[0]).norm()))
    return scores


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    clean, other = (torch.randint(100, (1, 8), generator=generator) for _ in range(2))
    losses = trained_steering(clean)
    print(f"steering vectors: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print("activations:      ", *(f"{deviation:.4f}" for deviation in statistics(clean)))
    for name, distance in distances(clean).items():
        print(f"{name + ':':18}{distance:.4f}")
    print("patched layers:   ", *(f"{score:.2f}" for score in patching(clean, other)))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    main()
