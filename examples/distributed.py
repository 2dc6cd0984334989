"""LoRA, adapters and prefixes on sharded weights: tensor parallelism, FSDP2, or both.

One process has all of it:

    python examples/distributed.py

Four processes, of which two share each weight, and two have a half of each batch:

    torchrun --nproc-per-node 4 examples/distributed.py --parallel 2
    accelerate launch --multi_gpu --num_processes 4 examples/distributed.py --parallel 2

All of these print the same losses, and write the same adapter.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import peftc

SPEC = """
peft 1

edit low at layer[*].**.linear { h += lora(x, r=4, alpha=8) }
edit ffn at layer[*].ffn { h += adapter(x, r=8, init=lora) }
edit rows at layer[*].attn { kv = concat(prefix(len=4), kv) }
"""
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
BATCH, LENGTH = 8, 16


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--folder", type=Path, help="of the adapter, which is removed without it")
    result.add_argument("--parallel", type=int, default=1, help="processes that share each weight (default: 1)")
    result.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    return result


OPTIONS = parser().parse_args([])


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64)).double()


def batch(step: int, part: int, parts: int) -> torch.Tensor:
    """The rows of this part of the data. Processes that share weights read the same rows."""
    start = torch.randint(64, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = BATCH // parts
    return ((start + 3 * torch.arange(LENGTH)) % 64)[part * rows :][:rows]  # sequences that can be continued


def shard(model: Any, mesh: Any) -> None:
    """Each weight over the processes of `parallel`, and what is left over those of `data`."""
    styles = {f"layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    styles |= {f"layers.*.{name}": RowwiseParallel() for name in ROWS}
    if mesh["parallel"].size() > 1:
        parallelize_module(model.model, mesh["parallel"], styles)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def main(options: argparse.Namespace | None = None) -> list[float]:
    """Trains, saves and loads an adapter. Returns the losses."""
    folder, parallel, steps = vars(options or OPTIONS).values()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model, part, parts = build(), 0, world // parallel
    peftc.compile(SPEC, model, seed=0)
    if world > 1:
        dist.init_process_group()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, (parts, parallel), mesh_dim_names=("data", "parallel"))
        part = mesh["data"].get_local_rank()
        shard(model, mesh)
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=1e-2)
    losses: list[float] = []
    for step in range(steps):
        ids = batch(step, part, parts).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if world == 1 or dist.get_rank() == 0:
        print(f"losses of {world} processes: {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
        for name in ("low/decoder.layer[0].attn.self.q/lora.B", "ffn/decoder.layer[0].ffn/adapter.up"):
            parameter: Any = peftc.parameters(model)[name]
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            print(f"{name}: {list(parameter.shape)}, here {list(here.shape)}")
    with TemporaryDirectory() as temporary:
        target = Path(temporary) / "adapter" if folder is None else folder
        peftc.save(model, target)  # all processes call it, and the first one writes
        if world == 1 or dist.get_rank() == 0:
            loaded = peftc.load(target, build())  # in one process
            print(f"saved and loaded: {sum(p.numel() for p in peftc.parameters(loaded).values()):,} parameters")
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    OPTIONS = parser().parse_args()
    main()
