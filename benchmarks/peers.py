"""What other methods than LoRA cost at run time, beside PEFT's: time over the base, and the bytes
that a training step keeps for its backward.

    python -m benchmarks.peers [--rounds 60] [--methods dora,ia3]

A LLaMA (d 256, 4 layers, 32 tokens), float32, one thread, in turns in one process; CPU time, and
medians of rounds. Adapters have no peer in PEFT.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from benchmarks.common import MODULES, SITES, machine, save, table
from benchmarks.contenders import forward, measured, tokens
from benchmarks.overhead import SHAPES

SHAPE = SHAPES[0]


@dataclass(frozen=True)
class Peer:
    """A method, as a spec and as a configuration of PEFT."""

    edits: str
    config: Callable[[Any], Any]


PEERS: Mapping[str, Peer] = {
    "dora": Peer(
        f"edit e at {SITES} {{ w = magnitude(w + lowrank(r=16, alpha=32)) }}",
        lambda peft: peft.LoraConfig(r=16, lora_alpha=32, target_modules=MODULES, use_dora=True),
    ),
    "ia3": Peer(
        "edit kv at layer[*].attn.k | layer[*].attn.v { h *= vector(init=1) }\n"
        "edit ff at layer[*].ffn.hidden { h *= vector(init=1) }",
        lambda peft: peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "vera": Peer(
        "edit e at layer[*].attn.q | layer[*].attn.o { h += vera(x, r=64) }",
        lambda peft: peft.VeraConfig(r=64, target_modules=["q_proj", "o_proj"]),
    ),
    "prefix": Peer(
        "edit e at layer[*].attn { kv = concat(prefix(len=16), kv) }",
        lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16),
    ),
    "prompt": Peer(
        "edit e at input.embed { h = concat(prompt(len=16), h) }",
        lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16),
    ),
}


def models_of(peer: Peer, base: nn.Module) -> dict[str, nn.Module]:
    """The base, and it with the method by peftc and by PEFT."""
    import peft

    memo = lambda: {id(p): p for p in base.parameters()}  # noqa: E731
    ours = peftc.compile(f"peft 1\n{peer.edits}\n", copy.deepcopy(base, memo()), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own: Any = copy.deepcopy(base, memo())
        theirs: Any = peft.get_peft_model(own, peer.config(peft))
    return {"base": base, "peftc": ours, "PEFT": theirs}


def train(model: nn.Module) -> Callable[[], object]:
    ids = tokens(model, SHAPE, SHAPE.tokens)
    model.train()
    trained = any(p.requires_grad for p in model.parameters())
    embedding: Any = model.get_input_embeddings()  # pyright: ignore
    if not trained:  # the base: gradients flow to the embeddings, as below edits
        embedding.weight.requires_grad_()

    def run() -> object:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    return run


def saved_bytes(model: nn.Module) -> int:
    """The bytes of tensors that a training step keeps for its backward, without parameters."""
    ids = tokens(model, SHAPE, SHAPE.tokens)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    del loss
    return sum(storages.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--methods", default=",".join(PEERS))
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for name in options.methods.split(","):
        models = models_of(PEERS[name], SHAPE.base(torch.float32, "cpu"))
        saved = {who: saved_bytes(models[who]) for who in ("peftc", "PEFT")}
        for work, make in (("forward", lambda model: forward(model, SHAPE)), ("train", train)):
            seconds = measured({n: make(m) for n, m in models.items()}, options.rounds, time.process_time)
            over = {
                who: median(s / b for s, b in zip(seconds[who], seconds["base"], strict=True)) - 1
                for who in ("peftc", "PEFT")
            }
            results.append(
                {"method": name, "work": work, "base": median(seconds["base"]), "over": over, "saved": saved}
            )
            print(results[-1], flush=True)
    rows = [
        [
            r["method"],
            r["work"],
            f"{1e3 * r['base']:.1f} ms",
            *(f"{100 * r['over'][who]:+.1f} %" for who in ("peftc", "PEFT")),
            *(f"{r['saved'][who] / 2**20:.2f} MiB" if r["work"] == "train" else "" for who in ("peftc", "PEFT")),
        ]
        for r in results
    ]
    head = ["method", "work", "base", "peftc", "PEFT", "kept by peftc", "kept by PEFT"]
    text = f"What methods cost over the base ({SHAPE}), float32.\n\n{table(head, rows)}"
    print(f"\n{text}")
    if not options.no_save:
        save("peers", {"rounds": options.rounds, "results": results}, text, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
