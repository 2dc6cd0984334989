"""An edit has the same effect in every mode: in training without dropout, in evaluation, without
gradients, folded, and as a hand-written model.

In evaluation torch's transformer modules run a fused kernel, which reads the weights of their
children and does not call them. It runs if the base is frozen, as it is under edits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.laws.harness import randomise
from tests.survival import harness

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
D, FFN, HEADS = 16, 24, 4
X, MEMORY = torch.randn(2, 2, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.tensor([[False, False, False, True, True], [False] * 5])
SPECS = {
    "parallel": "layer[*].ffn { h += adapter(x, r=2, act=gelu) }",
    "sequential": "layer[*].attn { h += adapter(h, r=2, act=gelu) }",
    "hidden": "layer[*].ffn.hidden { h *= vector() }",
    "up": "layer[*].ffn.up { h += lora(x, r=2, alpha=4) }",
    "down": "layer[*].ffn.down { w = magnitude(w + lowrank(r=2)) }",
    "o": "layer[*].attn.o { h += lora(x, r=2, alpha=4) }",
    "o's weight": "layer[*].attn.o { w += lowrank(r=2, alpha=4) }",
    "norm": "layer[*].ffn.norm { h *= vector() }",
    "prefix": "layer[*].attn { kv = concat(prefix(len=2), kv) }",
}
FOLDING = ("hidden", "up", "down", "o", "o's weight")


class Block(nn.Module):
    """A hand-written layer with nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.linear1, self.linear2 = nn.Linear(D, FFN), nn.Linear(FFN, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        return x + self.linear2(torch.relu(self.linear1(self.norm2(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, FFN, 0.0, batch_first=True, **options), 2)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, FFN, 0.0, batch_first=True), 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "encoder": (encoder, {"src": X}),
    "encoder, norm first": (lambda: encoder(norm_first=True, activation="gelu"), {"src": X}),
    "encoder, padding": (encoder, {"src": X, "src_key_padding_mask": PADDING}),
    "decoder": (decoder, {"tgt": X, "memory": MEMORY}),
    "by hand": (Blocks, {"x": X, "mask": PADDING}),
}


# All specs on the first, some on each other model.
PAIRS = [(n, s) for i, n in enumerate(MODELS) for j, s in enumerate(SPECS) if not i or (i + j) % 3 == 0]


@cache
def pristine(name: str) -> nn.Module:
    model = MODELS[name][0]().double().eval()
    zoo.randomise(model, torch.Generator().manual_seed(1))
    return model.requires_grad_(False)  # torch's kernels differ in the last bits if the base is not frozen


def compiled(name: str, spec: str) -> nn.Module:
    model = peftc.compile(f"peft 1\nedit e at {SPECS[spec]}", copy.deepcopy(pristine(name)), 0, sample=MODELS[name][1])
    randomise(peftc.parameters(model))
    return model


@contextmanager
def mode(name: str, model: nn.Module) -> Iterator[None]:
    model.train(name == "train")
    blocks = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with blocks[name]() if name in blocks else torch.enable_grad():
        yield


def visible(name: str, out: Tensor) -> Tensor:
    """Without padded tokens: torch's own modes differ there."""
    return out[~PADDING].detach() if "padding" in name or name == "by hand" else out.detach()


def run(name: str, model: nn.Module, inputs: dict[str, Tensor], how: str) -> Tensor:
    with mode(how, model):
        return visible(name, model(**inputs))


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-10 * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize(("name", "spec"), PAIRS)
def test_one_effect_in_all_modes(name: str, spec: str) -> None:
    inputs = MODELS[name][1]
    base, model = pristine(name), compiled(name, spec)
    before = run(name, base, inputs, "no_grad")
    want = run(name, by_hand(name, spec, peftc.parameters(model)), inputs, "train") if spec in BY_HAND else None
    effects = {how: run(name, model, inputs, how) for how in ("train", "eval", "no_grad", "inference_mode")}
    assert (effects["train"] - before).abs().max() > 1e-3
    assert all(close(out, effects["train"]) for out in effects.values()), effects
    assert want is None or close(effects["train"], want)
    with peftc.disabled(model.eval()), torch.no_grad():
        assert torch.equal(visible(name, model(**inputs)), before)
    if spec in FOLDING:
        folded = copy.deepcopy(model)
        assert peftc.fold(folded).folded
        assert close(run(name, folded, inputs, "no_grad"), effects["train"])
    assert torch.equal(run(name, peftc.remove(model), inputs, "no_grad"), before)


@pytest.mark.parametrize(("name", "spec"), harness.SOME)
def test_one_effect_in_all_modes_of_transformers(name: str, spec: str) -> None:
    """`tests/laws` compares evaluation mode with hand-written layers."""
    model = harness.compiled(name, spec)
    inputs = zoo.inputs(name, model)

    def out(how: str) -> Tensor:
        with mode(how, model):
            return model(**inputs)[0].detach()

    want = out("eval")
    with peftc.disabled(model):
        assert (out("eval") - want).abs().max() > 1e-3
    assert all(close(out(how), want) for how in ("train", "no_grad", "inference_mode"))
    if spec == "lora":
        assert peftc.fold(model).folded
        assert close(out("no_grad"), want)


# The reference: torch's hooks, which make modules call their children, and edited weights
# ------------------------

Weights = dict[str, Tensor]


def by_hand(name: str, spec: str, parameters: dict[str, nn.Parameter]) -> nn.Module:
    model = copy.deepcopy(pristine(name))
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    for i, layer in enumerate(model.layers):  # pyright: ignore
        own = {
            k.rpartition(".")[2]: p.detach() for k, p in parameters.items() if f"layer[{i}]" in k and "cross" not in k
        }
        crossing = {k.rpartition(".")[2]: p.detach() for k, p in parameters.items() if f"layer[{i}].attn.cross" in k}
        BY_HAND[spec](layer, own, layer.self_attn)
        if crossing:
            BY_HAND[spec](layer, crossing, layer.multihead_attn)
    return model


def adapter(x: Tensor, w: Weights) -> Tensor:
    return nn.functional.gelu(x @ w["down"].T + w["down_bias"]) @ w["up"].T + w["up_bias"]


def parallel(layer: Any, w: Weights, _: nn.Module) -> None:
    outputs: list[Tensor] = []
    layer.linear1.register_forward_pre_hook(lambda m, args: outputs.append(args[0]))
    layer.linear2.register_forward_hook(lambda m, args, out: out + adapter(outputs.pop(), w))


def sequential(layer: Any, w: Weights, attention: nn.Module) -> None:
    attention.register_forward_hook(lambda m, args, out: (out[0] + adapter(out[0], w), *out[1:]))


def hidden(layer: Any, w: Weights, _: nn.Module) -> None:
    layer.linear2.register_forward_pre_hook(lambda m, args: (args[0] * w["scale"],))


def norm(layer: Any, w: Weights, _: nn.Module) -> None:
    last = getattr(layer, "norm3", layer.norm2)
    last.register_forward_hook(lambda m, args, out: out * w["scale"])


@torch.no_grad()
def up(layer: Any, w: Weights, _: nn.Module) -> None:
    layer.linear1.weight += 4 / 2 * w["B"] @ w["A"]


@torch.no_grad()
def out(layer: Any, w: Weights, attention: Any) -> None:
    attention.out_proj.weight += 4 / 2 * w["B"] @ w["A"]


BY_HAND: dict[str, Callable[[Any, Weights, nn.Module], None]] = {
    "parallel": parallel,
    "sequential": sequential,
    "hidden": hidden,
    "norm": norm,
    "up": up,
    "o": out,
    "o's weight": out,
}
