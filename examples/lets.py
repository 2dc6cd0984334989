"""LeTS: parts beside a model that stays as it is, and a search for the layers that have one.

The spec is `lets.peft`: every layer has an adapter that reads the unchanged state, under a gate
that is learnt; the last layer adds them up, so no gradient enters the model, and one run of it
serves several tasks. `peftc.calibrate` keeps the layers with the largest gates, and training goes
on with these. Nothing is downloaded.

Fu et al. 2021, "Learn-to-Share: A Hardware-friendly Transfer Learning Framework Exploiting
Computation and Parameter Sharing", PMLR 139:3469-3479.

python examples/lets.py
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import small_lm
import torch
from small_lm import CausalLM
from torch import Tensor, nn

import peftc

SPEC = Path(__file__).resolve().parent / "lets.peft"
LAYERS, PARTS = 6, 3


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    """-log p of the text, and what the open gates cost."""
    return small_lm.loss_of(model, blocks) + sum(peftc.losses(model).values())


def train(model: CausalLM, steps: int) -> None:
    named = peftc.parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if not name.endswith("alpha")], "lr": 1e-2},
        {"params": alphas(model), "lr": 1e-1},  # as in Diff Pruning, whose gates these are
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    small_lm.train(model, optimizer, small_lm.corpus(small_lm.TASK)[0], steps, loss_of)


def alphas(model: CausalLM) -> list[nn.Parameter]:
    """α of each layer, from the lowest on."""
    return [p for name, p in peftc.parameters(model).items() if name.endswith("alpha")]


def layers_with_a_part(model: CausalLM) -> list[int]:
    gates = [p for name, p in peftc.parameters(model).items() if name.endswith("gate")]
    return [layer for layer, gate in enumerate(gates) if float(gate.detach())]


def choose(model: CausalLM, best: bool = True) -> CausalLM:
    """A copy with the parts of the largest gates, or of the smallest."""
    chosen = copy.deepcopy(model)
    with torch.no_grad():
        for alpha in () if best else alphas(chosen):
            alpha.neg_()
    peftc.calibrate(chosen)
    return chosen


def at_the_papers_size() -> None:
    """Parameters for BERT-large with parts in half of its layers; no weights are read."""
    plan = peftc.plan(SPEC, "bert-large-uncased", settings={"r": 192, "n": 12})
    left = plan.totals.stored // 2
    print(f"\nBERT-large, r = 192, parts in 12 of 24 layers: {left:,} parameters a task, ", end="")
    print(f"{left / plan.totals.base:.1%} of the model;")
    print("  the paper has 1.4 %, in sparse changes of weights (abstract)")


def main(steps: int = 80) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # stable timing on a busy machine
    torch.manual_seed(0)
    base = small_lm.pretrained(small_lm.small_llama(LAYERS), 2 * steps)
    learn, held_out = small_lm.corpus(small_lm.TASK)
    print(f"{'nats a character of the task':38}")
    print(f"  {'model':36}{small_lm.held_out_loss(base, held_out):.3f}")

    model = peftc.compile(SPEC, copy.deepcopy(base), seed=0, settings={"n": PARTS})
    train(model, steps)
    print(f"  {'parts in all layers, under gates':36}{small_lm.held_out_loss(model, held_out):.3f}")
    print("  α of the layers: " + ", ".join(f"{float(alpha.detach()):.2f}" for alpha in alphas(model)))
    other, model = choose(model, best=False), choose(model)
    for name, one in (("smallest", other), ("largest", model)):
        print(f"  {f'the {PARTS} with the {name} gates':36}{small_lm.held_out_loss(one, held_out):.3f}")
    train(model, steps)
    print(f"  {'these after more training':36}{small_lm.held_out_loss(model, held_out):.3f}")
    print(f"  layers with a part: {layers_with_a_part(model)}")

    states, own = (one.model(learn[:8, :-1], output_hidden_states=True).hidden_states for one in (model, base))
    same = [torch.equal(one, two) for one, two in zip(states, own, strict=True)]
    print(f"\nstates below the last layer are those of the model: {all(same[:-1])}; the last one: {same[-1]}")
    at_the_papers_size()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
