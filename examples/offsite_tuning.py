"""Offsite-tuning: the first and the last layers are tuned on an emulator, and plugged into the
model that its owner keeps.

The owner drops middle layers, distils those that are left, and sends the emulator. Who has the
data trains its first and last layers, which a `train` statement selects, and sends these back.
Nothing is downloaded.

Xiao et al. 2023, "Offsite-Tuning: Transfer Learning without Full Model", arXiv:2302.04870.

python examples/offsite_tuning.py
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
import time
from pathlib import Path

import small_lm
import torch
from small_lm import CausalLM
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig

import peftc

ENDS = "peft 1  train ends = [w, b] at layer[0..{last}].** | layer[-{count}..].**"  # the adapter of the paper
EVERYTHING = "peft 1  train every = [w, b] at layer[*].**"
LAYERS, MIDDLE = 6, 2  # of the model, and of the emulator between its first and its last layer


def ends(count: int) -> str:
    """The spec that trains the first and the last `count` layers."""
    return ENDS.format(last=count - 1, count=count)


def emulated_layers(layers: int, middle: int, count: int = 1) -> list[int]:
    """The layers that an emulator has: the first and the last `count`, and so many of the others,
    at equal distances.

    Source: section 3.4 (layer drop), distances as in the authors' code.
    """
    between = layers - 2 * count
    stride = (between - 1) / (middle - 1)
    chosen = [count + round(i * stride) for i in range(middle)]
    return [*range(count), *chosen, *range(layers - count, layers)]


def emulator_of(model: CausalLM, layers: list[int]) -> CausalLM:
    """A model of these layers, with copies of their weights."""
    numbers = {old: new for new, old in enumerate(layers)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None:
            state[name] = value
        elif (old := int(layer[1])) in numbers:
            state[name.replace(layer[0], f"layers.{numbers[old]}.")] = value
    config: LlamaConfig = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    emulator = LlamaForCausalLM(config)
    emulator.load_state_dict(state)
    return emulator.eval()


def distill(emulator: CausalLM, teacher: CausalLM, steps: int) -> None:
    """Trains the middle layers to give the last layer what those of the teacher give: the mean
    squared difference of the two states, on text of the owner.

    Source: section 3.4 (knowledge distillation).
    """

    def loss(model: nn.Module, blocks: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = before_the_last(teacher, blocks)
        return nn.functional.mse_loss(before_the_last(model, blocks), wanted)

    middle = f"peft 1  train middle = [w, b] at layer[1..{MIDDLE}].**"
    peftc.compile(middle, emulator)
    optimizer = torch.optim.AdamW(peftc.parameters(emulator).values(), lr=3e-3)
    small_lm.train(emulator, optimizer, small_lm.corpus(small_lm.PROSE)[0], steps, loss)
    peftc.fold(emulator)  # what is trained is what the model now is


def before_the_last(model: nn.Module, blocks: Tensor) -> Tensor:
    """What the last layer reads, (blocks, characters, d)."""
    return model(input_ids=blocks[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-2]


def fine_tune(model: CausalLM, spec: str, steps: int) -> CausalLM:
    """Trains what the spec selects on the task."""
    peftc.compile(spec, model)
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=2e-3)
    small_lm.train(model, optimizer, small_lm.corpus(small_lm.TASK)[0], steps)
    return model


def plug_in(emulator: CausalLM, model: CausalLM) -> CausalLM:
    """Gives the model the trained layers of the emulator; the last has another number there."""
    peftc.compile(ends(1), model)
    trained = peftc.parameters(emulator)
    here, there = (f".layers.{one.config.num_hidden_layers - 1}." for one in (model, emulator))
    with torch.no_grad():
        for name, parameter in peftc.parameters(model).items():
            parameter.copy_(trained[name.replace(here, there)])
    return model


def adapter_bytes(model: CausalLM) -> int:
    """The size of the file with the trained layers."""
    with tempfile.TemporaryDirectory() as folder:
        peftc.save(model, Path(folder) / "ends")
        return sum(path.stat().st_size for path in (Path(folder) / "ends").glob("*.safetensors"))


def at_the_papers_size() -> None:
    """What travels for OPT 1.3B: two layers at each end, and eight of the twenty others, as in the
    authors' scripts.
    """
    config = OPTConfig(vocab_size=50272, hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32)
    plan, small = peftc.plan(ends(2), config), copy.deepcopy(config)
    small.num_hidden_layers = len(emulated_layers(24, 8, count=2))
    emulator = peftc.plan(ends(2), small)
    print(f"\nOPT 1.3B, {plan.totals.base:,} parameters, and its emulator of {small.num_hidden_layers} layers:")
    print(f"  sent to the owner of the data {emulator.totals.base:13,}  {emulator.totals.base / plan.totals.base:6.1%}")
    print(f"  trained there, and sent back  {plan.totals.trained:13,}  {plan.totals.trained / plan.totals.base:6.1%}")


def main(steps: int = 80) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # stable timing on a busy machine
    torch.manual_seed(0)
    base = small_lm.pretrained(small_lm.small_llama(LAYERS), 3 * steps)
    _, held_out = small_lm.corpus(small_lm.TASK)
    _, prose = small_lm.corpus(small_lm.PROSE)

    chosen = emulated_layers(LAYERS, MIDDLE)
    emulator = emulator_of(base, chosen)
    part = emulator.num_parameters() / base.num_parameters()
    print(f"emulator: layers {chosen} of {LAYERS}, {part:.0%} of the parameters")
    dropped = small_lm.held_out_loss(emulator, prose)
    distill(emulator, base, steps // 2)
    full, distilled = (small_lm.held_out_loss(model, prose) for model in (base, emulator))
    print(f"nats a character of prose: model {full:.3f}, layers dropped {dropped:.3f}, distilled {distilled:.3f}")

    untuned = small_lm.held_out_loss(emulator, held_out)
    tuned = fine_tune(copy.deepcopy(emulator), ends(1), steps)
    numbers = sum(parameter.numel() for parameter in peftc.parameters(tuned).values())
    print(f"trained on it: {numbers:,} parameters, a file of {adapter_bytes(tuned):,} bytes")
    plugged = plug_in(tuned, copy.deepcopy(base))
    with peftc.disabled(plugged):
        same = small_lm.held_out_loss(plugged, held_out) == small_lm.held_out_loss(base, held_out)
    print(f"without the plug-in the model is as it was: {same}")
    rows = {
        "model, zero-shot": base,
        "emulator, fine-tuned": tuned,
        "model with the plug-in": plugged,
        "model, fine-tuned there": fine_tune(copy.deepcopy(base), ends(1), steps),
        "model, fine-tuned in full": fine_tune(copy.deepcopy(base), EVERYTHING, steps),
    }
    print(f"\n{'nats a character of the task':28}")
    print(f"  {'emulator, zero-shot':28}{untuned:.3f}")
    for name, model in rows.items():
        print(f"  {name:28}{small_lm.held_out_loss(model, held_out):.3f}")
    at_the_papers_size()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
