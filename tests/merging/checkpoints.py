"""Tiny checkpoints on disk, and adapters for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import randomise

SHARDS = "20KB"
LORA = "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }"
LINEARS = (
    "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }\n"
    "edit b at layer[*].ffn.hidden { h *= vector(init=1) }\n"
    "edit c at layer[*].attn.k { w = magnitude(w + lowrank(r=2)) }\n"
    "edit d at layer[*].ffn.down { h += 0.5 * lora(x, r=2) }\n"
)


def save_base(folder: Path, name: str, dtype: torch.dtype, shards: str = SHARDS, **options: Any) -> Any:
    """Writes a tiny model. Returns: its class."""
    model: Any = zoo.build(name, dtype, **options)
    model.save_pretrained(folder, max_shard_size=shards)
    return type(model)


def save_adapter(folder: Path, base: Path, cls: Any, spec: str, seed: int = 0) -> nn.Module:
    """Writes an adapter with random values. Returns: the loaded base with it."""
    model: Any = cls.from_pretrained(base, dtype="auto").eval()
    peftc.compile(f"peft 1\n{spec}\n", model, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        randomise(peftc.parameters(model))
    peftc.save(model, folder)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def assert_merged(out: Path, base: Path, folded: nn.Module, dtype: torch.dtype) -> list[str]:
    """`out` has the keys, files and headers of `base`, and loads as the folded model, bit for bit.

    Args: `dtype`: of the files; transformers loads some parameters in another one.
    Returns: the keys that differ from the base's.
    """
    cls: Any = type(folded)
    loaded = cls.from_pretrained(out, dtype="auto")
    expected, actual = dict(folded.named_parameters()), dict(loaded.named_parameters())
    assert actual.keys() == expected.keys()
    for n, value in expected.items():
        assert same_bits(value.data.to(dtype).to(value.dtype), actual[n].data), n
    for file in base.glob("*.safetensors"):
        data, new = file.read_bytes(), (out / file.name).read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        assert (len(new), new[:header]) == (len(data), data[:header])
    for file in ("config.json", "model.safetensors.index.json"):
        assert not (base / file).exists() or json.loads((out / file).read_text()) == json.loads(
            (base / file).read_text()
        )
    before, after = tensors(base), tensors(out)
    return [key for key in before if not same_bits(before[key], after[key])]
