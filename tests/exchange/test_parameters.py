"""A LoRA of parameters, PEFT's `target_parameters`, computes in peftc what it computes there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import JetMoeConfig, JetMoeForCausalLM

import peftc
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, tensors
from tests.exchange.test_stacked_export import gpt_oss
from tests.laws.harness import close
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),  # which PEFT uses for parameters
]
Build = Callable[[], Any]


def mixtral() -> Any:
    """Experts stored (out, in), gates above ups."""
    return zoo.build("mixtral", torch.float64)


def jetmoe() -> Any:
    """Experts in modules of their own, whose parameter is `weight`."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    config = JetMoeConfig(**sizes, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    return JetMoeForCausalLM(config).double().eval()


def trained(build: Build, folder: Path, **options: Any) -> Any:
    """PEFT's model with random values, saved."""
    own: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": [], **options}
    config = peft.LoraConfig(**own)
    model: Any = peft.get_peft_model(build(), config).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[Build, dict[str, Any]]] = {
    "(out, in)": (mixtral, {"target_parameters": EXPERTS}),
    "(in, out)": (gpt_oss, {"target_parameters": EXPERTS}),
    "modules of their own": (jetmoe, {"target_parameters": ["mlp.input_linear.weight", "mlp.output_linear.weight"]}),
    "one of two": (mixtral, {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"]}),
    "beside Linears": (mixtral, {"target_parameters": EXPERTS, "target_modules": ["q_proj"], "use_rslora": True}),
    "other ranks": (
        gpt_oss,
        {
            "target_parameters": EXPERTS,
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 7},
        },
    ),
    "matrices": (mixtral, {"target_parameters": ["q_proj.weight", "embed_tokens.weight"]}),
}


def ids() -> torch.Tensor:
    return torch.arange(14).view(2, 7)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same_and_goes_back(case: str, tmp_path: Path) -> None:
    build, options = CASES[case]
    theirs = trained(build, tmp_path / "in", **options)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=build())
    ours: Any = peftc.load(tmp_path / "ours", build()).eval()
    with torch.no_grad():
        close(ours(ids()).logits, theirs(ids()).logits, case)
        assert not torch.allclose(ours(ids()).logits, build()(ids()).logits)
    peftc.export(ours, tmp_path / "back")
    again: Any = peft.PeftModel.from_pretrained(build(), str(tmp_path / "back")).eval()
    with torch.no_grad():
        close(again(ids()).logits, theirs(ids()).logits, case)
    if case != "matrices":  # which leave as LoRA of their modules
        one, two = tensors(tmp_path / "in"), tensors(tmp_path / "back")
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_spec_names_experts_by_their_roles(tmp_path: Path) -> None:
    trained(mixtral, tmp_path / "in", target_parameters=EXPERTS, use_rslora=True)
    text = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=mixtral()).spec
    for role in ("gate", "up", "down"):
        assert f"at layer[*].ffn.experts[*].{role} {{ w += lowrank(r=3, alpha=5, rslora=true) }}" in text


def test_parameters_that_peft_adds_to_all_linear(tmp_path: Path) -> None:
    theirs = trained(mixtral, tmp_path / "in", target_modules="all-linear")
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=mixtral())
    assert_same_outputs(peftc.load(tmp_path / "ours", mixtral()), theirs, "mixtral")


def change(folder: Path, keys: dict[str, Any], remove: str = "") -> None:
    """Changes keys of the configuration, and removes tensors."""
    path, file = folder / "in" / "adapter_config.json", folder / "in" / "adapter_model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    own = load_file(file)
    save_file({name: value for name, value in own.items() if not remove or not name.endswith(remove)}, file)


DAMAGES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no B": ("P803", {}, "experts.lora_B.weight", "lora_B"),
    "a rank that is not that of the tensors": ("P804", {"r": 4}, "", "rank 4"),
    "DoRA": ("P802", {"use_dora": True}, "", "use_dora"),
    "dropout": ("P802", {"lora_dropout": 0.5}, "", "lora_dropout"),
    "no list": ("P802", {"target_parameters": "experts"}, "", "array"),
    "another parameter": ("P804", {"target_parameters": ["experts.gate_up_proj"]}, "", "gate_up_proj"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_it_is_said_what_is_wrong(case: str, tmp_path: Path) -> None:
    code, keys, remove, part = DAMAGES[case]
    trained(mixtral, tmp_path / "in", target_parameters=EXPERTS)
    change(tmp_path, keys, remove)
    diagnostic = refused(code, lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "out", model=mixtral()))
    assert part in diagnostic.message
    assert not (tmp_path / "out").exists()


def test_parameters_that_are_no_sites(tmp_path: Path) -> None:
    """A matrix of a module of the user's, which no code of a layer reads as experts."""

    def build() -> Any:
        model = mixtral()
        model.model.layers[0].extra = nn.ParameterDict({"stack": nn.Parameter(torch.zeros(2, 4, 4).double())})
        return model

    trained(build, tmp_path / "in", target_parameters=["extra.stack"])
    diagnostic = refused("P802", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "out", model=build()))
    assert "model.layers.0.extra.stack" in diagnostic.message
