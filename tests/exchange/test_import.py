"""An adapter of PEFT computes in peftc what it computes there, and goes back with the same bits."""

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
from peftc.cli.main import main
from tests import zoo
from tests.exchange.adapters import assert_same_outputs, edited, in_peft, tensors
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LINEARS = {"gpt2": ["c_attn", "c_proj"], "t5": ["q", "wo"], "bert": ["query", "dense"], "roberta": ["query", "dense"]}


def trained(name: str, folder: Path, dtype: torch.dtype = torch.float64, type_: Any = None, **options: Any) -> Any:
    """PEFT's model with random values, saved."""
    config = (type_ or peft.LoraConfig)(**options)
    model: Any = peft.get_peft_model(zoo.build(name, dtype), config).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def loaded(name: str, folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return peftc.load(folder, zoo.build(name, dtype)).eval()


def lora(name: str, **options: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 6, "target_modules": LINEARS.get(name, ["q_proj", "fc2", "down_proj"]), **options}


@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, "mistral"])
def test_lora_computes_the_same_and_goes_back(name: str, tmp_path: Path) -> None:
    theirs = trained(name, tmp_path / "in", **lora(name))
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    ours = loaded(name, tmp_path / "ours")
    assert_same_outputs(ours, theirs, name)
    peftc.export(ours, tmp_path / "back")
    one, two = tensors(tmp_path / "in"), tensors(tmp_path / "back")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    peftc.import_adapter(tmp_path / "back", tmp_path / "again", model=zoo.build(name, torch.float64))
    assert spec(tmp_path / "again") == spec(tmp_path / "ours")


@pytest.mark.parametrize(("bias", "dora"), [("all", False), ("lora_only", False), ("all", True)])
def test_biases_go_both_ways(bias: str, dora: bool, tmp_path: Path) -> None:
    options = lora("bert", target_modules=["query", "dense"], bias=bias, use_dora=dora)
    theirs = trained("bert-classifier", tmp_path / "in", **options)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("bert-classifier", torch.float64))
    peftc.export(tmp_path / "ours", tmp_path / "back", model=zoo.build("bert-classifier", torch.float64))
    assert json.loads((tmp_path / "back/adapter_config.json").read_text())["bias"] == bias
    one, two = tensors(tmp_path / "in"), tensors(tmp_path / "back")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    again: Any = peft.PeftModel.from_pretrained(zoo.build("bert-classifier", torch.float64), str(tmp_path / "back"))
    assert_same_outputs(again.eval(), theirs, "bert-classifier")


def spec(folder: Path) -> str:
    return json.loads((folder / "adapter.json").read_text())["spec"]


