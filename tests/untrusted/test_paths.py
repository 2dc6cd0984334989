"""Specs, adapters and configurations open only regular files in folders that the user named."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from peftc.diagnostics.render import render_text
from peftc.models.names import read_values
from peftc.models.sources import load_model, resolve
from peftc.semantics import check_file, expand, read_spec
from peftc.semantics.files import MAX_BYTES
from peftc.syntax import parse_text

METHOD = "peft 1\nmethod m(r = 4) { edit a at layer[*].attn.q { h += lora(x, r=r) } }\n"
EDIT = "peft 1\nedit a at layer[*].attn.q { h += lora(x, r=2) }\n"
SECRET = "hunter2"


def using(path: object) -> str:
    return f'peft 1\nuse m from "{path}"\napply m()\n'


def refused(call: Callable[[], object]) -> PeftcError:
    with pytest.raises(PeftcError) as excinfo:
        call()
    return excinfo.value


def codes(error: PeftcError) -> list[str]:
    return [diagnostic.code for diagnostic in error.diagnostics]


@contextmanager
def in_time(seconds: float = 20) -> Generator[None]:
    """Fails a call that blocks."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """`own` is the spec's folder; `other` has another spec and a secret."""
    for name in ("own/below", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "m.peft").write_text(METHOD)
    (tmp_path / "other" / "secret").write_text(f"{SECRET}\n")
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("saved") / "adapter"
    peftc.save(peftc.compile(EDIT, model(), seed=0), target)
    return target


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16)).eval()


def main_spec(folders: Path, path: object) -> Path:
    spec = folders / "own" / "main.peft"
    spec.write_text(using(path))
    return spec


# Within the folders
# --------------------------------------------------------------------------------------------------


def paths_within(folders: Path) -> list[object]:
    own = folders / "own"
    (own / "m.peft").write_text(METHOD)
    (own / "below" / "m.peft").write_text(METHOD)
    (own / "link.peft").symlink_to("below/m.peft")
    return ["m.peft", "./m.peft", "below/m.peft", "below/../m.peft", "link.peft", own / "m.peft"]


def test_the_folder_of_the_spec_and_what_is_below(folders: Path) -> None:
    for path in paths_within(folders):
        assert check_file(read_spec(main_spec(folders, path))) == [], path


def paths_outside(folders: Path) -> list[object]:
    own, other = folders / "own", folders / "other"
    (own / "link.peft").symlink_to(other / "m.peft")
    (own / "linked").symlink_to(other)
    (own / "secret.peft").symlink_to(other / "secret")
    return [
        "../other/m.peft",
        "../other/secret",
        "../nothing.peft",
        other / "m.peft",
        other / "secret",
        "/etc/passwd",
        "/dev/zero",
        "../../../../../../../../../../../etc/passwd",
        "link.peft",
        "linked/m.peft",
        "below/../../other/m.peft",
        "secret.peft",
    ]


def test_no_other_file_is_read(folders: Path) -> None:
    for path in paths_outside(folders):
        spec = main_spec(folders, path)
        with in_time():
            errors = check_file(read_spec(spec))
        assert {error.code for error in errors} == {"P123"}, path  # which then has no method
        outside = next(error for error in errors if error.code == "P123")
        assert outside.span is not None
        assert outside.source is not None
        assert outside.source.text[outside.span.start : outside.span.end] == f'"{path}"'
        text = render_text(errors)
        assert SECRET not in text
        assert "root:" not in text


def test_the_existence_of_an_outside_file_is_not_revealed(folders: Path) -> None:
    there, not_there = (
        [str(e).replace("secret", "").replace("nothing", "") for e in check_file(read_spec(main_spec(folders, path)))]
        for path in ("../other/secret", "../other/nothing")
    )
    assert there == not_there


