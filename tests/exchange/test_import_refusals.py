"""What is damaged in an adapter of PEFT, or would be another function in peftc, is not imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import peftc
from tests import zoo
from tests.exchange.adapters import assert_same_outputs
from tests.exchange.test_import import import_refused, lora, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
Q = "base_model.model.model.layers.0.self_attn.q_proj."


def tied(name: str) -> nn.Module:
    return zoo.build(name, torch.float64, tie_word_embeddings=True)


def saved(name: str, folder: Path, **options: Any) -> Any:
    model: Any = peft.get_peft_model(tied(name), peft.LoraConfig(**lora(name, **options))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "module"), [("llama", "embed_tokens"), ("llama", "lm_head"), ("gpt2", "lm_head")])
def test_one_use_of_a_tied_parameter(name: str, module: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "in", modules_to_save=[module])
    diagnostic = import_refused("P804", tmp_path, tied(name))
    assert "is tied to" in diagnostic.message
    assert "ensure_weight_tying" in str(diagnostic)


def test_both_uses_of_a_tied_parameter(tmp_path: Path) -> None:
    theirs = saved("llama", tmp_path / "in", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=tied("llama"))
    assert_same_outputs(peftc.load(tmp_path / "ours", tied("llama")).eval(), theirs, "llama")


def change(folder: Path, keys: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Changes keys of the configuration, and tensors by the ends of their names; None removes."""
    path, file = folder / "in" / "adapter_config.json", folder / "in" / "adapter_model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(keys or {})}))
    own: dict[str, Any] = {**load_file(file), **tensors}
    save_file({name: value for name, value in own.items() if value is not None}, file)


A = Q + "lora_A.weight"
DAMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "DoRA without vectors": ("P803", {"use_dora": True}, {}, "lora_magnitude_vector"),
    "a vector without DoRA": ("P803", {}, {Q + "lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector"),
    "a module that is not there": ("P803", {"modules_to_save": ["lm_head"]}, {}, "lm_head.weight"),
    "three dimensions": ("P803", {}, {A: torch.ones(1, 4, 32)}, "[1, 4, 32]"),
    "integers": ("P803", {}, {A: torch.ones(4, 32, dtype=torch.int64)}, "int64"),
    "complex numbers": ("P803", {}, {A: torch.ones(4, 32, dtype=torch.complex64)}, "complex64"),
    "no A": ("P803", {}, {A: None}, "there is only `lora_B.weight`"),
    "rank 0": ("P802", {"r": 0}, {}, "`r: 0`"),
    "half a rank": ("P802", {"r": 4.5}, {}, "`r: 4.5`"),
    "another rank": ("P804", {"r": 5}, {}, "the rank 5 by the configuration"),
    "an unknown tensor": ("P802", {}, {"base_model.model.foo": torch.ones(2)}, "a tensor `base_model.model.foo`"),
    "trained tokens": (
        "P802",
        {"trainable_token_indices": [1]},
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 32)},
        "trainable_token_indices",
    ),
    "replicated layers": (
        "P802",
        {"layer_replication": [[0, 3], [2, 3]]},
        {A.replace("layers.0", "layers.3"): torch.ones(4, 32)},
        "layer_replication",
    ),
    "a parameter": (
        "P802",
        {},
        {"base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight": torch.ones(4, 32)},
        "target_parameters",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_it_is_said_what_is_wrong(case: str, tmp_path: Path) -> None:
    code, keys, tensors, part = DAMAGES[case]
    trained("llama", tmp_path / "in", **lora("llama"))
    change(tmp_path, keys, **tensors)
    assert part in import_refused(code, tmp_path).message


def test_an_empty_file(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", **lora("llama"))
    save_file({}, tmp_path / "in" / "adapter_model.safetensors")
    assert "no tensors" in import_refused("P803", tmp_path).message


def test_a_rank_above_that_of_the_linear(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", **lora("llama", r=64))
    diagnostic = import_refused("P804", tmp_path)
    assert "`r` is 64" in diagnostic.message
    assert diagnostic.help is None


def test_a_model_without_values(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", **lora("llama"))
    import_refused("P545", tmp_path, zoo.build("llama").to("meta"))


def test_a_linear_in_two_layers(tmp_path: Path) -> None:
    base: Any = zoo.build("llama", torch.float64)
    base.model.layers[1].self_attn.q_proj = base.model.layers[0].self_attn.q_proj
    trained("llama", tmp_path / "in", **lora("llama"))
    assert "one module" in import_refused("P804", tmp_path, base).message
