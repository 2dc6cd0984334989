"""Where a merge computes. No GPU is needed: moves to one are recorded, and stay on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import peftc
from peftc.cli.main import main
from peftc.folding import rounding, unrounded_parameters
from tests.merging.checkpoints import LINEARS, save_adapter, save_base, tensors

EXPERTS = "edit e at layer[*].ffn.experts[*].up { w += lowrank(r=2) }"
TRAINED = "\ntrain n = [w] at layer[*].ffn.up | layer[*].attn.q"


class Moves(TorchFunctionMode):
    """Records what is moved to a GPU, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = list[tuple[int, ...]]()
        self.back = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.to:
            here = [value.type == "cuda" if isinstance(value, torch.device) else False for value in args[1:]]
            if any(here):
                self.shapes.append(tuple(args[0].shape))
                args = tuple(torch.device("cpu") if i and here[i - 1] else value for i, value in enumerate(args))
        self.back += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "spec"), [("llama", LINEARS + TRAINED), ("mixtral", EXPERTS), ("gpt2", LINEARS)])
def test_weights_and_edits_move(name: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = save_base(tmp_path / "base", name, torch.bfloat16)
    model = save_adapter(tmp_path / "adapter", tmp_path / "base", cls, spec)
    report = peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "cpu", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Moves() as moves:
        peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "cuda")
    parameters = peftc.parameters(model)
    assert {tuple(p.shape) for key, p in parameters.items() if not key.startswith("n/")} <= set(moves.shapes)
    assert len(moves.shapes) >= len(report.tensors)
    assert moves.back >= len(report.tensors)
    one, other = tensors(tmp_path / "cpu"), tensors(tmp_path / "cuda")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cls = save_base(tmp_path / "base", "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", tmp_path / "base", cls, LINEARS)
    paths = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    for device in ("tpu", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(peftc.PeftcError, match="P545"):
            peftc.merge(*paths, device=device)
    if not torch.cuda.is_available():
        assert main(["merge", *paths[:2], "-o", paths[2], "--device", "cuda"]) == 1
        assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gpu_is_not_for_forked_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(peftc.PeftcError, match=r"P545[\s\S]*torchrun"):
        peftc.merge(tmp_path, tmp_path, tmp_path / "out", device="cuda", jobs=2)


def test_products_are_those_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process has chosen faster ones for itself."""
    cls = save_base(tmp_path / "base", "llama", torch.float32)
    model = save_adapter(tmp_path / "adapter", tmp_path / "base", cls, LINEARS)
    before, original, seen = torch.get_float32_matmul_precision(), rounding.rounded_change, list[str]()

    def rounded_change(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return original(*args, **kwargs)

    monkeypatch.setattr(unrounded_parameters, "rounded_change", rounded_change)
    try:
        torch.set_float32_matmul_precision("medium")
        peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
        peftc.fold(model)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
