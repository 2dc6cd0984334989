"""Models saved to run without peftc: they compute the same where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from tests import zoo

LINEARS = """peft 1
edit a at layer[*].attn.q { h += 2 * lora(x, r=4, dropout=0.1) }
edit f at layer[*].ffn { h += 4 * adapter(x, r=8) }
edit d at layer[*].attn.v { w = magnitude(w + lowrank(r=2)) }
"""
STATES = """peft 1
edit n at layer[*].ffn { let g = gate(x) h = (1 - g) * h + g * adapter(h, r=4, norm_in=true) }
edit q at layer[*].attn { q *= vector() v *= vector() }
train norms = [w] at layer[*].norm
"""
OWN = """peft 2
form tied(x, r) {
    fixed A[r, d(x)] per edit = kaiming
    param B[d(out), r] per edit = normal(0.1)
    param s[d(out)] = 1
    f = s * B @ A @ x
}
edit e at layer[*].attn.q | layer[*].attn.k { h += tied(x, r=4) }
"""
ROTATIONS = """peft 2
form kept(x) {
    param A[d(out), d(x)] = normal(0.1)
    f = (A - initial(A)) @ x
}
edit o at layer[*].attn.q { w = orthogonal(w, block=4) }
edit r at layer[*] { h += reft(h, r=2) }
edit p at layer[*].ffn { h += phm(x, r=4, n=2) }
edit k at layer[*].attn.k { h += kept(x) }
"""
CASES = {"llama": ("llama", LINEARS), "bart": ("bart", STATES), "bert": ("bert", OWN), "half": ("llama", LINEARS)}
CASES["gpt2"] = ("gpt2", ROTATIONS)
CASES["prefix"] = ("llama", "peft 1 edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }")


def saved_model(name: str, folder: Path) -> nn.Module:
    kind, spec = CASES[name]
    model: Any = zoo.build(kind, torch.float32).eval()
    if name == "half":
        for parameter in model.parameters():  # not of the buffers, which `from_pretrained` computes again
            parameter.data = parameter.data.bfloat16()
    peftc.compile(spec, model, seed=0)
    for parameter in peftc.parameters(model).values():
        with torch.no_grad():
            draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            parameter += 0.1 * draw.to(parameter.dtype)
    peftc.save_standalone(model, folder / name)
    torch.save(dict(zoo.inputs(kind, model)), folder / f"{name}.inputs")
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("standalone")


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    models = {name: saved_model(name, folder) for name in CASES}
    environment = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("reader.py")), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return models


@pytest.mark.ahead_of_time
@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_computes_the_same_without_peftc(name: str, folder: Path, models: dict[str, nn.Module]) -> None:
    model: Any = models[name]
    result = torch.load(folder / f"{name}.outputs")
    inputs = torch.load(folder / f"{name}.inputs")
    out = model(**inputs)
    out = out.logits if "logits" in out else out[0]
    # Beside peftc, LoRA is computed in another order.
    torch.testing.assert_close(result["out"], out, rtol=1e-5, atol=1e-5)
    out.float().square().sum().backward()
    own = {n: p.grad for n, p in model.named_parameters() if ".peftc." in n or "peftc_shared" in n}
    assert result["gradients"].keys() == own.keys()
    for name_, gradient in own.items():
        other = result["gradients"][name_]
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    if "generated" in result:
        generated: Tensor = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
        assert torch.equal(result["generated"], generated)
    if "dtypes" in result:
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert result["dtypes"] == sorted({str(p.dtype) for p in model.parameters()})


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("edit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(4)), kv) }", "`prefix` at `"),
        ("edit v at layer[*].attn.q { w += masked(density=0.5) }", "`masked` at `"),
        ("edit v at layer[*].attn.q { w += lines(density=0.5) }", "`lines` at `"),
        ("edit r at layer[*] { h += reft(h, r=2, first=1) }", "runs all children"),
        ("edit t at layer[*].attn.q per task { h += lora(x, r=2) }", "for each task"),
    ],
)
def test_what_needs_peftc_is_refused(spec: str, reason: str, tmp_path: Path) -> None:
    model = peftc.compile(f"peft 1\n{spec}", zoo.build("llama"), seed=0)
    with pytest.raises(PeftcError, match=reason) as refused:
        peftc.save_standalone(model, tmp_path / "model")
    assert [d.code for d in refused.value.diagnostics] == ["P570"]
    assert not [*tmp_path.iterdir()]


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_that_transformers_does_not_load_is_refused(tmp_path: Path) -> None:
    model = peftc.compile(
        'peft 1\nedit a at "layers.*.linear1" { h += lora(x, r=2) }', OwnModel(), sample={"x": torch.randn(2, 3, 16)}
    )
    with pytest.raises(PeftcError, match="no PreTrainedModel"):
        peftc.save_standalone(model, tmp_path / "model")


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    model = peftc.compile("peft 1\nedit a at layer[*].attn.q { h += lora(x, r=2) }", zoo.build("bert"), seed=0)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PeftcError) as refused:
        peftc.save_standalone(model, tmp_path)
    assert [d.code for d in refused.value.diagnostics] == ["P551"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base: Any = zoo.build("bert", torch.float32)
    base.save_pretrained(tmp_path / "base")
    spec = tmp_path / "spec.peft"
    spec.write_text("peft 1\nedit a at layer[*].attn.q { h += lora(x, r=2) }\n")
    arguments = ["compile", str(spec), "--model", str(tmp_path / "base"), "--standalone"]
    assert main([*arguments, "-o", str(tmp_path / "model")]) == 0
    assert "loads without peftc" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_edited.py"} <= written
    assert main(arguments) == 1, "without a folder"
    assert main([*arguments, "-o", str(tmp_path / "model")]) == 1, "which has files"
    arguments[3] = "bert-base-uncased"
    assert main([*arguments, "-o", str(tmp_path / "other")]) == 1, "without weights"
    assert not (tmp_path / "other").exists()
