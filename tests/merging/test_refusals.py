"""What cannot be merged is refused by a diagnostic, and the output does not exist."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import peftc
from peftc.cli.main import main
from peftc.merging import checkpoint, writer
from tests.merging.checkpoints import LORA, save_adapter, save_base, tensors

PREFIX = "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    cls = save_base(tmp_path / "base", "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", tmp_path / "base", cls, LORA)
    return tmp_path


def refused(root: Path, code: str, text: str = "", **options: Any) -> None:
    with pytest.raises(peftc.PeftcError) as error:
        peftc.merge(root / "base", options.pop("adapter", root / "adapter"), root / "out", **options)
    assert [d.code for d in error.value.diagnostics] == [code], error.value
    assert text in str(error.value)
    assert {path.name for path in root.iterdir()} <= {"base", "adapter", "mixed", "other"}


def shard(root: Path) -> Path:
    return sorted((root / "base").glob("*.safetensors"))[1]


def truncate(root: Path) -> None:
    os.truncate(shard(root), shard(root).stat().st_size - 7)


def lengthen(root: Path) -> None:
    with shard(root).open("ab") as file:
        file.write(b"0")


def drop_tensor(root: Path) -> None:
    values = load_file(shard(root))
    values.pop(next(iter(values)))
    save_file(values, shard(root))


def name_outside(root: Path) -> None:
    index = root / "base" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] = dict.fromkeys(data["weight_map"], "../other/x.safetensors")
    index.write_text(json.dumps(data))


def no_json(root: Path) -> None:
    (root / "base" / "model.safetensors.index.json").write_text("{")


def remove_shard(root: Path) -> None:
    shard(root).unlink()


def other_shape(root: Path) -> None:
    values = load_file(shard(root))
    key = next(iter(values))
    values[key] = torch.cat([values[key], values[key]])
    save_file(values, shard(root))


def lose_tensor(root: Path) -> None:
    index = root / "base" / "model.safetensors.index.json"
    data, values = json.loads(index.read_text()), load_file(shard(root))
    del data["weight_map"][next(iter(values))]
    values.pop(next(iter(values)))
    index.write_text(json.dumps(data))
    save_file(values, shard(root))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated shard": (truncate, "P701"),
    "a longer shard": (lengthen, "P701"),
    "a tensor that the index lists": (drop_tensor, "P701"),
    "a file outside of the folder": (name_outside, "P701"),
    "an index that is no JSON": (no_json, "P701"),
    "no shard": (remove_shard, "P505"),
    "another shape": (other_shape, "P702"),
    "a missing tensor": (lose_tensor, "P702"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(damage: str, root: Path) -> None:
    change, code = DAMAGE[damage]
    change(root)
    refused(root, code)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float, root: Path) -> None:
    values = load_file(shard(root))
    key = next(key for key in values if "q_proj" in key)
    values[key][0, 1] = value
    save_file(values, shard(root))
    refused(root, "P530", key, other_weights=True)


def test_an_error_in_a_process_is_the_same(root: Path) -> None:
    values = load_file(shard(root))
    key = next(key for key in values if "q_proj" in key)
    values[key][0, 1] = float("nan")
    save_file(values, shard(root))
    refused(root, "P530", key, other_weights=True, jobs=2)


def test_a_process_that_is_killed_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.Writer, "copy", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    refused(root, "P705", jobs=2)


def test_a_sum_that_overflows_is_refused(root: Path) -> None:
    cls = save_base(root / "other", "llama", torch.float16)
    model: Any = save_adapter(root / "mixed", root / "other", cls, LORA)
    next(iter(peftc.parameters(model).values())).data.fill_(1e9)
    peftc.save(model, root / "mixed")
    shutil.rmtree(root / "base")
    (root / "other").rename(root / "base")
    refused(root, "P530", "float16", adapter=root / "mixed")


def test_other_weights_are_refused(root: Path) -> None:
    values = load_file(shard(root))
    key = next(key for key in values if "mlp" in key)
    values[key] = values[key] * 2
    save_file(values, shard(root))
    refused(root, "P524", key)
    assert peftc.merge(root / "base", root / "adapter", root / "out", other_weights=True).folded == ("a",)


def test_another_architecture_is_refused(root: Path) -> None:
    save_base(root / "other", "qwen2", torch.bfloat16)
    shutil.rmtree(root / "base")
    (root / "other").rename(root / "base")
    refused(root, "P523", other_weights=True)


def test_edits_that_do_not_fold_are_refused(root: Path) -> None:
    save_adapter(root / "mixed", root / "base", type_of(root), PREFIX + LORA)
    refused(root, "P531", "`p` does not fold", adapter=root / "mixed")


def test_a_bias_that_the_class_does_not_read_is_refused(root: Path) -> None:
    spec = LORA + "\nedit v at layer[*].attn.q { h += vector(init=0) }"
    save_adapter(root / "mixed", root / "base", type_of(root), spec)
    refused(root, "P531", "does not read", adapter=root / "mixed")
    refused(root, "P531", "does not read", adapter=root / "mixed", dry_run=True)
    report = peftc.merge(root / "base", root / "mixed", root / "out", partial=True)
    assert (report.folded, [*report.refused]) == (("a",), ["v"])


def type_of(root: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def test_a_quantised_checkpoint_is_refused(root: Path) -> None:
    path = root / "base" / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(data))
    refused(root, "P707", "bitsandbytes")


def test_tensors_of_8_bits_are_copied_and_not_edited(root: Path) -> None:
    for file in (root / "base").glob("*.safetensors"):
        values = load_file(file)
        values |= {k: v.to(torch.float8_e4m3fn) for k, v in values.items() if "up_proj" in k}
        save_file(values, file, {"format": "pt"})
    refused(root, "P524", "quantised")
    peftc.merge(root / "base", root / "adapter", root / "out", other_weights=True)
    before, after = tensors(root / "base"), tensors(root / "out")
    assert all(torch.equal(before[k].view(torch.uint8), after[k].view(torch.uint8)) for k in before if "up_proj" in k)
    assert any(not torch.equal(before[k], after[k]) for k in before if "q_proj" in k)


def test_an_edit_of_8_bits_is_refused(root: Path) -> None:
    save_adapter(root / "mixed", root / "base", type_of(root), "edit a at layer[*].ffn.up { h += lora(x, r=2) }")
    for file in (root / "base").glob("*.safetensors"):
        values = load_file(file)
        values |= {k: v.to(torch.float8_e4m3fn) for k, v in values.items() if "up_proj" in k}
        save_file(values, file, {"format": "pt"})
    refused(root, "P531", "float8_e4m3fn", adapter=root / "mixed", other_weights=True)


def test_a_folder_with_files_is_refused(root: Path) -> None:
    (root / "out").mkdir()
    (root / "out" / "notes.txt").write_text("mine")
    with pytest.raises(peftc.PeftcError, match="P703"):
        peftc.merge(root / "base", root / "adapter", root / "out")
    assert [path.name for path in (root / "out").iterdir()] == ["notes.txt"]
    (root / "out" / "notes.txt").unlink()
    assert peftc.merge(root / "base", root / "adapter", root / "out").output


@pytest.mark.parametrize("function", ["copy_range", "write_all"])
def test_a_full_disk_leaves_nothing(function: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [0], getattr(writer, function)

    def full(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > (2 if function == "copy_range" else 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    monkeypatch.setattr(writer, function, full)
    refused(root, "P704", "No space left")


def test_a_base_that_becomes_shorter_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in a thread, while those before them are computed."""
    original, threads = checkpoint.read_into, list[bool]()

    def read_into(descriptor: int, buffer: memoryview, start: int, file: str) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        if len(threads) == 3:
            raise checkpoint.damaged(file, "it has become shorter while it was read")
        original(descriptor, buffer, start, file)

    monkeypatch.setattr(checkpoint, "read_into", read_into)
    refused(root, "P701", "shorter")
    assert not threads[2]


