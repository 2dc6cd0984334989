"""Bases that transformers quantises when it loads them, with libraries that stand apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from tests import zoo

# Where `make` and `make quantized` install them: every process that finds them imports them.
FOLDERS = [Path(sys.prefix) / "torchao", Path(__file__).parents[2] / ".venv-quantized" / "packages"]
needs_libraries = pytest.mark.skipif(
    os.environ.get("PEFTC_TESTS") not in ("quantized", "full"), reason="`make quantized` runs these"
)
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "bert": {"hidden_size": 64, "intermediate_size": 64},
}


def whole(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """A base with all bits, which it also writes into a folder."""
    model = zoo.build(name, dtype, **WIDE[name]).eval()
    if not folder.exists():
        model.save_pretrained(folder)
    return model


def quantised(folder: Path, config: Any, name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return type(whole(folder, name, dtype)).from_pretrained(folder, quantization_config=config, dtype=dtype).eval()


def add_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    for known in (import_utils.is_torchao_available, import_utils.is_bitsandbytes_available):
        known.cache_clear()  # without them, before
