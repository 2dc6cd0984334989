"""Merging an adapter into a sharded checkpoint that is larger than the memory of the merge.

python examples/workflows/merging.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from models import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import peftc

SPEC = """
peft 1
edit attention at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o { h += lora(x, r=8) }
edit ffn at layer[*].ffn.gate | layer[*].ffn.up | layer[*].ffn.down { h += lora(x, r=8) }
"""
# VmHWM is the peak of this process alone, where ru_maxrss has that of its parent in it.
MERGE = """
import sys, peftc
print(peftc.merge(*sys.argv[1:], verify=True))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write_base(folder: Path) -> int:
    """A LLaMA of 1.5 GB in bf16, in files of 200 MB; the size in bytes."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, **SIZES
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main(folder: Path) -> None:
    size = write_base(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    peftc.compile(SPEC, model, seed=0)
    for parameter in peftc.parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.02)
    peftc.save(model, folder / "adapter")
    peftc.fold(model)
    folded = model.state_dict()

    command = [sys.executable, "-c", MERGE, folder / "base", folder / "adapter", folder / "merged"]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    memory = 1024 * int(report.split()[-1])
    assert memory < size, f"the merge took {memory / 1e9:.2f} GB of memory for {size / 1e9:.2f} GB of weights"

    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    assert merged.keys() == folded.keys()
    assert all(torch.equal(merged[name], folded[name]) for name in merged)
    print(f"merging: {size / 1e9:.2f} GB of weights in {memory / 1e9:.2f} GB of memory; merge and fold agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(Path(work))
