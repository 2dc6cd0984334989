"""Adapters leave for AdapterHub with the bits with which they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import peftc
from peftc.cli.main import main
from tests.exchange.adapterhub.exported import CASES
from tests.exchange.adapterhub.models import FOLDER, MODELS, base, output
from tests.laws.harness import randomise
from tests.matrix import some
from tests.refusals import refused

# What the library does not read, such as the scale beside a gate.
WITHOUT_MEANING = {"alpha", "bottleneck_size", "residual_before_ln", "reduction_factor"}
HALF = {f"{name}/{case}" for name in MODELS for case in ("loreft", "noreft")}  # with a unit for no tokens


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "adapter.safetensors"
    return load_file(file) if file.exists() else torch.load(folder / "pytorch_adapter.bin", weights_only=True)


def configs(folder: Path) -> list[dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())["config"]
    return config["configs"] if config.get("architecture") == "union" else [config]


@pytest.mark.parametrize("key", some(CASES, 3))
def test_bits_go_both_ways(key: str, tmp_path: Path) -> None:
    name = key.partition("/")[0]
    ours = peftc.import_adapter(FOLDER / key, tmp_path / "ours", model=base(name))
    peftc.export(tmp_path / "ours", tmp_path / "back", to="adapterhub", model=base(name))
    before, after = tensors(FOLDER / key), tensors(tmp_path / "back")
    after = {k.replace(".peftc.", ".task."): v for k, v in after.items()}
    before = {k: v for k, v in before.items() if key not in HALF or ".units.1." not in k}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    if key not in ("bert/two", "gpt2/adapter_plus"):  # in another order; and with other options for the same sum
        for one, two in zip(configs(FOLDER / key), configs(tmp_path / "back"), strict=True):
            left = WITHOUT_MEANING | ({"dropout", "tied_weights"} if "reft" in key else set())
            assert {k: v for k, v in two.items() if k not in left and one[k] != v} == {}
    again = peftc.import_adapter(tmp_path / "back", tmp_path / "again", model=base(name))
    assert sorted(again.spec.split()) == sorted(ours.spec.split())


LEAVING = {
    "widths by layer": (
        "edit e at layer[0].ffn { h += adapter(h, r=4) }\nedit f at layer[1].ffn { h += adapter(h, r=2) }"
    ),
    "a scale in two places": "edit e at layer[*].attn.q { h += 2 * lora(x, r=4, alpha=2) }",
    "by a let": "edit e at layer[*].attn.k { let g = gate(x)  h += g * lora(x, r=2) }",
    "one layer": "edit e at layer[1].attn.q | layer[1].attn.v { h *= 3 * vector() }",
    "rows": "edit e at layer[*].attn { kv = concat(prefix(len=2, reparam=none), kv) }",
    "ReFT of one layer": "edit e at layer[1] { h += reft(h, r=2, orthogonal=false, last=2) }",
    "all at once": (
        "edit p at layer[*].attn { kv = concat(prefix(len=2, reparam=mlp(3), keep=true), kv) }\n"
        "edit a at layer[*].attn { h += adapter(h, reduction=4) }\nedit b at layer[*].ffn { h += phm(res, r=4, n=2) }\n"
        "edit q at layer[*].ffn.up { h += lora(x, r=2, dropout=0.1) }\ntrain c = [w, b] at head"
    ),
}


@pytest.mark.parametrize("case", LEAVING)
def test_what_was_never_there_comes_back(case: str, tmp_path: Path) -> None:
    model = base("bert").double()
    peftc.compile(f"peft 2\n{LEAVING[case]}\n", model, seed=0)
    randomise(peftc.parameters(model))
    peftc.export(model, tmp_path / "there", to="adapterhub")
    peftc.import_adapter(tmp_path / "there", tmp_path / "back", model=base("bert"))
    loaded = peftc.load(tmp_path / "back", base("bert").double())
    torch.testing.assert_close(output("bert", loaded), output("bert", model), rtol=0, atol=1e-10)
    assert len(peftc.parameters(loaded)) == len(peftc.parameters(model))


REFUSALS = {
    "a LoRA behind the attention": "edit e at layer[*].attn.o { h += lora(x, r=2) }",
    "a LoRA of what the Linear writes": "edit e at layer[*].attn.q { h += lora(h, r=2) }",
    "a scale beside a gate": "edit e at layer[*].attn.q { h += 4 * gate(x) * lora(x, r=2) }",
    "a gate of something else": "edit e at layer[*].attn.q { h += gate(h) * lora(x, r=2) }",
    "two ranks": "edit e at layer[*].attn.q { h += lora(x, r=2) }\nedit f at layer[*].attn.v { h += lora(x, r=4) }",
    "queries of one layer": "edit e at layer[0].attn.q | layer[*].attn.v { h += lora(x, r=2) }",
    "another form": "edit e at layer[*].attn.q { h += vera(x, r=2) }",
    "ReFT elsewhere": "edit e at layer[*].ffn { h += reft(h, r=2, orthogonal=false, first=2) }",
    "ReFT of all tokens": "edit e at layer[*] { h += reft(h, r=2, orthogonal=false) }",
    "ReFT from a token on": "edit e at layer[*] { h += reft(h, r=2, orthogonal=false, first=2, token=3) }",
    "orthonormal rows": "edit e at layer[*] { h += reft(h, r=2, first=2) }",
    "DiReFT": "edit e at layer[*] { h += reft(h, r=2, orthogonal=false, subtract=false, first=2) }",
    "scaled ReFT": "edit e at layer[*] { h += 2 * reft(h, r=2, orthogonal=false, first=2) }",
    "two kinds of ReFT": (
        "edit e at layer[0] { h += reft(h, r=2, orthogonal=false, first=2) }\n"
        "edit f at layer[1] { h += reft(h, r=2, orthogonal=false, last=2) }"
    ),
    "DoRA": "edit e at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }",
    "rows behind the keys": "edit e at layer[*].attn { kv = concat(kv, prefix(len=2, reparam=none)) }",
    "a scaled prefix": "edit e at layer[*].attn { kv = concat(2 * prefix(len=2, reparam=none), kv) }",
    "a gate for each row": "edit e at layer[*].attn { kv = concat(gate(x, rows=2) * prefix(len=2), kv) }",
    "an MLP for each layer": (
        "edit e at layer[0].attn { kv = concat(prefix(len=2, reparam=mlp(3)), kv) }\n"
        "edit f at layer[1].attn { kv = concat(prefix(len=2, reparam=mlp(3)), kv) }"
    ),
    "an invertible adapter alone": 'edit e at "bert.embeddings" { h = coupling(h) }',
    "an invertible adapter elsewhere": (
        'edit e at "bert.embeddings.LayerNorm" { h = coupling(h) }\nedit f at layer[*].ffn { h += adapter(h, r=4) }'
    ),
    "another activation than that of bottlenecks": (
        'edit e at "bert.embeddings" { h = coupling(h) }\nedit f at layer[*].ffn { h += adapter(h, r=4, act=gelu) }'
    ),
    "the inverse": (
        'edit e at "bert.embeddings" { h = coupling(h, inverse=true) }\nedit f at layer[*].ffn { h += adapter(h, r=4) }'
    ),
    "a prompt": "edit e at input.embed { h = concat(prompt(len=2), h) }",
    "what the ffn reads": "edit e at layer[*].ffn { h += adapter(x, r=4) }",
    "the sum without the norm": "edit e at layer[*].ffn { h += adapter(h + res, r=4) }",
    "another sum": "edit e at layer[*].ffn { h = adapter(h, r=4) }",
    "dropout": "edit e at layer[*].ffn { h += adapter(h, r=4, dropout=0.1) }",
    "no bias": "edit e at layer[*].ffn { h += adapter(h, r=4, bias=false) }",
    "two widths in a layer": (
        "edit e at layer[*].attn { h += adapter(h, r=4) }\nedit f at layer[*].ffn { h += adapter(h, r=2) }"
    ),
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
    randomise(peftc.parameters(model))
    refused("P801", lambda: peftc.export(model, tmp_path / "back", to="adapterhub"))
    assert not (tmp_path / "back").exists()


def test_an_inverse_before_the_head_is_in_no_folder(tmp_path: Path) -> None:
    peftc.import_adapter(FOLDER / "gpt2/seq_bn_inv", tmp_path / "ours", model=base("gpt2"))
    model = base("gpt2")
    diagnostic = refused(
        "P801", lambda: peftc.export(tmp_path / "ours", tmp_path / "back", to="adapterhub", model=model)
    )
    assert "inverse" in "\n".join([diagnostic.message, *diagnostic.notes])


def test_the_command(tmp_path: Path) -> None:
    base("bert").save_pretrained(tmp_path / "base")
    spec = "peft 2\nedit e at layer[*].ffn { h += 2 * adapter(res, r=4) }\n"
    peftc.save(peftc.compile(spec, base("bert"), seed=0), tmp_path / "ours")
    to = ["export", str(tmp_path / "ours"), "--to", "adapterhub", "-o", str(tmp_path / "back")]
    assert main([*to, "--model", str(tmp_path / "base"), "--max-rank", "3"]) != 0
    assert main([*to, "--model", str(tmp_path / "base")]) == 0
    config = json.loads((tmp_path / "back/adapter_config.json").read_text())["config"]
    assert (config["scaling"], config["is_parallel"], config["reduction_factor"]) == (2.0, True, 4)
