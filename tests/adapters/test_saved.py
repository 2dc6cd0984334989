"""Saved adapters: loaded bit for bit, all or nothing, and only onto the base they belong to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import peftc
from peftc.adapters.metadata import METADATA
from tests import zoo
from tests.laws.harness import Before, randomise, values
from tests.matrix import checkerboard

SPEC = (
    "let s = shared(lora(r=2))\n"
    "edit enc.q at layer[*].attn.q { h += lora(x, r=2) }\n"
    "edit k at layer[*].attn.k { h += s(x) }\n"
    "edit f at layer[*].ffn { let g = gate(x)  h += g * adapter(h, r=2) }\n"
    "train n = [w, b] at layer[*].norm\n"
    "expect stored > 10"
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PREFIX = "edit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }"


def compiled(name: str, spec: str = SPEC, dtype: torch.dtype = torch.float32, **base: Any) -> nn.Module:
    model = zoo.build(name, dtype, **base)
    peftc.compile("peft 1\n" + spec, model, seed=3)
    randomise(peftc.parameters(model))
    return model


@torch.no_grad()
def logits(name: str, model: nn.Module) -> torch.Tensor:
    return model(**zoo.inputs(name, model))[0]


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / METADATA).read_text())


def describe(folder: Path, **changes: Any) -> None:
    (folder / METADATA).write_text(json.dumps(description(folder) | changes))


def tensors_of(folder: Path) -> Path:
    """The file of tensors that the description names."""
    return folder / description(folder)["file"]


def retensor(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the tensors, with a description that matches them."""
    save_file(tensors, tensors_of(folder))
    shapes = {n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in tensors.items()}
    describe(folder, tensors=shapes, sha256=hashlib.sha256(tensors_of(folder).read_bytes()).hexdigest())


def refused(folder: Path, model: nn.Module, code: str, **kwargs: Any) -> peftc.Diagnostic:
    """Loading fails with this code, and the model is unchanged."""
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.load(folder, model, **kwargs)
    before.assert_same(model)
    (result,) = excinfo.value.diagnostics
    assert result.code == code, result
    return result


# Save and load
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), checkerboard(("bart", "gpt2", "llama"), DTYPES))
def test_what_is_saved_is_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
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
    assert metadata["format_version"] == "1.1"
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
        assert description(tmp_path)["format_version"] == "1.1"
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
    from peftc.adapters import writing

    def failing(*args: Any) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(writing, "flush", failing)
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


# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return peftc.save(compiled("bert"), tmp_path / "a")


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 8, 200, -1])
def test_a_flipped_bit_is_seen(at: int, folder: Path) -> None:
    flipped(tensors_of(folder), at)
    assert "sha256" in refused(folder, zoo.build("bert"), "P521").notes[0]


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_seen(keep: int, folder: Path) -> None:
    data = tensors_of(folder).read_bytes()[:keep]
    tensors_of(folder).write_bytes(data)
    refused(folder, zoo.build("bert"), "P521")
    describe(folder, sha256=hashlib.sha256(data).hexdigest())  # even where the description agrees
    refused(folder, zoo.build("bert"), "P521")


def test_a_pickle_is_not_read(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tensors_of(folder))
    describe(folder, sha256=hashlib.sha256(tensors_of(folder).read_bytes()).hexdigest())
    refused(folder, zoo.build("bert"), "P521")


DESCRIPTIONS: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "not text": lambda text: "\udcff",
    "no version": lambda text: text.replace('"format_version"', '"version"'),
    "unknown key": lambda text: text.replace('"seed"', '"speed": 1,\n"seed"'),
    "unknown key inside": lambda text: text.replace('"facts"', '"fax": 1,\n"facts"'),
    "missing key": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "base"}),
    "wrong type": lambda text: text.replace('"seed": 3', '"seed": "three"'),
    "a path for a file": lambda text: text.replace('"file": "', '"file": "../'),
    "an absolute file": lambda text: text.replace('"file": "', '"file": "/tmp/'),
    "another file": lambda text: text.replace('"file": "adapter-', '"file": "adapter_'),
    "another sample": lambda text: text.replace('"sample": [', '"sample": [1.5,'),
    "other plan": lambda text: text.replace('"foldable": true', '"foldable": "perhaps"'),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_damaged_description_is_refused(case: str, folder: Path) -> None:
    text = (folder / METADATA).read_text()
    damaged = DESCRIPTIONS[case](text)
    assert damaged != text
    (folder / METADATA).write_bytes(damaged.encode(errors="surrogateescape"))
    refused(folder, zoo.build("bert"), "P521")


@pytest.mark.parametrize("keys", [("base",), ("base", "seed"), ("base", "seed", "plan", "spec")], ids=len)
def test_all_mistakes_in_a_description_are_counted(keys: tuple[str, ...], folder: Path) -> None:
    (folder / METADATA).write_text(json.dumps({k: v for k, v in description(folder).items() if k not in keys}))
    result = refused(folder, zoo.build("bert"), "P521")
    assert result.message.endswith(f" ({len(keys)} mistakes)" if len(keys) > 1 else "an adapter")
    assert {note.partition(":")[0] for note in result.notes} <= set(keys)
    assert len(result.notes) == min(3, len(keys))


