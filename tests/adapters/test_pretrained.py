"""Base and adapter in one call, and a push to a local stub of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, BertModel, GPT2LMHeadModel

import peftc
from tests import zoo
from tests.adapters.hub import SHA, Hub, local_hub
from tests.adapters.saved import describe, description
from tests.laws.harness import randomise
from tests.refusals import refused

SPEC = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\nedit p at layer[*].ffn { h += adapter(h, r=2) }\n"
HEAD = 'edit q at layer[*].attn.q { h += lora(x, r=2) }\ntrain head = [w, b] at "classifier"\n'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with local_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.build("gpt2").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    return tmp_path / "base"


def compiled(folder: Path) -> Any:
    model = peftc.compile(SPEC, GPT2LMHeadModel.from_pretrained(folder).eval(), seed=0)
    randomise(peftc.parameters(model))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([[1, 2, 3]])).logits


@pytest.mark.parametrize("way", ["save", "save_pretrained"])
def test_an_adapter_knows_its_base(folder: Path, tmp_path: Path, way: str) -> None:
    model = compiled(folder)
    peftc.save(model, tmp_path / "a") if way == "save" else model.save_pretrained(tmp_path / "a")
    origin = description(tmp_path / "a")["base"]["origin"]
    assert origin["name"] == str(folder)
    assert (origin["library"], origin["architecture"]) == ("transformers", "GPT2LMHeadModel")
    again = peftc.from_pretrained(tmp_path / "a", strict=True)
    assert type(again).__name__ == "GPT2LMHeadModel"
    assert torch.equal(logits(again), logits(model))
    half = peftc.from_pretrained(tmp_path / "a", dtype=torch.bfloat16, device_map="cpu")
    assert next(half.parameters()).dtype == torch.bfloat16
    other = peftc.from_pretrained(tmp_path / "a", GPT2LMHeadModel.from_pretrained(folder))
    assert torch.equal(logits(other), logits(model))
    (tmp_path / "moved").mkdir()
    folder.rename(tmp_path / "moved" / "base")
    assert "is not here" in refused("P585", lambda: peftc.from_pretrained(tmp_path / "a")).message
    moved = peftc.from_pretrained(tmp_path / "a", tmp_path / "moved" / "base", model_class=AutoModelForCausalLM)
    assert torch.equal(logits(moved), logits(model))


def test_an_adapter_is_loaded_under_a_new_spec(folder: Path, tmp_path: Path) -> None:
    model = compiled(folder)
    model.save_pretrained(tmp_path / "a")
    new = SPEC.replace("edit q", "edit query").replace("peft 1", "peft 2") + "moved q -> query\n"
    again = peftc.from_pretrained(tmp_path / "a", spec=new)
    assert {name.partition("/")[0] for name in peftc.parameters(again)} == {"query", "p"}
    assert torch.equal(logits(again), logits(model))
    ranked = new.replace("lora(x, r=2)", "lora(x, r=rank)").replace("peft 2\n", "peft 2\nlet rank = 3\n")
    peftc.from_pretrained(tmp_path / "a", spec=ranked, settings={"rank": 2})
    assert "do not fit" in refused("P525", lambda: peftc.from_pretrained(tmp_path / "a", spec=ranked)).message


def test_a_base_that_is_an_adapter(folder: Path, tmp_path: Path) -> None:
    compiled(folder).save_pretrained(tmp_path / "a")
    message = refused("P586", lambda: peftc.from_pretrained(tmp_path / "a", base=tmp_path / "a")).message
    assert "no weights of a base" in message


def test_a_model_that_was_cast_is_cast_again(folder: Path, tmp_path: Path) -> None:
    """The spec says the dtype of edits, and a cast is not in the spec."""
    model = compiled(folder).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "a")
    again = peftc.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    assert {p.dtype for p in peftc.parameters(again).values()} == {torch.float32}
    assert torch.equal(logits(again.to(torch.bfloat16)), logits(model))


def test_a_trained_head_and_its_labels(tmp_path: Path) -> None:
    """The base on the disk has neither head nor labels; the configuration of the adapter has."""
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    BertModel(config).save_pretrained(tmp_path / "base")
    model: Any = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5).eval()
    peftc.compile("peft 1\n" + HEAD, model, seed=0).save_pretrained(tmp_path / "a")  # type: ignore[operator]
    assert torch.equal(logits(peftc.from_pretrained(tmp_path / "a")), logits(model))
    peftc.remove(model)
    untrained = peftc.compile("peft 1\n" + HEAD.partition("train")[0], model, seed=0)
    peftc.save(untrained, tmp_path / "b")
    assert "no weights for" in refused("P586", lambda: peftc.from_pretrained(tmp_path / "b", num_labels=5)).message


def test_bases_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    model = peftc.compile(SPEC, zoo.build("gpt2"), seed=0)
    peftc.save(model, tmp_path / "a")
    refused("P585", lambda: peftc.from_pretrained(tmp_path / "a"))
    refused("P586", lambda: peftc.from_pretrained(tmp_path / "a", tmp_path))
    refused("P523", lambda: peftc.from_pretrained(tmp_path / "a", zoo.build("gpt2", n_layer=1)))
    refused("P582", lambda: peftc.from_pretrained(tmp_path / "none"))
    refused("P520", lambda: peftc.from_pretrained(folder))
    base = description(tmp_path / "a")["base"]
    describe(tmp_path / "a", base=base | {"origin": base["origin"] | {"architecture": "AutoConfig"}})
    refused("P585", lambda: peftc.from_pretrained(tmp_path / "a", folder))
    describe(tmp_path / "a", base=base | {"origin": base["origin"] | {"library": "os"}})
    refused("P521", lambda: peftc.from_pretrained(tmp_path / "a", folder))


def test_a_push_has_a_card_and_loads(hub: Hub, folder: Path, tmp_path: Path) -> None:
    model = compiled(folder)
    url = peftc.push(model, "me/small", evaluation={"accuracy": 0.91}, license="mit", token="hf_secret")
    assert url.endswith(f"me/small/commit/{SHA}")
    assert "Bearer hf_secret" in hub.tokens
    files = hub.files["me/small"]
    card = files["README.md"].decode()
    data = huggingface_hub.ModelCard(card).data
    assert (data.library_name, data.license, data.tags) == ("peftc", "mit", ["peftc"])
    assert data.base_model is None, "a folder of this machine is no base for others"
    total = json.loads(files["adapter.json"])["plan"]["totals"]
    for part in ("edit q at layer[*].attn.q", f"| trained | {total['trained']:,} |", "| accuracy | 0.91 |"):
        assert part in card
    assert {"adapter.json", "config.json", "README.md"} < set(files)
    again = peftc.from_pretrained("me/small", cache_dir=tmp_path / "downloads")
    assert torch.equal(logits(again), logits(model))
    assert list(peftc.specs(again)) == ["small"]
    refused("P582", lambda: peftc.from_pretrained("me/none", cache_dir=tmp_path / "downloads"))


def test_a_base_of_the_hub_is_named_with_its_commit(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.files["us/base"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = GPT2LMHeadModel.from_pretrained("us/base", cache_dir=tmp_path / "cache").eval()
    peftc.compile(SPEC, model, seed=0)
    randomise(peftc.parameters(model))
    model.save_pretrained(tmp_path / "a")
    origin = description(tmp_path / "a")["base"]["origin"]
    assert (origin["name"], origin["revision"]) == ("us/base", SHA)
    assert torch.equal(logits(peftc.from_pretrained(tmp_path / "a", cache_dir=tmp_path / "c")), logits(model))
    (tmp_path / "a" / "optimizer.pt").touch()
    peftc.push(tmp_path / "a", "me/folder")
    assert "optimizer.pt" not in hub.files["me/folder"]
    assert huggingface_hub.ModelCard(hub.files["me/folder"]["README.md"].decode()).data.base_model == "us/base"
    model.save_pretrained(tmp_path / "b", push_to_hub=True, repo_id="me/hooked")
    assert "adapter.json" in hub.files["me/hooked"]


def test_a_hub_that_refuses(hub: Hub, folder: Path) -> None:
    refused("P582", lambda: peftc.push(compiled(folder), "not a name"))
