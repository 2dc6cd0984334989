"""Saved adapters: loaded bit for bit, all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import peftc
from peftc.adapters.metadata import METADATA
from peftc.syntax import parser
from tests import zoo
from tests.adapters.saved import (
    DTYPES,
    PREFIX,
    SPEC,
    compiled,
    description,
    logits,
    refused,
    tensors_of,
)
from tests.laws.harness import Before
from tests.matrix import checkerboard

# Save and load
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), checkerboard(("bart", "gpt2", "llama"), DTYPES))
def test_save_and_load_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = SPEC if name != "llama" else SPEC.replace("[w, b]", "[w]")
    model = compiled(name, spec, dtype)
    assert peftc.save(model, tmp_path / "a") == tmp_path / "a"
    again = zoo.build(name, dtype)
    before = Before.of(again)
    assert peftc.load(str(tmp_path / "a"), again) is again
    trained, here = peftc.parameters(model), peftc.parameters(again)
    assert list(trained) == list(here)
    assert all(torch.equal(here[k], v) and here[k].dtype == v.dtype for k, v in trained.items())
    assert {p.requires_grad for p in here.values()} == {True}
    assert torch.equal(logits(name, model), logits(name, again))
    peftc.remove(again)
    before.assert_same(again)


def test_names_and_description(tmp_path: Path) -> None:
    model = compiled("bart")
    peftc.save(model, tmp_path)
    tensors, metadata = load_file(tensors_of(tmp_path)), description(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([METADATA, tensors_of(tmp_path).name])
    assert set(tensors) == set(peftc.parameters(model))
    assert "enc.q/encoder.layer[0].attn.self.q/lora.A" in tensors
    assert "k/s/lora.B" in tensors
    assert "n/model.encoder.layers.0.self_attn_layer_norm.weight" in tensors
    assert metadata["format_version"] == "1.7"
    assert set(metadata["forms"]) == {"lora", "adapter", "gate"}
    assert metadata["file"] == f"adapter-{metadata['sha256'][:16]}.safetensors"
    assert metadata["seed"] == 3
    assert metadata["peftc"] == peftc.__version__
    assert metadata["plan"]["totals"]["stored"] == sum(t.numel() for t in tensors.values())
    assert metadata["base"]["type"] == "bart"
    assert metadata["base"]["fingerprint"] == metadata["plan"]["model"]["fingerprint"]
    assert not [name for name in metadata["base"]["tensors"] if "peftc" in name]
    assert metadata["sha256"] == hashlib.sha256(tensors_of(tmp_path).read_bytes()).hexdigest()
    peftc.parse(metadata["spec"])
    peftc.parse(metadata["source"])
    assert "expect" in metadata["source"]


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model = compiled("bart", PREFIX)
    peftc.save(model, tmp_path / "a")
    peftc.save(model, tmp_path / "b")
    loaded = peftc.load(tmp_path / "a", zoo.build("bart"))
    peftc.save(loaded, tmp_path / "c")
    one, two, three = (tensors_of(tmp_path / d).read_bytes() for d in "abc")
    assert one == two == three
    assert (tmp_path / "a" / METADATA).read_bytes() == (tmp_path / "b" / METADATA).read_bytes()
    assert description(tmp_path / "c")["spec"] == description(tmp_path / "a")["spec"]


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_base_in_another_dtype(saved: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    """Edit parameters are float32 on both; trained base parameters are cast."""
    model = compiled("bert", SPEC, saved)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("bert").to(torch.bfloat16).to(loaded))
    trained = peftc.parameters(model)
    for key, p in peftc.parameters(again).items():
        assert p.dtype == (loaded if key.startswith("n/") else torch.float32)
        assert torch.equal(p, trained[key].to(p.dtype))


def test_float64_bases_make_float64_parameters(tmp_path: Path) -> None:
    peftc.save(compiled("llama", "edit e at layer[*].attn.q { h += lora(x, r=2) }"), tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama").to(torch.float64))
    assert {p.dtype for p in peftc.parameters(again).values()} == {torch.float64}


def test_after_a_partial_fold_the_rest_belongs_to_the_folded_base(tmp_path: Path) -> None:
    model = compiled("llama", PREFIX + "\nedit e at layer[*].attn.q { h += lora(x, r=2) }")
    want = logits("llama", model)
    peftc.fold(model)
    peftc.save(model, tmp_path)
    assert {name.partition("/")[0] for name in load_file(tensors_of(tmp_path))} == {"p"}
    result = refused(tmp_path, zoo.build("llama"), "P524", strict=True)
    assert "q_proj" in result.notes[0]
    folded = peftc.remove(model)
    peftc.load(tmp_path, folded)
    torch.testing.assert_close(logits("llama", folded), want)


# Prefixes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shared"), checkerboard(("bart", "t5", "llama"), (False, True)))
def test_a_reparametrised_prefix_is_saved_as_rows(name: str, shared: bool, tmp_path: Path) -> None:
    spec = "edit p at decoder.layer[*].attn.self { kv = concat(kv, prefix(len=3, reparam=mlp(5))) }"
    if shared:
        spec = "let s = shared(prefix(len=3, reparam=mlp(5)))\n" + spec.replace("prefix(len=3, reparam=mlp(5))", "s()")
    model = compiled(name, spec, torch.float64)
    peftc.save(model, tmp_path)
    tensors = load_file(tensors_of(tmp_path))
    places = {f"p/decoder.layer[{i}].attn.self/prefix.{part}" for i in range(3) for part in ("key", "value")}
    assert set(tensors) == places
    again = peftc.load(tmp_path, zoo.build(name, torch.float64))
    assert set(peftc.parameters(again)) == places
    assert (logits(name, again) - logits(name, model)).abs().max() < 1e-12
    assert "reparam" in description(tmp_path)["source"]
    assert "reparam" not in description(tmp_path)["spec"]


def test_keep_saves_the_network_that_makes_them(tmp_path: Path) -> None:
    model = compiled("bart", PREFIX.replace("mlp(5)", "mlp(5), keep=true"))
    peftc.save(model, tmp_path)
    assert set(load_file(tensors_of(tmp_path))) == set(peftc.parameters(model))
    again = peftc.load(tmp_path, zoo.build("bart"))
    assert torch.equal(logits("bart", model), logits("bart", again))
    assert "p/p.prefix.encoder.self/prefix.embedding" in peftc.parameters(again)


def test_one_prefix_saved_as_rows_and_one_with_its_mlp(tmp_path: Path) -> None:
    spec = (
        "edit p at decoder.layer[*].attn { kv = concat(prefix(len=2, reparam=mlp(4), keep=true), kv, prefix(len=3)) }\n"
        "edit r at encoder.layer[*].attn { kv = concat(prefix(len=1, reparam=mlp(3), keep=false), kv) }"
    )
    model = compiled("bart", spec, torch.float64)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("bart", torch.float64))
    assert (logits("bart", again) - logits("bart", model)).abs().max() < 1e-12


def test_a_shared_prefix_used_twice_in_an_edit_needs_keep(tmp_path: Path) -> None:
    spec = "let s = shared(prefix(len=2, reparam=mlp(4)))\nedit p at layer[*].attn { kv = concat(s(), kv, s()) }"
    model = compiled("llama", spec)
    with pytest.raises(peftc.PeftcError, match="P528"):
        peftc.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# The folder
# -------------------------------------------------------------------------------------------------


def test_an_adapter_replaces_an_adapter_and_leaves_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "a"
    peftc.save(compiled("bert", PREFIX), folder)
    (folder / "README.md").write_text("mine")
    model = compiled("bert")
    peftc.save(model, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["README.md", METADATA, tensors_of(folder).name])
    assert torch.equal(logits("bert", peftc.load(folder, zoo.build("bert"))), logits("bert", model))


@pytest.mark.parametrize("lacks", [None, "format_version", "peftc", "sha256"])
def test_a_description_of_any_format_is_replaced(lacks: str | None, tmp_path: Path) -> None:
    """Later formats may have other keys. A file without a version or a hash is not ours."""
    excerpt = {"format_version": "9.0", "peftc": "9.0", "sha256": "0" * 64}
    text = json.dumps({key: value for key, value in excerpt.items() if key != lacks})
    (tmp_path / METADATA).write_text(text)
    model = compiled("bert", PREFIX)
    if lacks is None:
        peftc.save(model, tmp_path)
        assert description(tmp_path)["format_version"] == "1.7"
    else:
        with pytest.raises(peftc.PeftcError, match="P526"):
            peftc.save(model, tmp_path)
        assert [path.read_text() for path in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize("what", ["file", "other", "foreign"])
def test_anything_else_is_left_alone(what: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if what == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / ("notes.txt" if what == "other" else METADATA)).write_text('{"r": 8}')
    files = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(peftc.PeftcError, match="P526"):
        peftc.save(compiled("bert", PREFIX), target)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == files


@pytest.mark.parametrize("fails_at", range(1, 3))
def test_a_failure_while_writing_leaves_the_old_adapter(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = compiled("bert", PREFIX)
    peftc.save(old, tmp_path / "a")
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    count, replace = iter(range(1, 100)), os.replace

    def failing(source: Any, target: Any) -> None:
        if next(count) == fails_at:
            raise OSError("no space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(peftc.PeftcError, match="no space left"):
            peftc.save(compiled("bert"), tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == files


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.adapters import files

    def failing(*args: Any) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(files, "flush", failing)
    with pytest.raises(peftc.PeftcError, match="disk gone"):
        peftc.save(compiled("bert", PREFIX), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_parameters_without_values_are_not_saved(tmp_path: Path) -> None:
    model = compiled("llama", PREFIX).to("meta")
    with pytest.raises(peftc.PeftcError, match="P527"):
        peftc.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.save(zoo.build("llama"), tmp_path / "a")


def test_a_load_parses_a_spec_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the text of a form that is the package's own."""
    peftc.save(compiled("bart"), tmp_path / "a")
    texts, parse = list[str](), parser._parse
    monkeypatch.setattr(parser, "_parse", lambda source, start: (texts.append(source.path), parse(source, start))[1])
    for _ in range(2):
        peftc.load(tmp_path / "a", zoo.build("bart"))
    assert len(texts) == 1