def test_a_newer_format_is_refused(folder: Path) -> None:
    describe(folder, format_version="2.0", something_new=1)
    assert "'2.0'" in refused(folder, zoo.build("bert"), "P522").message


@pytest.mark.parametrize("which", [METADATA, "tensors"])
def test_a_missing_file_is_refused(which: str, folder: Path) -> None:
    name = METADATA if which == METADATA else tensors_of(folder).name
    (folder / name).unlink()
    assert name in refused(folder, zoo.build("bert"), "P520").notes[0]


def lost(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("k/s/lora.A")


def added(tensors: dict[str, torch.Tensor]) -> None:
    tensors["k/t/lora.A"] = torch.zeros(2)


def turned(tensors: dict[str, torch.Tensor]) -> None:
    tensors["k/s/lora.A"] = tensors["k/s/lora.A"].T.contiguous()


def reshaped_norm(tensors: dict[str, torch.Tensor]) -> None:
    key = next(k for k in tensors if k.startswith("n/"))
    tensors[key] = torch.zeros(5)


@pytest.mark.parametrize(
    ("change", "excerpt"),
    [
        (lost, "1 are missing, such as `k/s/lora.A`"),
        (added, "1 are unknown, such as `k/t/lora.A`"),
        (turned, "`k/s/lora.A` is [32, 2], expected [2, 32]"),
        (reshaped_norm, "is [5], expected [32]"),
    ],
)
def test_tensors_that_do_not_fit_the_spec(change: Callable[[Any], None], excerpt: str, folder: Path) -> None:
    tensors = load_file(tensors_of(folder))
    change(tensors)
    retensor(folder, tensors)
    assert excerpt in "\n".join(refused(folder, zoo.build("bert"), "P525").notes)


def test_tensors_other_than_those_listed(folder: Path) -> None:
    tensors = description(folder)["tensors"]
    tensors["k/s/lora.A"]["dtype"] = "float16"
    describe(folder, tensors=tensors)
    assert "float16 [2, 32] listed, float32 [2, 32] there" in refused(folder, zoo.build("bert"), "P521").notes[0]


@pytest.mark.parametrize(
    ("spec", "excerpt"),
    [
        ("peft 1\nedit e at layer[*].nothing { h += lora(x, r=2) }", "P20"),
        ("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2000) }", "P311"),
        ("__import__('os').abort()", "P0"),
    ],
)
def test_a_spec_that_cannot_be_planned(spec: str, excerpt: str, folder: Path) -> None:
    describe(folder, spec=spec)
    result = refused(folder, zoo.build("bert"), "P525")
    assert excerpt in result.notes[0]


# Other bases
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "excerpt"),
    [
        ("bert", {"num_hidden_layers": 2}, "16 parameters (`bert.encoder.layer.2."),
        ("bert", {"num_hidden_layers": 4}, "16 parameters (`bert.encoder.layer.3."),
        ("bert", {"intermediate_size": 40}, "[48, 32] there and [40, 32] here"),
        ("bert", {"num_attention_heads": 2}, "`num_attention_heads` of the configuration is 4 there and 2 here"),
        ("bert", {"hidden_act": "relu"}, "`hidden_act` of the configuration is gelu there and relu here"),
        ("bert", {"tie_word_embeddings": False}, "other parameters are tied"),
        ("roberta", {}, "it was saved for a model of type bert, this is roberta"),
    ],
)
def test_another_base_is_refused_with_what_differs(name: str, change: Any, excerpt: str, folder: Path) -> None:
    result = refused(folder, zoo.build(name, **change), "P523")
    assert excerpt in "\n".join(result.notes), result
    assert "bert" in result.message


def test_values_that_train_replaces_may_differ(folder: Path) -> None:
    """A trained head is saved with the adapter, so the base's own head may differ where it is
    loaded.
    """
    model = zoo.build("bert")
    with torch.no_grad():
        model.get_submodule("bert.encoder.layer.1.output.LayerNorm").weight.add_(1.0)
    peftc.load(folder, model)
    key = "n/bert.encoder.layer.1.output.LayerNorm.weight"
    assert torch.equal(peftc.parameters(model)[key], load_file(tensors_of(folder))[key])


def test_a_base_without_weights_is_refused(folder: Path) -> None:
    refused_meta = zoo.build("bert").to("meta")
    with pytest.raises(peftc.PeftcError, match="P527"):
        peftc.load(folder, refused_meta)


def test_a_model_with_an_edit_of_that_name_is_refused(folder: Path) -> None:
    model = compiled("bert")
    parameters = values(peftc.parameters(model))
    with pytest.raises(peftc.PeftcError, match="P412"):
        peftc.load(folder, model)
    assert all(torch.equal(v, parameters[k]) for k, v in peftc.parameters(model).items())


def test_a_failure_while_loading_leaves_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.adapters import loading

    model = zoo.build("bert")
    before = Before.of(model)

    def short(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
        result = peftc.parameters(model, name)
        result["k/missing"] = nn.Parameter(torch.zeros(1))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loading, "parameters", short)
        with pytest.raises(KeyError):
            peftc.load(folder, model)
    before.assert_same(model)
