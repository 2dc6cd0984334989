"""The shipped recipes on small models of several families: the promises of each, and the laws of
all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.filesystem import resources
from peftc.planning.report.plan import Plan
from tests import zoo
from tests.laws.harness import Before, close, randomise
from tests.verification.pairs import settings_of

RECIPES = resources.recipes()
FAMILIES = ("bart", "bert", "t5", "gpt2", "llama")
WITH_BIASES = ("bart", "bert", "gpt2")
ONLY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("bitfit", "difffit", "glora", "glora_kinds", "far"), WITH_BIASES),
    "cross_attention": ("bart", "t5"),
}
LAYERS = {"s4": 12}  # has four groups of layers
CHOSEN = ("fishmask", "lt_sft", "far", "sparse_adapter", "supertuning")  # by `peftc.calibrate`
COPIES = ("trainable_tokens",)  # is the base by its first values, which no plan reads
GATED = ("unipelt", "adaptive_prefix")  # a mean over the tokens of a call: cached decoding is another function
DRAWS = 4  # `diff_pruning`: the gate of a whole weight closes in about one of two hundred draws
CASES = [  # the families in turn
    (recipe, (own := ONLY.get(recipe, FAMILIES))[i % len(own)]) for i, recipe in enumerate(sorted(RECIPES))
]


def small(family: str, recipe: str) -> nn.Module:
    depth = LAYERS.get(recipe)
    names = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer")
    overrides = {name: depth for name in names if depth and hasattr(zoo.config(family), name)}
    return zoo.build(family, torch.float64, **overrides).eval()


class Case:
    """A recipe on a model, calibrated where its entries are selected from data."""

    def __init__(self, recipe: str, family: str) -> None:
        self.recipe, self.family = recipe, family
        self.model = small(family, recipe)
        self.inputs = zoo.inputs(family, self.model, labels=True)
        self.before = Before.of(self.model)
        with torch.no_grad():
            self.base = self.logits(self.model)
        settings = settings_of(recipe)
        self.plan: Plan = peftc.plan(RECIPES[recipe], self.model, settings=settings)
        peftc.compile(RECIPES[recipe], self.model, seed=0, settings=settings)
        self.own = peftc.parameters(self.model)
        if recipe in CHOSEN:
            peftc.calibrate(self.model, [self.inputs])
        if recipe == "adapterfusion":
            self.fuse(settings)

    def fuse(self, settings: Mapping[str, Any]) -> None:
        """Gives a fusion the adapters of three tasks."""
        with TemporaryDirectory() as folder:
            for i in range(3):
                other = small(self.family, self.recipe)
                peftc.compile(RECIPES["pfeiffer"], other, seed=i, settings=settings)
                peftc.save(other, Path(folder) / str(i))
            peftc.fuse(self.model, [Path(folder) / str(i) for i in range(3)])

    def logits(self, model: nn.Module) -> torch.Tensor:
        return model.eval()(**self.inputs).logits

    def trained(self) -> None:
        """As after training: parameters are perturbed."""
        randomise(self.own)
        if self.recipe == "diff_pruning":
            peftc.calibrate(self.model)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: Any) -> Case:
    torch.set_num_threads(1)
    return Case(*request.param)


def test_counts_and_identity_at_init(case: Case) -> None:
    assert case.plan.totals.trained == sum(p.numel() for p in case.own.values())
    assert case.plan.totals.trained == sum(p.numel() for p in case.model.parameters() if p.requires_grad)
    with torch.no_grad():
        same = torch.equal(case.logits(case.model), case.base)
    assert same == (case.recipe in COPIES or all(edit.identity for edit in case.plan.edits))
    assert all(expectation.holds for expectation in case.plan.expectations)


def test_a_gradient_reaches_every_parameter(case: Case) -> None:
    """In at least one of a few draws: a gate drawn in the forward may close, or all units of a relu
    may be 0, and then what they multiply has no gradient.
    """
    case.model.train().zero_grad()
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in case.own.values():
                parameter += 0.3 * torch.randn_like(parameter)
        (case.model(**case.inputs).loss + sum(peftc.losses(case.model).values())).backward()
    missing = [key for key, p in case.own.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing
    own = {id(p) for p in case.own.values()}
    assert all(p.grad is None for p in case.model.parameters() if id(p) not in own)
    case.model.zero_grad()


def test_saved_folded_and_removed(case: Case, tmp_path: Path) -> None:
    case.trained()
    with torch.no_grad():
        want = case.logits(case.model)
    assert not torch.allclose(want, case.base, atol=1e-6)
    peftc.save(case.model, tmp_path)
    loaded = peftc.load(tmp_path, small(case.family, case.recipe))
    folded = copy.deepcopy(case.model)
    with torch.no_grad():
        close(case.logits(loaded), want, "loaded")
        report = peftc.fold(folded)
        close(case.logits(folded), want, "folded")
    assert {one.edit for one in report.folded} == {edit.name for edit in case.plan.edits if edit.foldable}
    peftc.remove(case.model)
    case.before.assert_same(case.model)


@pytest.mark.parametrize(
    ("recipe", "family"), [(r, f) for r, f in CASES if f in ("gpt2", "llama", "bart") and r not in GATED][::2], ids=str
)
def test_generate_with_a_cache_is_generate_without(recipe: str, family: str) -> None:
    case = Case(recipe, family)
    case.trained()
    inputs = {name: value for name, value in case.inputs.items() if name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    cached, plain = (case.model.eval().generate(**inputs, **options, use_cache=flag) for flag in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    for one, other in zip(cached.logits, plain.logits, strict=True):
        close(one, other, "logits")
