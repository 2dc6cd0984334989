"""Multimodal models: every tower is recognised and named by its modality, even if text alone does
not run it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

import peftc
from benchmarks.families import build
from peftc.fakes.data_answers import constant_of, fake_data_answers
from peftc.fakes.tensors import new_mode
from tests.laws.harness import Before

# type -> its stacks, and the attentions of each
TOWERS = {
    "llava": {"vision": "self", "text": "self"},
    "paligemma": {"vision": "self", "text": "self"},
    "blip-2": {"vision": "self", "qformer": "self cross", "text": "self"},
    "qwen2_vl": {"vision": "self", "text": "self"},  # vision attends in one block for each image
    "idefics2": {"vision": "self", "perceiver": "self", "text": "self"},
    "minicpmv4_6": {"vision": "self", "text": "self"},  # one row of the patches of all images
    "molmo2": {"vision": "self", "text": "self"},  # patches without their grid
    "git": {"vision": "self", "text": "self"},
    "pix2struct": {"encoder": "self", "decoder": "self cross"},  # one encoder that its decoder attends to
}


def family(mapping: str, model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own code
        return build(mapping, model_type)


def stacks(table: peftc.SiteTable) -> dict[str, str]:
    stacks: dict[str, set[str]] = {}
    for site in table.sites:
        names = [name for name, _ in site.steps]
        if "layer" in names:
            branches = stacks.setdefault(".".join(names[: names.index("layer")]), set())
            branches |= {names[i + 1] for i, name in enumerate(names[:-1]) if name == "attn"} & {"self", "cross"}
    return {stack: " ".join(sorted(branches, reverse=True)) for stack, branches in stacks.items()}


@pytest.mark.parametrize("model_type", TOWERS)
def test_every_tower_is_named_by_its_modality(model_type: str) -> None:
    model, _ = family("image-text-to-text", model_type)
    assert stacks(peftc.sites(model)) == TOWERS[model_type]


@pytest.mark.ahead_of_time
@pytest.mark.parametrize("stack", ["vision", "text"])
def test_edits_that_a_tower_cannot_take_are_refused_at_compile_time(stack: str) -> None:
    """Not at the first image: a text alone does not run the vision layers."""
    model, _ = family("image-text-to-text", "llava")
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError, match="P405"):
        peftc.compile(f"peft 1\nedit e at {stack}.layer[*].attn {{ kv = concat(gate(h) * prefix(len=2), kv) }}", model)
    before.assert_same(model)


def test_the_stages_of_a_pyramid_are_one_stack() -> None:
    model, _ = family("image-classification", "swin")
    layers = [site.path for site in peftc.sites(model).sites if site.steps[-1][0] == "layer"]
    assert layers == [f"encoder.layer[{i}]" for i in range(sum(model.config.depths))]


class TestLlava:
    @pytest.fixture
    def llava(self) -> tuple[nn.Module, dict[str, Any]]:
        return family("image-text-to-text", "llava")

    def count(self, model: nn.Module, selector: str) -> int:
        spec = f"peft 1\nedit e at {selector} {{ h += lora(x, r=2) }}\n"
        return len(peftc.plan(spec, model).edits[0].sites)

    def test_a_selector_names_one_tower_or_all(self, llava) -> None:
        model, _ = llava
        vision, text = len(model.model.vision_tower.encoder.layers), len(model.model.language_model.layers)
        assert self.count(model, "vision.layer[*].attn.q") == vision
        assert self.count(model, "text.layer[*].attn.q") == text
        assert self.count(model, "layer[*].attn.q") == vision + text

    @pytest.mark.parametrize("tower", ["vision", "text"])
    def test_an_edit_of_one_tower(self, llava, tower: str) -> None:
        model, inputs = llava
        with torch.no_grad():
            before = model(**inputs).logits
        spec = f"peft 1\nedit e at {tower}.layer[*].attn {{ kv = concat(prefix(len=3), kv) }}\n"
        peftc.compile(spec, model, seed=0)
        assert all(name.startswith(f"e/{tower}.layer[") for name in peftc.parameters(model))
        with torch.no_grad():
            after = model(**inputs).logits
        peftc.remove(model)
        assert not torch.equal(before, after)
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, before)

    def test_a_missing_tower(self, llava) -> None:
        with pytest.raises(peftc.PeftcError) as excinfo:
            self.count(llava[0], "visoin.layer[*].attn.q")
        (diagnostic,) = excinfo.value.diagnostics
        assert diagnostic.code == "P201"
        assert diagnostic.help == "did you mean `vision`?"
        assert "its stacks are `vision` and `text`" in diagnostic.notes

    def test_everything_below_a_tower(self, llava) -> None:
        model, _ = llava
        peftc.compile("peft 1\ntrain t = [b] at vision.**\n", model)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        peftc.remove(model)
        assert trained
        assert all(".vision_tower." in name and name.endswith("bias") for name in trained)


def test_numbers_in_a_list_that_becomes_a_tensor_are_known() -> None:
    with new_mode(), fake_data_answers():
        lengths = torch.tensor([3, 4])
        assert torch.tensor([0, lengths[1], *torch.empty(1).long()]).tolist() == [0, 4, 1]


def test_constants_are_known_without_data() -> None:
    grid = torch.tensor([[1, 4, 4], [2, 3, 2]])
    with new_mode(), fake_data_answers():
        lengths = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        assert lengths.cumsum(0).tolist() == [16, 22, 28]
        assert torch.rand(3, 5)[lengths > 6].shape == (1, 5)
        assert constant_of(torch.empty(2)) is None
        expected = torch.zeros(4)
        expected[1] = 2
        assert expected.tolist() == [0, 2, 0, 0]
        view = expected[2:]
        expected[:] = torch.rand(4)
        assert constant_of(expected) is not None  # kept, but
        assert view.sum().item() == 1.0  # no longer trusted: guessed
