"""Bottleneck adapters leave for AdapterHub with the bits with which they came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import peftc
from peftc.cli.main import main
from tests.exchange.adapterhub.exported import CASES
from tests.exchange.adapterhub.models import FOLDER, base
from tests.matrix import some
from tests.refusals import refused


@pytest.mark.parametrize("key", some(CASES, 2))
def test_bits_go_both_ways(key: str, tmp_path: Path) -> None:
    name = key.partition("/")[0]
    peftc.import_adapter(FOLDER / key, tmp_path / "ours", model=base(name))
    peftc.export(tmp_path / "ours", tmp_path / "back", to="adapterhub", model=base(name))
    before = load_file(FOLDER / key / "adapter.safetensors")
    after = {k.replace(".peftc.", ".task."): v for k, v in load_file(tmp_path / "back/adapter.safetensors").items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    one, two = (json.loads((f / "adapter_config.json").read_text()) for f in (FOLDER / key, tmp_path / "back"))
    theirs = {k: v for k, v in one["config"].items() if k in two["config"] and k != "residual_before_ln"}
    assert theirs == {k: v for k, v in two["config"].items() if k != "residual_before_ln"}
    again = peftc.import_adapter(tmp_path / "back", tmp_path / "again", model=base(name))
    assert again.spec == json.loads((tmp_path / "ours/adapter.json").read_text())["spec"]


REFUSALS = {
    "no bottleneck": "edit e at layer[*].attn.q { h += lora(x, r=2) }",
    "what the ffn reads": "edit e at layer[*].ffn { h += adapter(x, r=4) }",
    "the sum without the norm": "edit e at layer[*].ffn { h += adapter(h + res, r=4) }",
    "another sum": "edit e at layer[*].ffn { h = adapter(h, r=4) }",
    "dropout": "edit e at layer[*].ffn { h += adapter(h, r=4, dropout=0.1) }",
    "no bias": "edit e at layer[*].ffn { h += adapter(h, r=4, bias=false) }",
    "two widths": "edit e at layer[0].ffn { h += adapter(h, r=4) }\nedit f at layer[1].ffn { h += adapter(h, r=2) }",
    "some of a layer": "edit e at layer[0].ffn | layer[*].attn { h += adapter(h, r=4) }",
    "two at a site": "edit e at layer[*].ffn { h += adapter(h, r=4) }\nedit f at layer[*].ffn { h += adapter(h, r=4) }",
    "shared": "let a = shared(adapter(r=4))\nedit e at layer[*].ffn { h += a(h) }",
    "trained": "edit e at layer[*].ffn { h += adapter(h, r=4) }\ntrain n = [w, b] at layer[*].norm",
    "two equations": "edit e at layer[*].ffn { h += adapter(h, r=4)\n h *= vector(init=1) }",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    model = base("bert")
    peftc.compile(f"peft 2\n{REFUSALS[case]}\n", model, seed=0)
    refused("P801", lambda: peftc.export(model, tmp_path / "back", to="adapterhub"))
    assert not (tmp_path / "back").exists()


def test_the_command(tmp_path: Path) -> None:
    base("bert").save_pretrained(tmp_path / "base")
    spec = "peft 2\nedit e at layer[*].ffn { h += 2 * adapter(res, r=4) }\n"
    peftc.save(peftc.compile(spec, base("bert"), seed=0), tmp_path / "ours")
    to = ["export", str(tmp_path / "ours"), "--to", "adapterhub", "-o", str(tmp_path / "back")]
    assert main([*to, "--model", str(tmp_path / "base"), "--max-rank", "3"]) != 0
    assert main([*to, "--model", str(tmp_path / "base")]) == 0
    config = json.loads((tmp_path / "back/adapter_config.json").read_text())["config"]
    assert (config["scaling"], config["is_parallel"], config["reduction_factor"]) == (2.0, True, 4)
