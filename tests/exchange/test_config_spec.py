"""`peftc new` of a configuration of PEFT: the spec that the adapter has once PEFT has made it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import peftc
from peftc.cli.main import main
from peftc.exchange.config_spec import spec_of_config
from peftc.semantics.expand import expand
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from tests import zoo

QV = ["q_proj", "v_proj"]
CONFIGS: dict[str, tuple[str, peft.PeftConfig]] = {
    "rslora": (
        "llama",
        peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, use_rslora=True, target_modules=r".*\.[01]\..*q_proj"),
    ),
    "patterns": (
        "llama",
        peft.LoraConfig(
            r=4, rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 3}, target_modules=QV, modules_to_save=["norm"]
        ),
    ),
    "all": (
        "llama",
        peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["o_proj"], task_type="CAUSAL_LM"),
    ),
    "experts": ("mixtral", peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])),
    "dora": ("gpt2", peft.LoraConfig(r=2, use_dora=True, target_modules=["c_fc"], bias="lora_only")),
    "biases": ("gpt2", peft.LoraConfig(r=2, target_modules=["c_proj", "c_fc"], fan_in_fan_out=True, bias="all")),
    "lora_bias": ("gpt2", peft.LoraConfig(r=2, target_modules=["c_fc"], lora_bias=True)),
    "ia3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "ln": ("llama", peft.LNTuningConfig(target_modules=["input_layernorm"])),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_spec_is_that_of_the_adapter(name: str, tmp_path: Path) -> None:
    architecture, config = CONFIGS[name]
    zoo.config(architecture).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(zoo.build(architecture, torch.float32), config)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(str(tmp_path / "full"))
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "full" / "adapter_config.json", tmp_path / "config")
    imported = peftc.import_adapter(tmp_path / "full", tmp_path / "adapter", model=tmp_path / "base")
    for folder in ("config", *(["full"] if name == "all" else [])):
        text = spec_of_config(tmp_path / folder, str(tmp_path / "base"))
        assert print_spec(parse_text(text)) == text
        flat = expand(parse_text(text))
        assert statements(print_spec(flat)) == statements(imported.spec)
        assert (
            peftc.plan(text, tmp_path / "base").totals.trained
            == peftc.plan(imported.spec, tmp_path / "base").totals.trained
        )


def statements(text: str) -> list[tuple[str, ...]]:
    """The statements, with the arms of their selectors in the order of the alphabet."""
    words = " ".join(line for line in text.splitlines() if not line.startswith(("#", "peft "))).split(" at ")
    return [tuple(sorted(arm.strip() for arm in part.split(" | "))) for part in words]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"peft_type": "LOHA", "target_modules": QV}, "P802"),  # its sizes are in its tensors
        ({"peft_type": "LORA", "target_modules": ["nowhere"]}, "P802"),
        ({"peft_type": "LORA"}, "P802"),
        ({"peft_type": "LORA", "target_modules": QV, "layers_to_transform": [0]}, "P802"),
        ({"peft_type": "LORA", "target_modules": ["embed_tokens"]}, "P802"),
        ({"peft_type": "LORA", "target_modules": 3}, "P802"),
        ({"peft_type": "LORA", "target_modules": QV, "corda_config": {"a": 1}}, "P802"),
        ({"peft_type": "LORA", "target_modules": "(a+)+$"}, "P802"),
        ({"peft_type": "LORA", "target_modules": QV, "r": -1}, "P802"),
        ({"peft_type": "LORA", "target_modules": QV, "r": 1000}, "P804"),
        ({"peft_type": "NONE"}, "P802"),
    ],
)
def test_refusals(values: dict[str, Any], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.config("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(peftc.PeftcError) as error:
        spec_of_config(tmp_path, str(tmp_path / "base"))
    assert error.value.diagnostics[0].code == code
    assert main(["new", ".", "--model", "base", "-o", "s.peft"]) == 1
    assert not (tmp_path / "s.peft").exists()


def test_a_spec_is_written_that_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.config("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "mine").mkdir()
    values = {"peft_type": "LORA", "target_modules": QV, "r": 4, "base_model_name_or_path": "base"}
    (tmp_path / "mine" / "adapter_config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    text = (tmp_path / "mine.peft").read_text()
    assert text.startswith("peft 2\n\n# LORA of PEFT, for base: r = 4")
    assert main(["check", "mine.peft", "--model", "base", "--strict"]) == 0
    assert main(["fmt", "--check", "mine.peft"]) == 0
    assert main(["new", "mine/adapter_config.json"]) == 2
    assert "mine.peft is there already" in capsys.readouterr().err
    assert (tmp_path / "mine.peft").read_text() == text