def test_folders_that_the_user_names(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folders / "other"
    for path in ("../other/m.peft", other / "m.peft", "m.peft"):  # next to the spec, else in the folders, in order
        spec = main_spec(folders, path)
        assert main(["check", str(spec), "--include", str(other)]) == 0
        assert main(["expand", str(spec), "--include", str(folders / "own" / "below"), "--include", str(other)]) == 0
        capsys.readouterr()
        for include in ([other], other, str(other)):
            assert peftc.plan(spec, model(), include=include).totals.trained > 0
            assert peftc.design(spec, model(), include=include)
        assert peftc.specs(peftc.compile(spec, model(), include=[other]))
    assert codes(refused(lambda: peftc.plan(main_spec(folders, "../nowhere"), model(), include=[other])))[0] == "P123"


def test_the_folder_of_the_spec_comes_first(folders: Path) -> None:
    (folders / "own" / "m.peft").write_text(METHOD.replace("r = 4", "r = 7"))
    [edit] = expand(read_spec(main_spec(folders, "m.peft")), include=[folders / "other"]).statements
    assert "value=7" in repr(edit)


def test_included_files_may_use_files_of_the_specs_folder(folders: Path) -> None:
    (folders / "own" / "m.peft").write_text(METHOD)
    (folders / "own" / "below" / "n.peft").write_text('peft 1\nuse m from "../m.peft"\nmethod n() { apply m(r=3) }\n')
    spec = folders / "own" / "main.peft"
    spec.write_text('peft 1\nuse n from "below/n.peft"\napply n()\n')
    assert check_file(read_spec(spec)) == []
    assert "P123" in [diagnostic.code for diagnostic in check_file(read_spec(folders / "own" / "below" / "n.peft"))]


def test_a_missing_include_folder(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = main_spec(folders, "m.peft")
    for name in ("nowhere", "own/main.peft", "a\0b"):
        assert codes(refused(lambda name=name: expand(read_spec(spec), include=[folders / name]))) == ["P124"]
    assert main(["check", str(spec), "--include", str(folders / "nowhere")]) == 1
    assert "P124" in capsys.readouterr().out


def test_standard_input_and_texts_have_the_working_directory(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders / "own")
    (folders / "own" / "m.peft").write_text(METHOD)
    for path, code in (("m.peft", 0), ("../other/m.peft", 1)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(using(path).encode())))
        assert main(["check", "-"]) == code
        assert ("P123" in capsys.readouterr().out) == (code == 1)
        if code == 0:
            assert peftc.plan(using(path), model()).totals.trained > 0
        else:
            assert codes(refused(lambda path=path: peftc.plan(using(path), model())))[0] == "P123"


def test_a_folder_is_not_left_by_its_links(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folders / "own" / "evil.peft").symlink_to(folders / "other" / "secret")
    (folders / "own" / "good.peft").write_text(METHOD)
    assert main(["check", str(folders / "own")]) == 0
    assert "1 file" in capsys.readouterr().out


# Files that are not specs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        f"{SECRET}\n".encode(),
        f"# a comment\nPASSWORD={SECRET}\n".encode(),
        f"peft {SECRET}\n".encode(),
        f"\xff\xfe{SECRET}".encode("latin-1"),
        b"",
        b"# " + SECRET.encode() + b"\n" * 100_000,
    ],
)
def test_a_file_that_is_no_spec_is_not_shown(folders: Path, content: bytes) -> None:
    (folders / "own" / "notes").write_bytes(content)
    errors = check_file(read_spec(main_spec(folders, "notes")))
    assert "P125" in [error.code for error in errors]
    assert SECRET not in render_text(errors)


def test_a_spec_with_mistakes_is_shown(folders: Path) -> None:
    (folders / "own" / "m.peft").write_text(f"\ufeff# note\n\npeft 1\nedit {SECRET}\n")
    assert SECRET in render_text(check_file(read_spec(main_spec(folders, "m.peft"))))


# Special files
# ---------------------------------------------------------------------------------------------


def special_files(folder: Path) -> Generator[Path]:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    yield pipe
    directory = folder / "directory"
    directory.mkdir()
    yield directory
    if len(str(folder / "socket")) < 100:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "socket"))
        yield folder / "socket"
    yield Path("/dev/zero")
    link = folder / "link"
    link.symlink_to("/dev/zero")
    yield link


