"""Rows that join an attention which the model computes itself."""

from __future__ import annotations

import torch

import peftc
from benchmarks.families import build


def test_a_scale_of_joined_rows_takes_its_dtype_from_the_keys() -> None:
    """A form without an input has no keys to read here: the attention is no call of a function."""
    outputs = list[torch.Tensor]()
    for factor, scale in (("scalar(init=3) * ", 1), ("", 3)):
        model, inputs = build("causal-lm", "bloom")
        model = model.double()
        peftc.compile(f"peft 2\nedit e at layer[*].attn {{ kv = concat({factor}prefix(len=3), kv) }}\n", model, seed=0)
        with torch.no_grad():
            for name, parameter in peftc.parameters(model).items():
                if name.endswith((".key", ".value")):
                    torch.manual_seed(len(name))
                    parameter.copy_(scale * torch.randn(parameter.shape, dtype=torch.float64))
            outputs.append(model(**inputs).logits)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-10)
