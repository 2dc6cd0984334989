"""Types of PEFT that draw places or matrices, or decompose the base, compute here what they do there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from tests.exchange.types_of_peft import Case, assert_comes, assert_comes_and_goes_back

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Specified to not"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LLAMA: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "down_proj"]}
BERT: dict[str, Any] = {"target_modules": ["query", "dense"]}
GPT: dict[str, Any] = {"target_modules": ["c_attn", "c_fc"]}
CASES: dict[str, Case] = {
    "Uni-LoRA": ("llama", peft.UniLoraConfig, {"r": 2, "theta_d_length": 50, "save_indices": True, **LLAMA}),
    "TinyLoRA": ("llama", peft.TinyLoraConfig, {"r": 2, "u": 5, **LLAMA}),
    "TinyLoRA, tied, of a Conv1D": ("gpt2", peft.TinyLoraConfig, {"r": 3, "u": 5, "weight_tying": 0.5, **GPT}),
    "WaveFT": ("llama", peft.WaveFTConfig, {"n_frequency": 60, **LLAMA}),
    "WaveFT, db4": (
        "bert",
        peft.WaveFTConfig,
        {"n_frequency": 60, "wavelet_family": "db4", "scaling": 5.0, "random_loc_seed": 3, **BERT},
    ),
    "WaveFT with a pattern": (
        "llama",
        peft.WaveFTConfig,
        {"n_frequency": 60, "wavelet_family": "coif2", "n_frequency_pattern": {"q_proj": 10}, **LLAMA},
    ),
    "WaveFT without wavelets, of a Conv1D": ("gpt2", peft.WaveFTConfig, {"n_frequency": 60, "use_idwt": False, **GPT}),
    "PVeRA": ("llama", peft.PveraConfig, {"r": 4, **LLAMA}),
    "OSF": ("llama", peft.OSFConfig, {"effective_rank": 20, "rank_pattern": {"q_proj": 0.25}, **LLAMA}),
}
ONE_WAY: dict[str, Case] = {
    "FRoD": ("llama", peft.FrodConfig, {"sparse_rate": 0.1, "progressbar": False, **LLAMA}),
    "FRoD of roles": ("bert", peft.FrodConfig, {"progressbar": False, **BERT}),
    "Uni-LoRA, drawn": ("llama", peft.UniLoraConfig, {"r": 2, "theta_d_length": 500, **LLAMA}),
    "Uni-LoRA of a Conv1D": ("gpt2", peft.UniLoraConfig, {"r": 3, "theta_d_length": 70, "proj_seed": 3, **GPT}),
    "TinyLoRA, drawn": (
        "llama",
        peft.TinyLoraConfig,
        {"r": 2, "u": 5, "weight_tying": 0.4, "save_projection": False, **LLAMA},
    ),
    "PVeRA, drawn": ("gpt2", peft.PveraConfig, {"r": 4, "save_projection": False, **GPT}),
}
# PSOFT has no float64.
PSOFT: dict[str, Case] = {
    "a rotation": ("llama", peft.PsoftConfig, {"r": 4, "psoft_alpha": 6, **LLAMA}),
    "a series": (
        "bert",
        peft.PsoftConfig,
        {"r": 3, "use_cayley_neumann": True, "num_cayley_neumann_terms": 6, "psoft_mag_a": False, **BERT},
    ),
    "a matrix": ("bert", peft.PsoftConfig, {"r": 4, "psoft_orth": False, "psoft_mag_b": False, **BERT}),
    "even": ("llama", peft.PsoftConfig, {"r": 4, "psoft_alpha": 6, "ab_svd_init": "pissa_init", **LLAMA}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_type_comes_and_goes_back(case: str, tmp_path: Path) -> None:
    assert_comes_and_goes_back(CASES[case], tmp_path)


@pytest.mark.parametrize("case", ONE_WAY)
def test_a_type_comes(case: str, tmp_path: Path) -> None:
    assert_comes(ONE_WAY[case], tmp_path)


@pytest.mark.parametrize("case", PSOFT)
def test_psoft_comes_and_goes_back(case: str, tmp_path: Path) -> None:
    assert_comes_and_goes_back(PSOFT[case], tmp_path, 1e-4, torch.float32)


def _block_diagonal(blocks: Tensor) -> list[Tensor]:
    return [torch.stack([torch.block_diag(*one) for one in blocks])]


def _blocks(gradient: Tensor, blocks: Tensor) -> list[Tensor]:
    count, size = blocks.shape[1:3]
    parts = gradient.unflatten(2, (count, size)).unflatten(1, (count, size))
    return [parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)]


@pytest.mark.parametrize("factors", [2, 3])
def test_butterflies(factors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT has several factors with its CUDA extension alone, whose one function this is."""
    extension = SimpleNamespace(forward=_block_diagonal, backward=_blocks)
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: extension)
    options = {"boft_block_size": 4, "boft_n_butterfly_factor": factors, **BERT}
    assert_comes_and_goes_back(("bert", peft.BOFTConfig, options), tmp_path)
