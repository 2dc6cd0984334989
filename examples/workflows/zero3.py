"""ZeRO-3 of DeepSpeed through accelerate: two processes have the losses of one.

DeepSpeed is not among what `make workflows` installs, since it is built from source. To run this:

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
    python examples/workflows/zero3.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.run import main as torchrun
from transformers import LlamaConfig, LlamaForCausalLM

import peftc

SPEC = """
peft 1

edit low at layer[*].**.linear { h += lora(x, r=4, alpha=8) }
edit ffn at layer[*].ffn { h += adapter(x, r=8, init=lora) }
edit rows at layer[*].attn { kv = concat(prefix(len=4), kv) }
"""
PROCESSES, BATCH, LENGTH, STEPS = 2, 8, 16, 5
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH // PROCESSES,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # no parameter is left whole
}


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))


def build() -> Any:
    return peftc.compile(SPEC, base(), seed=0).train()


def batch(step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    start = torch.randint(64, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = BATCH // parts
    return ((start + 3 * torch.arange(LENGTH)) % 64)[part * rows :][:rows]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_alone() -> tuple[list[float], Any]:
    model = build()
    optimizer, losses = optimizer_of(model), list[float]()
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train_partitioned(folder: Path) -> None:
    """One of the processes."""
    deepspeed.init_distributed(dist_backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    model = build()
    engine, optimizer = accelerator.prepare(model, optimizer_of(model))
    rank, losses = dist.get_rank(), list[float]()
    for step in range(STEPS):
        ids = batch(step, rank, PROCESSES)
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / PROCESSES)
    assert all(p.numel() == 0 for p in model.parameters()), "each parameter is in parts"
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            peftc.save(model, folder / "adapter")
            torch.save(losses, folder / "losses.pt")
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        train_partitioned(Path(sys.argv[1]))
        return
    losses, model = train_alone()
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        torchrun(["--nproc-per-node", str(PROCESSES), "--standalone", __file__, folder])
        others = torch.load(Path(folder) / "losses.pt")
        print(f"one process {losses}\ntwo processes {others}")
        torch.testing.assert_close(others, losses, rtol=1e-5, atol=1e-5)
        loaded = peftc.load(Path(folder) / "adapter", base())
        ids = batch(STEPS)
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-3)
    print("ZeRO-3 and one process agree")


if __name__ == "__main__":
    main()
