"""ZeRO-3 of DeepSpeed: parameters are empty, and their modules have them in a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo

SPEC = """peft 1

edit low at layer[*].**.linear { h += lora(x, r=2) }
edit ffn at layer[*].ffn { h += adapter(x, r=3) }
edit rows at layer[*].attn { kv = concat(prefix(len=2), kv) }
"""


class Partition:
    """A stand-in for DeepSpeed: takes the entries of parameters, and gives them in calls."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[int, torch.Tensor] = {}
        for parameter in model.parameters():
            self.values[id(parameter)] = parameter.data
            parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        for module in model.modules():
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.release)
            self.release(module)

    def gather(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = self.values[id(parameter)]

    def release(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)


def drawn(name: str) -> nn.Module:
    model = peftc.compile(SPEC, zoo.build(name, torch.float64).eval(), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.normal_(generator=generator)
    return model


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_new_calls_are_traced_by_the_sizes_of_whole_parameters(name: str) -> None:
    model: Any = drawn(name)
    inputs = zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**inputs).logits
        Partition(model)
        torch.testing.assert_close(model(**inputs).logits, want, rtol=0, atol=1e-12)


CHANGES: dict[str, Callable[[nn.Module, Path], object]] = {
    "compile": lambda model, _: peftc.compile("peft 1\n\nedit more at layer[*].ffn { h += lora(x, r=2) }\n", model),
    "save": peftc.save,
    "load": lambda model, path: peftc.load(path / "saved", model, prefix="further"),
    "fold": lambda model, _: peftc.fold(model),
}


@pytest.mark.parametrize("change", CHANGES)
def test_empty_parameters_are_refused(change: str, tmp_path: Path) -> None:
    model = drawn("llama")
    peftc.save(model, tmp_path / "saved")
    Partition(model)
    with pytest.raises(peftc.PeftcError, match="P450"):
        CHANGES[change](model, tmp_path)