def test_verification_reads_what_is_on_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = writer.Writer.flush

    def flip(self: Any) -> None:
        entry = next(e for e in self.layout.entries.values() if "norm" in e.key)
        byte = os.pread(self.files[entry.file], 1, entry.start)
        os.pwrite(self.files[entry.file], bytes([byte[0] ^ 1]), entry.start)
        original(self)

    assert peftc.merge(root / "base", root / "adapter", root / "other", verify=True).folded == ("a",)
    monkeypatch.setattr(writer.Writer, "flush", flip)
    refused(root, "P706", "norm", verify=True)


def test_a_dry_run_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(root / "base"), str(root / "adapter"), "--dry-run"]) == 0
    assert "would merge a into 6 tensors" in capsys.readouterr().out
    assert {path.name for path in root.iterdir()} == {"base", "adapter"}


def test_the_command_needs_an_output(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(root / "base"), str(root / "adapter")]) == 1
    assert "error[P545]" in capsys.readouterr().err


def test_jobs_write_the_same_files(root: Path) -> None:
    peftc.merge(root / "base", root / "adapter", root / "out")
    calls: list[tuple[int, int]] = []
    report = peftc.merge(
        root / "base", root / "adapter", root / "jobs", jobs=3, progress=lambda done, total: calls.append((done, total))
    )
    one, other = tensors(root / "out"), tensors(root / "jobs")
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert len(report.tensors) == 6
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.merge(root / "base", root / "adapter", root / "more", jobs=0)
