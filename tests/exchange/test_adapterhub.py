"""Adapters of AdapterHub compute in peftc what its library computed with them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import peftc
from peftc.cli.main import main
from tests.exchange.adapterhub.models import FOLDER, base, output
from tests.matrix import some
from tests.refusals import refused

OUTPUTS = load_file(FOLDER / "outputs.safetensors")
WITH_RELATIVE_POSITIONS = "t5/prefix"
CASES = sorted(key for key in OUTPUTS if not key.endswith("/base") and key != WITH_RELATIVE_POSITIONS)
# Norms of this model compute in float32, which releases of transformers round otherwise.
ROUNDED = {"t5": 1e-5}


def imported(key: str, folder: Path) -> peftc.ImportedAdapter:
    return peftc.import_adapter(FOLDER / key, folder, model=base(key.partition("/")[0]))


@pytest.mark.parametrize("key", some(CASES, 2))
def test_outputs_are_those_of_the_library(key: str, tmp_path: Path) -> None:
    name = key.partition("/")[0]
    imported(key, tmp_path / "ours")
    model = base(name)
    error = (output(name, peftc.load(tmp_path / "ours", model)) - OUTPUTS[key]).abs().max()
    assert error < ROUNDED.get(name, 1e-10)
    assert (OUTPUTS[key] - OUTPUTS[f"{name}/base"]).abs().max() > 1e-2


SPECS = {
    "bert/double_seq_bn": ["edit bottleneck at layer[*].attn | layer[*].ffn { h += adapter(h, r=4, act=silu) }"],
    "bert/seq_bn": ["edit bottleneck at layer[*].ffn { h += adapter(norm(h + res), r=4, act=relu) }"],
    "gpt2/seq_bn": ["edit bottleneck at layer[*].ffn { h += adapter(h + res, r=4, act=relu) }"],
    "bert/scaled_par_bn": [
        "edit bottleneck at layer[*].ffn { h += scalar(init=1) * adapter(res, r=4, act=relu) }",
    ],
    "bert/fusion": ["edit fusion at layer[*].ffn { h += fusion(norm(h + res), n=2, r=4, act=relu) }"],
    "gpt2/seq_bn_inv": [
        'edit invertible at "transformer.drop" { h = coupling(h) }',
        "edit bottleneck at layer[*].ffn { h += adapter(h + res, r=4, act=relu) }",
    ],
    "qwen2/seq_bn_inv": [  # by an interface of the library, which then has the inverse, too
        "edit invertible at embed { h = nice(h) }",
        "edit inverse at head { h = head(nice(x, inverse=true)) }",
        "edit bottleneck at layer[*].ffn { h += adapter(h + res, r=4, act=relu) }",
    ],
    "gpt2/lora_gated": ["edit lora at layer[*].attn.q | layer[*].attn.v { h += gate(x) * lora(x, r=2) }"],
    "bert/dora": [
        "edit lora at layer[*].attn.q | layer[*].attn.v | layer[*].ffn.down {",
        "    let a = lowrank(r=2)",
        "    let g = magnitude_ratio(w + a)",
        "    w += 1.5 * a",
        "    h *= g",
        "}",
    ],
    "bert/mtl_lora": [
        "edit lora at layer[*].attn.q | layer[*].attn.v {",
        "    h += mtl_lora(x, r=2, n=2, sharpness=0.05, alpha=3)",
        "}",
    ],
    "bert/loreft_tied": ["edit reft at layer[1] { h += loreft(h, r=2, first=2, last=2) }"],
    "bert/direft": ["edit reft at layer[*] { h += reft(h, r=2, orthogonal=false, subtract=false, first=2) }"],
    "bert/head": [
        "edit bottleneck at layer[*].ffn { h += adapter(norm(h + res), r=4, act=relu) }",
        "train head = [w, b] at head",
    ],
}


@pytest.mark.parametrize("key", SPECS)
def test_the_spec_is_what_a_person_would_write(key: str, tmp_path: Path) -> None:
    spec = imported(key, tmp_path / "ours").spec
    assert spec.startswith("peft 2\n\n")
    assert spec[spec.index("edit ") :] == "\n".join([*SPECS[key], ""])


def test_bits_are_those_of_the_file(tmp_path: Path) -> None:
    imported("bert/seq_bn", tmp_path / "ours")
    ours = load_file(next((tmp_path / "ours").glob("*.safetensors")))
    theirs = load_file(FOLDER / "bert/seq_bn/adapter.safetensors")
    up = theirs["bert.encoder.layer.1.output.adapters.task.adapter_up.weight"]
    assert torch.equal(ours["bottleneck/encoder.layer[1].ffn/adapter.up"], up)
    assert len(ours) == len(theirs)


def test_dropout_that_stands_elsewhere_is_told(tmp_path: Path) -> None:
    result = imported("bert/mapping", tmp_path / "ours")
    assert result.notes == ("left out: dropout=0.1, which acts while training alone",)
    assert result.notes[0] in str(result)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base("bert").save_pretrained(tmp_path / "base")
    folder = ["import", str(FOLDER / "bert/seq_bn"), "-o", str(tmp_path / "ours")]
    assert main([*folder, "--model", str(tmp_path / "base")]) == 0
    assert "h += adapter(norm(h + res), r=4, act=relu)" in capsys.readouterr().out
    assert main([*folder[:-1], str(tmp_path / "others"), "--model", str(tmp_path / "none")]) != 0


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
KEY = "bert.encoder.layer.1.output.adapters.task.adapter_up.weight"


def changed(values: dict[str, Any], **changes: Any) -> None:
    values["config"] |= changes


REFUSALS: dict[str, tuple[str, str, Edit]] = {
    "no name": ("P803", "no name", lambda v, t: v.pop("name")),
    "a configuration by name": ("P802", "config", lambda v, t: v.update(config="pfeiffer")),
    "an empty union": ("P802", "configs", lambda v, t: v.update(config={"architecture": "union", "configs": []})),
    "another architecture": ("P802", "architecture", lambda v, t: changed(v, architecture="prompt_tuning")),
    "ReFT without tensors": ("P803", "has none", lambda v, t: v.update(config={"architecture": "reft"})),
    "an unknown key": ("P802", "phantom", lambda v, t: changed(v, phantom=3)),
    "an activation": ("P802", "non_linearity", lambda v, t: changed(v, non_linearity="quick_gelu")),
    "an invertible adapter without tensors": ("P803", "inv_adapter", lambda v, t: changed(v, inv_adapter="nice")),
    "an invertible adapter": ("P802", "inv_adapter", lambda v, t: changed(v, inv_adapter="glow")),
    "a tensor of an invertible adapter": (
        "P803",
        "invertible_adapters",
        lambda v, t: t.update({"bert.invertible_adapters.task.F.0.bias": torch.zeros(4)}),
    ),
    "no residual stream": ("P802", "original_ln_after", lambda v, t: changed(v, original_ln_after=False)),
    "residual_before_ln": (
        "P802",
        "residual_before_ln",
        lambda v, t: changed(v, original_ln_before=False, residual_before_ln="post_add"),
    ),
    "a norm behind a scale": ("P802", "ln_after", lambda v, t: changed(v, ln_after=True, scaling=2.0)),
    "a gate without tensors": ("P803", "use_gating", lambda v, t: changed(v, use_gating=True)),
    "a scale without tensors": ("P803", "scaling", lambda v, t: changed(v, scaling="learned")),
    "leave_out": ("P802", "leave_out", lambda v, t: changed(v, leave_out=3)),
    "a layer without tensors": (
        "P803",
        "no tensors of it",
        lambda v, t: [t.pop(key) for key in list(t) if ".layer.1." in key],
    ),
    "a layer that is left out": ("P803", "has none", lambda v, t: changed(v, leave_out=[1])),
    "a tensor missing": ("P803", "no projections", lambda v, t: t.pop(KEY)),
    "another shape": ("P804", "expected", lambda v, t: t.update({KEY: torch.zeros(16, 3)})),
    "infinite": ("P561", "", lambda v, t: t.update({KEY: torch.full((16, 4), float("inf"))})),
    "whole numbers": ("P803", "dtype", lambda v, t: t.update({KEY: torch.zeros(16, 4, dtype=torch.int64)})),
    "another module": ("P804", "no module", lambda v, t: t.update({KEY.replace("layer.1", "layer.7"): t.pop(KEY)})),
    "an unknown tensor": ("P802", "strange", lambda v, t: t.update({"strange": torch.zeros(2)})),
    "a tensor of ReFT": (
        "P803",
        "refts",
        lambda v, t: t.update({"bert.encoder.layer.0.reft_layer.refts.task.units.0.x": torch.zeros(2)}),
    ),
    "another tensor of ReFT": (
        "P802",
        "reft_layer",
        lambda v, t: t.update({"bert.encoder.layer.0.reft_layer.refts.task.x": torch.zeros(2)}),
    ),
    "a prompt": (
        "P802",
        "embeddings",
        lambda v, t: t.update({"bert.prompt_tuning.prompt_tunings.task.prompt_embedding.weight": torch.zeros(3, 16)}),
    ),
    "LoRA without tensors": ("P803", "has none", lambda v, t: v.update(config={"architecture": "lora"})),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    code, message, edit = REFUSALS[case]
    source = FOLDER / "bert/seq_bn"
    values = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter.safetensors")
    edit(values, tensors)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "in/adapter.safetensors")
    model = base("bert")
    diagnostic = refused(code, lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model), model)
    assert message in "\n".join([diagnostic.message, *diagnostic.notes])
    assert not (tmp_path / "ours").exists()


LOW_RANK = {
    "DoRA without tensors": ("bert/lora", {"use_dora": True}, "P803"),
    "VeRA without tensors": ("bert/lora", {"vera_d": 0.1}, "P803"),
    "DoRA with a gate": ("bert/dora", {"use_gating": True}, "P802"),
    "DoRA of a scale": ("bert/ia3", {"use_dora": True}, "P802"),
    "DoRA of a fused Linear": ("gpt2/lora", {"use_dora": True}, "P802"),
    "DoRA of a mixture": ("bert/mtl_lora", {"use_dora": True}, "P802"),
    "another matrix of a task": ("bert/mtl_lora", {"task_specific_matrix_type": "linear"}, "P802"),
    "another rank of VeRA": ("bert/vera", {"r": 2}, "P803"),
    "ReFT at no token": ("bert/loreft", {"prefix_positions": 0}, "P802"),
    "ReFT with one unit": ("bert/loreft_pair", {"tied_weights": True}, "P803"),
    "ReFT without the constraint": ("bert/loreft", {"orthogonality": False}, "P803"),
    "another rank of ReFT": ("bert/loreft", {"r": 3}, "P803"),
    "ReFT of fewer layers": ("bert/loreft", {"layers": [0]}, "P803"),
    "another activation of ReFT": ("bert/loreft", {"non_linearity": "quick_gelu"}, "P802"),
    "another mode": ("bert/lora", {"composition_mode": "mean"}, "P802"),
    "another rank": ("bert/lora", {"r": 3}, "P803"),
    "a negative alpha": ("bert/lora", {"alpha": -1}, "P802"),
    "a scale of a fused Linear": ("gpt2/ia3", {"alpha": 2}, "P802"),
    "two gates": ("bert/prefix", {"use_gating": True}, "P803"),
    "another activation": ("bert/prefix", {"non_linearity": "relu"}, "P802"),
    "flat": ("bert/prefix", {"flat": True}, "P803"),
    "more layers": ("bert/prefix_left_out", {"leave_out": []}, "P804"),
    "shared weights": ("bert/compacter", {"shared_W_phm": True}, "P802"),
    "positions": (WITH_RELATIVE_POSITIONS, {}, "P802"),
}


@pytest.mark.parametrize("case", LOW_RANK)
def test_refusals_of_other_types(case: str, tmp_path: Path) -> None:
    key, changes, code = LOW_RANK[case]
    shutil.copytree(FOLDER / key, tmp_path / "in")
    file = tmp_path / "in/adapter_config.json"
    values = json.loads(file.read_text())
    values["config"] |= changes
    file.write_text(json.dumps(values))
    model = base(key.partition("/")[0])
    refused(code, lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model), model)


@pytest.mark.parametrize(("case", "name"), [("compacter", "phm_rule"), ("vera", "lora_A"), ("dvora", "lora_B")])
def test_what_is_shared_and_the_library_did_not_save(case: str, name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "bert" / case, tmp_path / "in")
    file = tmp_path / "in/adapter.safetensors"
    save_file({key: one for key, one in load_file(file).items() if not key.endswith(f"task.{name}")}, file)
    diagnostic = refused("P803", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bert")))
    assert name in diagnostic.message


def test_interventions_of_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """The library counts the tokens of the decoder by the mask of the encoder."""
    shutil.copytree(FOLDER / "bert/noreft", tmp_path / "in")
    file = tmp_path / "in/adapter.safetensors"
    tensors = {key.replace("bert.encoder.layer", "model.encoder.layers"): one for key, one in load_file(file).items()}
    save_file(tensors, file)
    diagnostic = refused("P802", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bart")))
    assert "the mask of the encoder" in diagnostic.message


def test_direft_that_the_library_forgets_is_told(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "bert/direft", tmp_path / "in")
    file = tmp_path / "in/adapter_config.json"
    values = json.loads(file.read_text())
    assert values["config"].pop("subtract_projection") is False
    file.write_text(json.dumps(values))
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bert"))
    assert any("NoReFT" in note for note in result.notes)
    assert "subtract" not in result.spec
    assert "subtract=false" in imported("bert/direft", tmp_path / "direft").spec


FUSIONS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Any]]] = {
    "a temperature": ("P802", "a,b/adapter_fusion_config.json", lambda v: v["config"].update(temperature=True)),
    "the query before the norm": (
        "P802",
        "a,b/adapter_fusion_config.json",
        lambda v: v["config"].update(query_before_ln=True),
    ),
    "an unknown key": ("P802", "a,b/adapter_fusion_config.json", lambda v: v["config"].update(phantom=1)),
    "no value": ("P803", "a,b/adapter_fusion_config.json", lambda v: v["config"].update(value=False)),
    "a name of a configuration": ("P802", "a,b/adapter_fusion_config.json", lambda v: v.update(config="dynamic")),
    "a stack": ("P802", "adapter_setup.json", lambda v: v["adapter_setup"].update(type="Stack")),
    "a fusion of stacks": (
        "P802",
        "adapter_setup.json",
        lambda v: v["adapter_setup"]["children"][0].update(type="Stack"),
    ),
    "a path": ("P803", "adapter_setup.json", lambda v: v["adapter_setup"]["children"][0].update(children=["../a"])),
    "another activation": ("P802", "b/adapter_config.json", lambda v: v["config"].update(non_linearity="gelu")),
    "another scale": ("P802", "b/adapter_config.json", lambda v: v["config"].update(scaling=2.0)),
}


@pytest.mark.parametrize("case", FUSIONS)
def test_refusals_of_fusions(case: str, tmp_path: Path) -> None:
    code, file, edit = FUSIONS[case]
    shutil.copytree(FOLDER / "bert/fusion", tmp_path / "in")
    values = json.loads((tmp_path / "in" / file).read_text())
    edit(values)
    (tmp_path / "in" / file).write_text(json.dumps(values))
    model = base("bert")
    refused(code, lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model), model)
    assert not (tmp_path / "ours").exists()


def test_a_head_of_the_library_is_not_left_out_silently(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "bert/seq_bn", tmp_path / "in")
    (tmp_path / "in/head_config.json").write_text("{}")
    save_file({"heads.task.1.weight": torch.zeros(3, 16)}, tmp_path / "in/model_head.safetensors")
    diagnostic = refused("P802", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bert")))
    assert "heads.task.1.weight" in diagnostic.message


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    shutil.copytree(FOLDER / "bert/prefix", tmp_path / "in")
    (tmp_path / "in/pytorch_adapter.bin").write_bytes(pickle.dumps({"a": Code()}))
    refused("P803", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bert")))
    assert not (tmp_path / "ran").exists()


def test_scales_of_an_earlier_release(tmp_path: Path) -> None:
    """Before 1.1 the library computed LoRA with the scale 1, and its loader says so."""
    shutil.copytree(FOLDER / "bert/lora", tmp_path / "in")
    file = tmp_path / "in/adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "version": "adapters.1.0.1"}))
    spec = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=base("bert")).spec
    assert "lora(x, r=2)" in spec
