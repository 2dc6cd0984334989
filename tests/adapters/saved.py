"""Models to save, and changes of the description and of the tensors of a saved adapter."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import peftc
from peftc.adapters.metadata import METADATA
from tests import zoo
from tests.laws.harness import Before, randomise

SPEC = (
    "let s = shared(lora(r=2))\n"
    "edit enc.q at layer[*].attn.q { h += lora(x, r=2) }\n"
    "edit k at layer[*].attn.k { h += s(x) }\n"
    "edit f at layer[*].ffn { let g = gate(x)  h += g * adapter(h, r=2) }\n"
    "train n = [w, b] at layer[*].norm\n"
    "expect stored > 10"
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PREFIX = "edit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }"


def compiled(name: str, spec: str = SPEC, dtype: torch.dtype = torch.float32, **base: Any) -> nn.Module:
    model = zoo.build(name, dtype, **base)
    peftc.compile("peft 1\n" + spec, model, seed=3)
    randomise(peftc.parameters(model))
    return model


@torch.no_grad()
def logits(name: str, model: nn.Module) -> torch.Tensor:
    return model(**zoo.inputs(name, model))[0]


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / METADATA).read_text())


def describe(folder: Path, **changes: Any) -> None:
    (folder / METADATA).write_text(json.dumps(description(folder) | changes))


def tensors_of(folder: Path) -> Path:
    """The file of tensors that the description names."""
    return folder / description(folder)["file"]


def retensor(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the tensors, with a description that matches them."""
    save_file(tensors, tensors_of(folder))
    shapes = {n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in tensors.items()}
    describe(folder, tensors=shapes, sha256=hashlib.sha256(tensors_of(folder).read_bytes()).hexdigest())


def refused(folder: Path, model: nn.Module, code: str, **kwargs: Any) -> peftc.Diagnostic:
    """Loading fails with this code, and the model is unchanged."""
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.load(folder, model, **kwargs)
    before.assert_same(model)
    (result,) = excinfo.value.diagnostics
    assert result.code == code, result
    return result