OPTIONS = {
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA": ("llama", {"use_dora": True}),
    "DoRA of a Conv1D": ("gpt2", {"use_dora": True}),
    "patterns": ("llama", {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3}}),
    "some layers": ("bert", {"layers_to_transform": [0, 2]}),
    "a bias of B": ("bert", {"lora_bias": True}),
    "biases": ("bert", {"bias": "all"}),
    "biases of LoRA": ("bert", {"bias": "lora_only"}),
    "a head": ("bert-classifier", {"modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}),
    "dropout": ("llama", {"lora_dropout": 0.125}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_equations(case: str, tmp_path: Path) -> None:
    name, options = OPTIONS[case]
    own = {"target_modules": ["query", "dense"]} if name.startswith("bert") else {}
    theirs = trained(name, tmp_path / "in", **lora(name, **own, **options))
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    assert_same_outputs(loaded(name, tmp_path / "ours"), theirs, name)


def test_an_embedding(tmp_path: Path) -> None:
    theirs = trained("bert", tmp_path / "in", r=4, target_modules=["word_embeddings"])
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("bert", torch.float64))
    assert_same_outputs(loaded("bert", tmp_path / "ours"), theirs, "bert")


def test_the_spec_is_what_a_person_would_write(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama"))
    text = "edit lora at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4, alpha=8) }"
    assert result.spec == f"peft 2\n\n{text}\n"


def test_bits_are_those_of_the_file(tmp_path: Path) -> None:
    """Of half precision, too, whatever the dtype of the base."""
    trained("llama", tmp_path / "in", torch.bfloat16, **lora("llama"))
    path = tmp_path / "in" / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float32))
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    theirs = sorted((tuple(t.shape), t.dtype, t.float().sum().item()) for t in load_file(path).values())
    ours = sorted((tuple(t.shape), t.dtype, t.float().sum().item()) for t in load_file(file).values())
    assert [str(one) for one in ours] == [str(one) for one in theirs]


def test_a_base_without_weights(tmp_path: Path) -> None:
    """By its configuration alone; `load` then takes any weights without a word."""
    theirs = trained("llama", tmp_path / "in", **lora("llama"))
    zoo.build("llama").config.save_pretrained(tmp_path / "base")
    arguments = ["import", str(tmp_path / "in"), "-o", str(tmp_path / "ours")]
    assert main([*arguments, "--model", str(tmp_path / "base" / "config.json")]) == 0
    assert_same_outputs(loaded("llama", tmp_path / "ours"), theirs, "llama")


def test_a_base_with_weights_is_known_again(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", torch.float32, **lora("llama"))
    zoo.build("llama", torch.float32).save_pretrained(tmp_path / "base")
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=tmp_path / "base")
    loaded("llama", tmp_path / "ours", torch.float32)
    other = zoo.build("llama", torch.float32)
    nn.init.ones_(other.lm_head.weight)
    with pytest.raises(peftc.PeftcError, match="P524"):
        peftc.load(tmp_path / "ours", other, strict=True)


def test_the_model_is_as_before(tmp_path: Path) -> None:
    trained("bert-classifier", tmp_path / "in", r=2, target_modules=["query"], modules_to_save=["classifier"])
    model = zoo.build("bert-classifier", torch.float64)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: one for name, (one, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_a_pickle_of_tensors_is_read_and_no_other(tmp_path: Path) -> None:
    theirs = trained("llama", tmp_path / "in", **lora("llama"))
    path = tmp_path / "in" / "adapter_model.safetensors"
    torch.save(load_file(path), tmp_path / "in" / "adapter_model.bin")
    path.unlink()
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    assert_same_outputs(loaded("llama", tmp_path / "ours"), theirs, "llama")
    torch.save({"run": print}, tmp_path / "in" / "adapter_model.bin")
    import_refused("P803", tmp_path)


def import_refused(code: str, folder: Path, model: nn.Module | None = None) -> peftc.Diagnostic:
    base = zoo.build("llama", torch.float64) if model is None else model
    diagnostic = refused(code, lambda: peftc.import_adapter(folder / "in", folder / "no", model=base), base)
    assert not (folder / "no").exists()
    return diagnostic


KEYS: dict[str, Any] = {
    "lora_aplha": 16,
    "peft_type": "UNKNOWN",
    "use_qalora": True,
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1],
    "init_lora_weights": "pissa",
    "lora_alpha": "8",
    "rank_pattern": {"(a*)*b": 3},
    "trainable_token_indices": [1, 2],
    "use_rslora": "yes",
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_without_an_equation_is_named(key: str, tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", **lora("llama"))
    path = tmp_path / "in" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: KEYS[key]}))
    assert key in import_refused("P802", tmp_path).message


def test_files_that_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    import_refused("P803", tmp_path)
    (tmp_path / "in" / "adapter_config.json").write_text("[1]")
    import_refused("P803", tmp_path)
    (tmp_path / "in" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    import_refused("P803", tmp_path)
    (tmp_path / "in" / "adapter_model.safetensors").write_bytes(b"\x09" * 30)
    import_refused("P803", tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", **lora("llama"))
    path = tmp_path / "in" / "adapter_model.safetensors"
    own = load_file(path)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**own, key: own[key].t().contiguous()}, path)
    import_refused("P804", tmp_path)
    save_file({**own, key: torch.full_like(own[key], torch.nan)}, path)
    import_refused("P561", tmp_path)
    save_file({**own, key.replace("layers.0", "layers.9"): own[key].clone()}, path)
    import_refused("P804", tmp_path)
    save_file({**own, key.replace("lora_A", "lora_C"): own[key].clone()}, path)
    import_refused("P802", tmp_path)
    save_file(own, path)
    import_refused("P804", tmp_path, zoo.build("llama", torch.float64, hidden_size=16))