def test_only_regular_files_are_read(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in special_files(tmp_path):
        with in_time():
            assert codes(refused(lambda p=place: read_spec(p))) == ["P026"], place
            assert codes(refused(lambda p=place: read_values(p))) == ["P026"], place
            assert main(["plan", str(place), "--model", "gpt2"]) == (2 if place.is_dir() else 1)
        assert ("no .peft files" if place.is_dir() else "P026") in capsys.readouterr().err


def test_a_pipe_that_is_used(folders: Path) -> None:
    os.mkfifo(folders / "own" / "pipe")
    (folders / "own" / "directory").mkdir()
    for name in ("pipe", "directory"):
        with in_time():
            errors = check_file(read_spec(main_spec(folders, name)))
        assert {error.code for error in errors} == {"P026"}
        assert next(error for error in errors if error.code == "P026").span is not None


@pytest.mark.parametrize("name", ["adapter.json", "tensors"])
def test_adapters_are_regular_files(tmp_path: Path, saved: Path, name: str) -> None:
    for number, place in enumerate(special_files(tmp_path)):
        adapter = copy_of(saved, tmp_path / f"adapter{number}")
        replaced = adapter / name if name == "adapter.json" else next(adapter.glob("*.safetensors"))
        replaced.unlink()
        replaced.symlink_to(place)
        with in_time():
            assert codes(refused(lambda a=adapter: peftc.load(a, model()))) == ["P026"], place


def test_an_adapter_uses_no_files(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "m.peft").write_text(METHOD)
    for path in (tmp_path / "m.peft", "m.peft", "adapter.json", "/etc/passwd"):
        adapter = copy_of(saved, tmp_path / "adapter")
        (adapter / "m.peft").write_text(METHOD)
        values = json.loads((adapter / "adapter.json").read_text())
        (adapter / "adapter.json").write_text(json.dumps(values | {"spec": using(path)}))
        error = refused(lambda a=adapter: peftc.load(a, model()))
        assert codes(error) == ["P525"]
        assert "P123" in str(error)
        assert "root:" not in str(error)


def test_pipes_in_a_folder_with_weights(tmp_path: Path) -> None:
    base = model()
    base.save_pretrained(tmp_path)
    for name in ("generation_config.json", "config.json", "model.safetensors"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with in_time():
            assert codes(refused(lambda: load_model(resolve(str(tmp_path)))))[0] in {"P026", "P502"}
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(data)
    load_model(resolve(str(tmp_path)))


# Sizes
# --------------------------------------------------------------------------------------------------


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_file_sizes_are_checked_before_reading(tmp_path: Path, saved: Path) -> None:
    huge = 2**40
    with in_time():
        assert codes(refused(lambda: read_spec(sparse(tmp_path / "a.peft", huge)))) == ["P027"]
        assert codes(refused(lambda: read_values(sparse(tmp_path / "config.json", huge)))) == ["P027"]
        for name in ("adapter.json", "*.safetensors"):
            adapter = copy_of(saved, tmp_path / "adapter")
            sparse(next(adapter.glob(name)), huge)
            assert codes(refused(lambda a=adapter: peftc.load(a, model()))) == ["P027"]


def test_standard_input_is_not_read_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= MAX_BYTES + 1
            return b" " * size

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless()))
    assert main(["check", "-"]) == 1


def test_files_without_a_size() -> None:
    if Path("/proc/kallsyms").exists() and os.access("/proc/kallsyms", os.R_OK):
        assert codes(refused(lambda: read_spec("/proc/kallsyms"))) in (["P027"], ["P001"])


# Names
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a\0b.peft", "\0", "a\ud800.peft"])
def test_invalid_paths(path: str) -> None:
    for call in (
        lambda: read_spec(path),
        lambda: expand(parse_text(using(path))),
        lambda: read_values(Path(path)),
        lambda: peftc.load(path, model()),
    ):
        assert codes(refused(call))[0] == "P026"


def test_links_in_circles_and_long_names(folders: Path) -> None:
    own = folders / "own"
    (own / "circle.peft").symlink_to("circle.peft")
    for path in ("circle.peft", "circle.peft/m.peft", f"{'a' * 5000}.peft", "a/" * 3000):
        assert {diagnostic.code for diagnostic in check_file(read_spec(main_spec(folders, path)))} == {"P112"}
    assert codes(refused(lambda: read_spec(own / "circle.peft"))) == ["P112"]


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target
