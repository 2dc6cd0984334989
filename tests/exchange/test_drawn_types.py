"""Types of PEFT that draw places or matrices, or decompose the base, compute here what they do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import peftc
from peftc.exchange.peft_format.table import TYPES
from peftc.installation.contents import states
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, edited, in_peft, tensors
from tests.exchange.test_export_refusals import export_refused
from tests.exchange.test_import import import_refused, trained
from tests.exchange.test_import_refusals import change
from tests.exchange.types_of_peft import Case, assert_comes, assert_comes_and_goes_back
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Specified to not"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LLAMA: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "down_proj"]}
BERT: dict[str, Any] = {"target_modules": ["query", "dense"]}
INNER = "base_model.model.model.layers.1"
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


ADAMSS: dict[str, Case] = {
    "with a bias": ("bert", peft.AdamssConfig, {"r": 8, "num_subspaces": 3, "subspace_rank": 2, **BERT}),
    "dynamic ranks": (
        "llama",
        peft.AdamssConfig,
        {"r": 6, "num_subspaces": 4, "subspace_rank": 3, "use_dynamic_rank": True, "svd_threshold": 0.5, **LLAMA},
    ),
}


class NearestRows:
    """In the place of scikit-learn's KMeans: Lloyd's rounds, from the first rows on."""

    def __init__(self, n_clusters: int, max_iter: int, **options: Any) -> None:
        self.count, self.rounds = n_clusters, max_iter

    def fit_predict(self, rows: Any) -> Any:
        points = torch.as_tensor(rows)
        centres = points[: self.count].clone()
        labels = torch.cdist(points, centres).argmin(1)
        for _ in range(self.rounds):
            for number in labels.unique().tolist():
                centres[number] = points[labels == number].mean(0)
            labels = torch.cdist(points, centres).argmin(1)
        return labels.numpy()


def without_scikit_learn(monkeypatch: pytest.MonkeyPatch, cluster: Any) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None if cluster is None else SimpleNamespace(cluster=cluster))
    monkeypatch.setitem(sys.modules, "sklearn.cluster", cluster)


@pytest.mark.parametrize("case", ADAMSS)
def test_adamss_comes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("sklearn") is None:
        without_scikit_learn(monkeypatch, SimpleNamespace(KMeans=NearestRows))
    assert_comes(ADAMSS[case], tmp_path)


def test_adamss_needs_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_scikit_learn(monkeypatch, SimpleNamespace(KMeans=NearestRows))
    name, type_, options = ADAMSS["with a bias"]
    trained(name, tmp_path / "in", type_=type_, **options)
    without_scikit_learn(monkeypatch, None)
    diagnostic = import_refused("P802", tmp_path, zoo.build(name, torch.float64))
    assert "scikit-learn" in diagnostic.message


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


# Equations that are trained here, and what of them is not: PEFT computes it again.
OF_SPECS: dict[str, tuple[str, str]] = {
    "UNILORA": ("h += unilora(x, r=2, n=70)", "scales"),
    "PVERA": ("h += pvera(x, r=3)", "A B"),
    "WAVEFT": ("w += waveft(n=50, family=sym4, select=random, seed=777)", ""),
    "TINYLORA": ("w += tinylora(w, r=2, u=6)", "A B P"),
    "OSF": ("w = osf(w, r=11)", "high_u high_v"),
    "PSOFT": ("w = psoft(w, r=3)", "A B"),
}


def form_of(name: str, equation: str) -> str:
    return next(row.form for row in TYPES[name].rows if f"form {equation.split()[2].partition('(')[0]}(" in row.form)


@pytest.mark.parametrize("name", OF_SPECS)
def test_a_form_that_is_trained_here_goes_to_peft(name: str, tmp_path: Path) -> None:
    equation, fixed = OF_SPECS[name]
    spec = f"peft 2\n{form_of(name, equation)}\nedit e at layer[*].attn.q | layer[*].ffn.down {{ {equation} }}"
    model: Any = peftc.compile(spec, zoo.build("llama"), seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in peftc.parameters(model).items():
            assert key.rpartition(".")[2] not in fixed.split()
            parameter += 0.1 * torch.randn_like(parameter)
    if name == "WAVEFT":  # PEFT draws other places than peftc
        assert "PEFT draws the places from a seed" in export_refused("P801", model, tmp_path).message
        return
    assert peftc.export(model, tmp_path / "out").type == name
    assert_same_outputs(model.eval(), in_peft("llama", tmp_path / "out", torch.float32), "llama", 1e-4)


def test_frod_starts_as_the_base() -> None:
    spec = (
        f"peft 2\n{TYPES['FROD'].rows[0].form}\nedit e at layer[*].attn.q | layer[*].ffn.down {{ w = frod(w, n=20) }}"
    )
    model: Any = peftc.compile(spec, zoo.build("llama", torch.float64), seed=0).eval()
    assert_same_outputs(model, zoo.build("llama", torch.float64).eval(), "llama", 1e-7)


def test_noise_while_training_is_that_of_peft(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.PveraConfig, r=4, **LLAMA)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    ours: Any = peftc.load(tmp_path / "ours", zoo.build("llama", torch.float64))
    theirs: Any = in_peft("llama", tmp_path / "in")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    values = list[Tensor]()
    for model, training in ((ours, True), (theirs, True), (ours, False)):
        torch.manual_seed(0)
        module = model.get_submodule(
            "model.layers.1.self_attn.q_proj" if model is ours else f"{INNER}.self_attn.q_proj"
        )
        values.append(module.train(training)(x).detach())
    assert values[0].equal(values[1])
    assert (values[0] - values[2]).abs().max() > 0.01


IMPORTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "samples": (peft.PveraConfig, {"r": 2}, {"sample_at_inference": True}, "in each call"),
    "a filter": (peft.WaveFTConfig, {"n_frequency": 9}, {"wavelet_family": "coif4"}, "not that of the wavelet"),
    "no matrices": (peft.FrodConfig, {"progressbar": False}, {"save_projection": False}, "together"),
    "no modules": (peft.UniLoraConfig, {"r": 2}, {"target_modules": ["nothing"]}, "the base has no such Linears"),
    "some layers": (peft.UniLoraConfig, {"r": 2}, {"layers_to_transform": [0]}, "`target_modules` alone"),
    "a bound": (peft.PsoftConfig, {"r": 2}, {"cayley_neumann_eps": 0.5}, "scaled back"),
    "few terms": (
        peft.PsoftConfig,
        {"r": 2},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": 2},
        "at least three",
    ),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_what_no_equation_says(case: str, tmp_path: Path) -> None:
    type_, options, keys, reason = IMPORTS[case]
    dtype = torch.float32 if type_ is peft.PsoftConfig else torch.float64
    trained("llama", tmp_path / "in", dtype, type_=type_, target_modules=["q_proj"], **options)
    change(tmp_path, keys)
    assert reason in import_refused("P802", tmp_path).message


def test_an_entry_of_uni_lora_with_two_scales(tmp_path: Path) -> None:
    options: dict[str, Any] = {"r": 2, "save_indices": True, "target_modules": ["q_proj"]}
    trained("llama", tmp_path / "in", type_=peft.UniLoraConfig, **options)
    key = "base_model.model.model.layers.0.self_attn.q_proj.unilora_scales_A"
    others: dict[str, Any] = {key: torch.rand_like(tensors(tmp_path / "in")[key])}
    change(tmp_path, **others)
    assert "several scales" in import_refused("P802", tmp_path).message


@pytest.mark.parametrize(
    ("type_", "options", "lack"),
    [
        (peft.UniLoraConfig, {"r": 2}, "base_model.unilora_theta_d"),
        (peft.TinyLoraConfig, {"u": 3}, "base_model.tinylora_v.1"),
        (peft.FrodConfig, {"progressbar": False}, "base_model.frod_V.self_attn_q_proj"),
    ],
)
def test_a_tensor_that_is_not_there(type_: Any, options: dict[str, Any], lack: str, tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=type_, target_modules=["q_proj"], **options)
    change(tmp_path, **{lack: None})
    assert f"`{lack}`" in import_refused("P803", tmp_path).message


def test_a_decomposition_needs_the_weights(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.OSFConfig, effective_rank=3, target_modules=["q_proj"])
    zoo.config("llama").save_pretrained(tmp_path / "base")
    diagnostic = refused(
        "P806", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "no", model=tmp_path / "base")
    )
    assert "q_proj.weight" in diagnostic.message


@pytest.mark.parametrize("name", ["OSF", "PSOFT"])
def test_other_singular_vectors_than_those_of_the_base(name: str, tmp_path: Path) -> None:
    equation, _ = OF_SPECS[name]
    model = edited("llama", f"{form_of(name, equation)}\nedit e at layer[*].ffn.down {{ {equation} }}")
    with torch.no_grad():
        for state in states(model).values():
            state += 0.1
    assert "decomposes the weight of" in export_refused("P801", model, tmp_path).message


def test_vectors_of_modules_that_do_not_follow_each_other(tmp_path: Path) -> None:
    equation = "w += tinylora(w, r=2, u=6, tied=true)"
    edits = [f"edit {name} at layer[*].attn.{name} {{ {equation} }}" for name in "qo"]
    model = edited("llama", "\n".join([form_of("TINYLORA", equation), *edits]))
    assert "modules that follow each other" in export_refused("P801", model, tmp_path).message