TYPES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "DoRA": (
        "llama",
        peft.LoraConfig,
        {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["q_proj", "up_proj"]},
    ),
    "DoRA of a Conv1D": ("gpt2", peft.LoraConfig, {"r": 3, "use_dora": True, "target_modules": ["c_fc"]}),
    "(IA)³": (
        "llama",
        peft.IA3Config,
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "(IA)³ of BERT": (
        "bert",
        peft.IA3Config,
        {"target_modules": ["key", "0.output.dense"], "feedforward_modules": ["0.output.dense"]},
    ),
    "LoHa": ("llama", peft.LoHaConfig, {"r": 3, "alpha": 6, "target_modules": ["q_proj", "up_proj"]}),
    "OFT": ("llama", peft.OFTConfig, {"oft_block_size": 8, "target_modules": ["q_proj"]}),
    "OFT, exact": (
        "bert",
        peft.OFTConfig,
        {"oft_block_size": 8, "target_modules": ["query"], "use_cayley_neumann": False},
    ),
    "LN tuning": ("bert", peft.LNTuningConfig, {"target_modules": ["output.LayerNorm"]}),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("case", TYPES)
def test_other_types_are_equations(case: str, tmp_path: Path) -> None:
    name, type_, options = TYPES[case]
    theirs = trained(name, tmp_path / "in", type_=type_, **options)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    ours = loaded(name, tmp_path / "ours")
    assert_same_outputs(ours, theirs, name)
    report = peftc.export(ours, tmp_path / "back")
    assert report.type == theirs.peft_config["default"].peft_type.value
    one, two = tensors(tmp_path / "in"), tensors(tmp_path / "back")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert_same_outputs(ours, in_peft(name, tmp_path / "back"), name)


def test_an_earlier_series_of_oft_is_refused(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.OFTConfig, oft_block_size=8, target_modules=["q_proj"])
    path = tmp_path / "in" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "peft_version": "0.17.1"}))
    assert "peft_version" in import_refused("P802", tmp_path).message


@pytest.mark.parametrize("equation", ["w += hadamard(r={r}, alpha={r})", "w = magnitude(w + lowrank(r={r}))"])
def test_numbers_of_a_type_have_patterns(equation: str, tmp_path: Path) -> None:
    edits = [f"edit {n} at {at} {{ {equation.format(r=r)} }}" for n, at, r in SITES]
    model = edited("llama", "\n".join(edits))
    report = peftc.export(model, tmp_path / "out")
    assert_same_outputs(model, in_peft("llama", tmp_path / "out"), "llama")
    assert [one.rank for one in report.modules] == [2, 3, 3, 4, 4, 4]


SITES = (("a", "layer[0].attn.q", 2), ("b", "layer[1..2].attn.q", 3), ("c", "layer[*].ffn.up", 4))


def test_a_type_with_numbers_that_it_cannot_have_is_refused(tmp_path: Path) -> None:
    two = "edit a at layer[0].attn.q { w = orthogonal(w, block=4) }\n"
    two += "edit b at layer[1].attn.q { w = orthogonal(w, block=8) }"
    diagnostic = refused("P801", lambda: peftc.export(edited("llama", two), tmp_path / "no"))
    assert "one of each" in diagnostic.message
    fused = edited("gpt2", "edit a at layer[*].ffn.up { w += hadamard(r=2) }")
    refused("P801", lambda: peftc.export(fused, tmp_path / "no"))


def test_of_a_hub_repository_only_files_of_adapters_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trained("llama", tmp_path / "in", **lora("llama"))
    asked: list[Any] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path / "in")

    monkeypatch.setattr("peftc.exchange.adapter_import.snapshot_download", snapshot)
    peftc.import_adapter("someone/tuned", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    peft = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
    hub = ["adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin", "adapter_interface.json"]
    heads = ["head_config.json", "model_head.safetensors", "pytorch_model_head.bin"]
    assert sorted(asked) == sorted(["someone/tuned", *peft, *hub, *heads])
    assert_same_outputs(loaded("llama", tmp_path / "ours"), theirs, "llama")


def test_the_base_of_an_adapter_that_came_in_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model` may be a relative path; the adapter names the folder itself."""
    base = zoo.build("llama").eval()
    base.save_pretrained(tmp_path / "base")
    trained("llama", tmp_path / "in", torch.float32, **lora("llama"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["import", "in", "-o", "ours", "--model", "base"]) == 0
    assert json.loads((tmp_path / "ours/adapter.json").read_text())["base"]["id"] == str((tmp_path / "base").resolve())
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["export", "../ours", "-o", "back"]) == 0
    (tmp_path / "base").rename(tmp_path / "moved")
    diagnostic = refused("P502", lambda: peftc.export(tmp_path / "ours", "again"))
    assert diagnostic.notes == ("the adapter names this base; `model` names another",)
