"""Rewriting passes beside nnsight and pyvene: the same interventions, compared bit for bit.

pip install --no-deps nnsight==0.8.1 greenlet pyvene==0.1.8
pip install --no-deps matplotlib pillow cycler kiwisolver fonttools
python -m benchmarks.interventions

The lines of docs/passes.md are those of this file.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftc

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
LAYERS = range(SIZES["num_hidden_layers"])
FFNS = "layer[*].ffn"
IDS, OTHER = torch.arange(8)[None], torch.arange(8).flip(0)[None]
V = torch.randn(SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))


def build() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=100)).eval()


def quantized(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)


class Tap(nn.Module):
    """The means of what it reads."""

    means: list[Tensor] = []  # noqa: RUF012  # of all sites

    def forward(self, h: Tensor) -> None:
        self.means.append(h.mean((0, 1)))


class Patch(nn.Module):
    """The last token of another prompt in the place of its own."""

    stored: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        return h * 1 if self.stored is None else torch.cat([h[:, :-1], self.stored[:, -1:]], 1)


def of_peftc() -> dict[str, Tensor]:
    def steer(region: Any) -> None:
        region.replace("ffn.h", region.call(torch.add, region["ffn.h"], region.buffer("v", V)))

    def tap(region: Any) -> None:
        region.call(region.module("tap", Tap), region["ffn.h"])

    def relu_squared(region: Any) -> None:
        activation = region.call(torch.square, region.call(torch.relu, region["ffn.gate.h"]))
        region.replace("ffn.z", region.call(operator.mul, activation, region["ffn.up.h"]))

    def quantize(region: Any) -> None:
        region.replace("ffn.x", region.call(quantized, region["ffn.x"]))

    def patch(region: Any) -> None:
        region.replace("h", region.call(region.module("patch", Patch), region["h"]))

    Tap.means.clear()
    peftc.apply(tap, build(), at=FFNS)(IDS)
    means = Tap.means[-len(LAYERS) :]
    patched = peftc.apply(patch, build(), at="layer[1]")
    next(m for m in patched.modules() if isinstance(m, Patch)).stored = (
        build().model(IDS, output_hidden_states=True).hidden_states[2]
    )
    logits: dict[str, Tensor] = {
        function.__name__: peftc.apply(function, build(), at=FFNS)(IDS).logits
        for function in (steer, relu_squared, quantize)
    }
    return {**logits, "tap": torch.stack(means), "patch": patched(OTHER).logits}


def of_nnsight() -> dict[str, Tensor]:
    nnsight: Any = importlib.import_module("nnsight")
    results: dict[str, Tensor] = {}
    model = nnsight.NNsight(build())
    with model.trace(IDS):
        for layer in model.model.layers:
            layer.mlp.output = layer.mlp.output + V
        logits = model.lm_head.output.save()
    results["steer"] = logits
    model = nnsight.NNsight(build())
    with model.trace(IDS):
        means = list().save()  # noqa: C408  # nnsight's
        for layer in model.model.layers:
            means.append(layer.mlp.output.mean((0, 1)))
    results["tap"] = torch.stack(list(means))
    model = nnsight.NNsight(build())
    with model.trace(IDS):
        for layer in model.model.layers:
            layer.mlp.act_fn.output = torch.square(torch.relu(layer.mlp.gate_proj.output))
        logits = model.lm_head.output.save()
    results["relu_squared"] = logits
    model = nnsight.NNsight(build())
    with model.trace(IDS):
        for layer in model.model.layers:
            layer.mlp.input = quantized(layer.mlp.input)
        logits = model.lm_head.output.save()
    results["quantize"] = logits
    model = nnsight.NNsight(build())
    with model.trace(IDS):
        stored = model.model.layers[1].output[:, -1].save()
    with model.trace(OTHER):
        model.model.layers[1].output[:, -1] = stored
        logits = model.lm_head.output.save()
    return {**results, "patch": logits}


def of_pyvene() -> dict[str, Tensor]:
    """Another activation is missing: an intervention sees one value."""
    pv: Any = importlib.import_module("pyvene")
    means: list[Tensor] = []

    def at_ffns(side: str, function: Callable[[Tensor, Any], Tensor]) -> Any:
        places = [{"component": f"model.layers[{i}].mlp.{side}", "intervention": function} for i in LAYERS]
        return pv.IntervenableModel(places, model=build())

    def tap(base: Tensor, _: Any) -> Tensor:
        means.append(base.mean((0, 1)))
        return base

    steered = at_ffns("output", lambda base, source: base + V)
    rounded = at_ffns("input", lambda base, source: quantized(base))
    at_ffns("output", tap)({"input_ids": IDS})
    place = {"layer": 1, "component": "block_output", "intervention_type": pv.VanillaIntervention}
    patched = pv.IntervenableModel(place, model=build())
    return {
        "steer": steered({"input_ids": IDS})[1].logits,
        "quantize": rounded({"input_ids": IDS})[1].logits,
        "tap": torch.stack(means),
        "patch": patched({"input_ids": OTHER}, [{"input_ids": IDS}], {"sources->base": 7})[1].logits,
    }


@torch.no_grad()
def main() -> None:
    own = of_peftc()
    base = build()(IDS).logits
    assert all(not torch.equal(value, base) for value in own.values())
    print("| | nnsight | pyvene |\n|---|---|---|")
    others = (of_nnsight(), of_pyvene())
    for name, value in own.items():
        results = (other.get(name) for other in others)
        cells = ("—" if one is None else "equal" if torch.equal(one, value) else "differs" for one in results)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
