"""An exported adapter computes in PEFT what the edited model computes, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from peftc.cli.main import main
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, edited, in_peft, tensors
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
QV = "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2, alpha=6) }"
LINEARS = QV + "\nedit b at layer[*].ffn.up | layer[*].attn.o { h += lora(x, r=3) }"


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("spec", [QV, LINEARS], ids=["qv", "linears"])
@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, "mistral", "bert-classifier", "vit"])
def test_peft_computes_the_same(name: str, spec: str, tmp_path: Path) -> None:
    model = edited(name, spec)
    report = peftc.export(model, tmp_path / "out")
    assert_same_outputs(model, in_peft(name, tmp_path / "out"), name)
    assert all(one.exact for one in report.modules)


def test_tensors_have_the_bits_of_the_parameters(tmp_path: Path) -> None:
    model = edited("llama", QV, torch.float32)
    peftc.export(model, tmp_path / "out")
    exported = tensors(tmp_path / "out")
    for name, parameter in peftc.parameters(model).items():
        _, path, form = name.split("/")
        layer, role = path.split("[")[1][0], path[-1]
        key = f"base_model.model.model.layers.{layer}.self_attn.{role}_proj.lora_{form[-1]}.weight"
        assert torch.equal(exported.pop(key), parameter)
    assert not exported


CASES = {
    "a factor": ("llama", "edit a at layer[*].attn.q { h += 4 * lora(x, r=2, alpha=6) }", 2, 24),
    "a trained factor": ("llama", "edit a at layer[*].attn.q { h += scalar() * lora(x, r=2, alpha=6) }", 2, None),
    "a difference": ("llama", "edit a at layer[*].attn.q { h += -lora(x, r=2, alpha=6) }", 2, 6),
    "a let": ("llama", "edit a at layer[*].attn.q { let d = lora(x, r=2)\n h += d + d }", 4, 4),
    "rsLoRA": ("llama", "edit a at layer[*].attn.q { h += lora(x, r=3, alpha=5, rslora=true) }", 3, 5),
    "w": ("llama", "edit a at layer[*].attn.q { w += lowrank(r=2, alpha=3) }", 2, 3),
    "of the Linear itself": ("llama", "edit a at layer[*].attn.q { h += lora(h, r=2, alpha=3) }", 2, 3),
    "w in a Conv1D": ("gpt2", "edit a at layer[*].attn.v { w += 2 * lowrank(r=2, alpha=3) }", 2, 6),
    "of what it reads": ("llama", "edit a at layer[*].ffn.hidden { h += lora(h, r=2, alpha=3) }", 2, 3),
    "several edits": (
        "llama",
        "edit a at layer[*].attn.q { h += lora(x, r=2, alpha=6) }\n"
        "edit b at layer[*].attn.q { h += lora(x, r=3, alpha=18) }",
        5,
        15,
    ),
    "q and v of a fused Linear": ("gpt2", QV, 4, 12),
    "an embedding": ("llama", "edit a at embed { h += lora(x, r=2, alpha=4) }", 2, 4),
    "w of an embedding": ("llama", "edit a at embed { w += lowrank(r=2, alpha=4) }", 2, 4),
    "a sub-layer": ("llama", "edit a at layer[*].attn { h += lora(h, r=2, alpha=4) }", 2, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_equations_are_evaluated(case: str, tmp_path: Path) -> None:
    name, spec, rank, alpha = CASES[case]
    model = edited(name, spec)
    peftc.export(model, tmp_path / "out")
    assert_same_outputs(model, in_peft(name, tmp_path / "out"), name)
    own = config(tmp_path / "out")
    assert own["r"] == rank
    assert alpha is None or own["lora_alpha"] == alpha


def test_modules_that_differ_have_patterns(tmp_path: Path) -> None:
    spec = "edit a at layer[0].attn.q { h += lora(x, r=4, alpha=2) }\n"
    spec += "edit b at layer[1..2].attn.q | layer[*].attn.v { h += lora(x, r=2) }"
    model = edited("llama", spec)
    peftc.export(model, tmp_path / "out")
    own = config(tmp_path / "out")
    assert own["rank_pattern"] == {r"^model\.layers\.0\.self_attn\.q_proj": 4}
    assert own["alpha_pattern"] == {}
    assert_same_outputs(model, in_peft("llama", tmp_path / "out"), "llama")


def test_layers_by_their_names(tmp_path: Path) -> None:
    """`target_modules` hits what the adapter edits, and nothing else."""
    model = edited("bart", "edit a at encoder.layer[1].attn.q | decoder.layer[*].attn.cross.v { h += lora(x, r=2) }")
    report = peftc.export(model, tmp_path / "out")
    theirs = in_peft("bart", tmp_path / "out")
    hit = {name.partition(".lora_A.")[0] for name, _ in theirs.named_modules() if name.endswith("lora_A.default")}
    assert {name.removeprefix("base_model.model.") for name in hit} == {one.module for one in report.modules}
    assert_same_outputs(model, theirs, "bart")


@pytest.mark.parametrize(
    ("name", "train", "saved"),
    [
        ("bert-classifier", 'train head = [w, b] at "classifier"', ["classifier"]),
        ("llama", "train norms = [w] at layer[*].ffn.norm", ["post_attention_layernorm"]),
    ],
)
def test_trained_modules_are_saved_whole(name: str, train: str, saved: list[str], tmp_path: Path) -> None:
    model = edited(name, f"{QV}\n{train}")
    peftc.export(model, tmp_path / "out")
    own = config(tmp_path / "out")
    assert own["modules_to_save"] == saved
    assert_same_outputs(model, in_peft(name, tmp_path / "out"), name)


def test_from_a_folder_without_weights(tmp_path: Path) -> None:
    model = edited("gpt2", QV, torch.float32)
    peftc.export(model, tmp_path / "one")
    peftc.save(model, tmp_path / "adapter")
    zoo.build("gpt2").config.save_pretrained(tmp_path / "base")
    arguments = ["export", str(tmp_path / "adapter"), "--to", "peft", "-o", str(tmp_path / "two")]
    assert main([*arguments, "--model", str(tmp_path / "base" / "config.json")]) == 0
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_weights_are_read_where_an_edit_depends_on_them(tmp_path: Path) -> None:
    spec = "edit a at layer[*].attn.q { h += lora(h, r=2) }"
    base = zoo.build("llama", torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = edited("llama", spec, torch.float32)
    peftc.save(model, tmp_path / "adapter")
    report = peftc.export(tmp_path / "adapter", tmp_path / "out", model=tmp_path / "base")
    assert not any(one.exact for one in report.modules)
    peftc.export(model, tmp_path / "live")
    one, two = tensors(tmp_path / "out"), tensors(tmp_path / "live")
    assert all(torch.equal(one[key], two[key]) for key in one)
    refused(
        "P806", lambda: peftc.export(tmp_path / "adapter", tmp_path / "no", model=tmp_path / "base" / "config.json")
    )
    assert not (tmp_path / "no").exists()


REFUSALS = {
    "an activation": ("edit a at layer[*].ffn { h += adapter(h, r=2) }", "adapter(h)"),
    "a factor of h": (QV + "\nedit b at layer[*].attn.k { h *= vector() }", "h * vector"),
    "DoRA and another": (
        "edit a at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }\n" + QV.replace("edit a", "edit b"),
        "magnitude",
    ),
    "a whole matrix": ("edit a at layer[*].attn.q { h += linear(x, bias=false) }", "full rank"),
    "a constant": ("edit a at layer[*].attn.q { h += vector(init=0) + lora(x, r=2) }", "constant"),
    "a bias alone": ("edit a at layer[*].attn.q { h += lora(x, r=2) }\ntrain b = [w] at layer[*].attn.k", None),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_has_no_form_is_refused_with_its_part(case: str, tmp_path: Path) -> None:
    spec, part = REFUSALS[case]
    model = edited("llama", spec)
    if part is None:  # a Linear without a bias is trained as a whole
        peftc.export(model, tmp_path / "out")
        return
    diagnostic = refused("P801", lambda: peftc.export(model, tmp_path / "out"))
    assert part in str(diagnostic)
    assert not (tmp_path / "out").exists()


def test_a_biased_linear_of_which_the_output_is_read(tmp_path: Path) -> None:
    refused(
        "P801",
        lambda: peftc.export(edited("bert", "edit a at layer[*].attn.q { h += lora(h, r=2) }"), tmp_path / "out"),
    )


def test_the_class_is_that_of_the_base(tmp_path: Path) -> None:
    model = edited("llama", "edit a at head { h += lora(x, r=2) }")
    peftc.export(model, tmp_path / "out")
    assert config(tmp_path / "out")["task_type"] == "CAUSAL_LM"
    plain = edited("bert-base", "edit a at layer[*].attn.q { h += lora(x, r=2) }")
    peftc.export(plain, tmp_path / "plain")
    mapping = config(tmp_path / "plain")["auto_mapping"]
    assert mapping == {"base_model_class": "BertModel", "parent_library": "transformers.models.bert.modeling_bert"}


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused("P703", lambda: peftc.export(edited("llama", QV), tmp_path))
    refused("P545", lambda: peftc.export(edited("llama", QV), tmp_path / "out", to="gguf"))  # type: ignore[arg-type]
    refused("P410", lambda: peftc.export(zoo.build("llama"), tmp_path / "out"))
