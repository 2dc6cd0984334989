"""`peftc compile -o DIR`: what it writes, and that it touches no file but its own."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.main import main
from peftc.cli.output import forwards, snake_case
from peftc.filesystem.output_folder import MARKER, write_folder
from tests import zoo
from tests.processes import KILLED, killed_at

SPEC = """peft 1

method both(r = 2) {
    edit q at layer[*].attn.q { h += lora(x, r=r) }
    edit ffn at layer[*].ffn { h += adapter(x, r=r) }
}
"""
OLD = {"plan.json": "old plan", "spec.peft": "old spec", "README.md": "old", "forward_old.py": "old forward"}
NEW = {"plan.json": "new plan", "spec.peft": "new spec", "README.md": "new", "forward_new.py": "new forward"}
OURS = sorted([MARKER, "README.md", "forward_layer.py", "plan.json", "spec.peft"])

Out = pytest.CaptureFixture[str]
Refuses = Callable[..., None]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes; None for anything that is not a regular file."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in paths}


def texts(folder: Path) -> dict[str, str]:
    return {name: (content or b"").decode() for name, content in contents(folder).items() if name != MARKER}


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(peftc.PeftcError) as excinfo:
        action()
    (diagnostic,) = excinfo.value.diagnostics
    return diagnostic.code


# The command
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A spec and a model as command-line arguments."""
    folder = tmp_path_factory.mktemp("input")
    zoo.config("llama").save_pretrained(folder)
    (folder / "both.peft").write_text(SPEC)
    return ["compile", str(folder / "both.peft"), "--model", str(folder / "config.json")]


@pytest.fixture(scope="module")
def written(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder for r = 3 and a seed; read-only."""
    folder = tmp_path_factory.mktemp("output") / "new" / "both"
    assert main([*arguments, "--set", "r=3", "--seed", "7", "-o", str(folder)]) == 0
    return folder


def test_what_is_written(written: Path) -> None:
    files = sorted(path.name for path in written.iterdir())
    diffs = [name for name in files if name.endswith(".diff")]
    generated = [name for name in files if name.startswith("forward_") and name not in diffs]
    assert generated
    assert diffs == [name.replace(".py", ".diff") for name in generated]
    assert files == sorted([MARKER, "README.md", "plan.json", "spec.peft", *generated, *diffs])
    for name in generated:
        text = (written / name).read_text()
        tree = ast.parse(text)
        assert isinstance(tree.body[0], ast.Expr), "a docstring first"
        assert any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))
    assert oct((written / "plan.json").stat().st_mode & 0o777) == oct(0o666 & ~umask())


def test_generated_files_import_public_names_and_run(written: Path) -> None:
    """Generated files import only `peftc.runtime`, no private name, and every import resolves."""
    for path in written.glob("forward_*.py"):
        imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        for node in imports:
            module = getattr(node, "module", None) or ""
            own = module.partition(".")[0] == "peftc"
            assert not own or module == "peftc.runtime"
            assert not own or not any(alias.name.startswith("_") for alias in node.names)
        runpy.run_path(str(path))


def test_equations_and_captions_stand_above_the_code_and_diffs_beside_it(written: Path) -> None:
    (path,) = (
        written.glob("forward_*mlp.py")
        if (written / "forward_llama_mlp.py").exists()
        else written.glob("forward_*layer.py")
    )
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert any(line.startswith("# edit ffn: h += adapter(x, r=3") for line in lines)
    variants = [i for i, line in enumerate(lines) if line.startswith("def variant_")]
    assert all(lines[i - 1].startswith("# ") for i in variants)
    diff = path.with_suffix(".diff").read_text()
    assert diff.startswith("--- transformers.models.llama")
    assert "\n+    # edit ffn: " in diff
    assert diff.count("\n+++ ") == len(variants)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_spec_is_expanded_and_the_plan_is_its_plan(written: Path, arguments: list[str]) -> None:
    spec, plan = (written / "spec.peft").read_text(), json.loads((written / "plan.json").read_text())
    assert "method" not in spec
    assert spec.count("r=3") == 2
    again = peftc.plan(spec, arguments[-1])
    assert [(e.name, e.trained, len(e.sites)) for e in again.edits] == [
        (e["name"], e["trained"], len(e["sites"])) for e in plan["edits"]
    ]
    assert plan["totals"] == again.totals.model_dump()


def test_the_readme_says_how_to_go_on(written: Path) -> None:
    text = (written / "README.md").read_text()
    plan = json.loads((written / "plan.json").read_text())
    assert 'peftc.compile("spec.peft", model, seed=7)' in text
    assert f"{plan['totals']['trained']:,}" in text


def test_the_marker_has_the_hash_of_each_file(written: Path) -> None:
    marker = json.loads((written / MARKER).read_text())
    assert marker["format_version"] == "1.0"
    assert marker["peftc"] == peftc.__version__
    assert "pending" not in marker
    assert marker["files"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written.iterdir() if path.name != MARKER
    }


def test_again_with_other_arguments(written: Path, arguments: list[str], tmp_path: Path, capsys: Out) -> None:
    """Our files are replaced, stale ones are removed, and the user's own files stay."""
    folder = tmp_path / "both"
    shutil.copytree(written, folder)
    (folder / "notes.txt").write_text("mine")
    (folder.parent / "q.peft").write_text("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n")
    assert main(["compile", str(folder.parent / "q.peft"), *arguments[2:], "-o", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "notes.txt").read_text() == "mine"
    assert "r=2" in (folder / "spec.peft").read_text()
    removed = {path.name for path in written.iterdir()} - {path.name for path in folder.iterdir()}
    assert removed
    assert f"removed {', '.join(sorted(removed))}, of an earlier run" in out
    (line,) = [line for line in out.splitlines() if line.startswith("wrote ")]
    names = [path.name for path in folder.iterdir() if path.name not in ("notes.txt", MARKER)]
    assert line.endswith(f" to {folder}")
    assert sorted(line.removeprefix("wrote ").removesuffix(f" to {folder}").split(", ")) == sorted(names)


def test_without_a_folder_nothing_is_written(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert contents(tmp_path) == {}


def test_refusals_on_the_command_line(written: Path, arguments: list[str], tmp_path: Path, capsys: Out) -> None:
    """Diagnostics as text and as JSON, with exit code 1; `--force` works as its help says."""
    folder = tmp_path / "both"
    shutil.copytree(written, folder)
    (folder / "README.md").write_text("mine")
    before = contents(tmp_path)
    assert main([*arguments, "-o", str(folder)]) == 1
    assert "error[P550]" in capsys.readouterr().err
    assert main([*arguments, "-o", str(folder), "--output-format", "json"]) == 1
    out = capsys.readouterr().out
    (record,) = json.loads(out[out.index("\n[") :] if not out.startswith("[") else out)
    assert (record["code"], record["severity"]) == ("P550", "error")
    assert "README.md" in record["message"]
    assert contents(tmp_path) == before
    assert main([*arguments, "-o", str(folder), "--force"]) == 0
    assert (folder / "README.md").read_text().startswith("# both on")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("peft 1\nedit q at layer[*].attn.nothing { h += lora(x, r=2) }\n", "P20"),
        ("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\nexpect stored <= 1\n", "P304"),
        ("peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2 }\n", "P0"),
    ],
)
def test_a_spec_that_does_not_compile_writes_nothing(
    text: str, code: str, arguments: list[str], tmp_path: Path, capsys: Out
) -> None:
    (tmp_path / "bad.peft").write_text(text)
    command = ["compile", str(tmp_path / "bad.peft"), *arguments[2:], "-o", str(tmp_path / "out")]
    assert main([*command, "--output-format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["code"].startswith(code)
    assert not (tmp_path / "out").exists()


class Parts(nn.Module):
    """Modules with names that are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Linear(4, 4) for name in ('"""\nimport os\n"""', "a/b c", "é 漢", "C:\\x")}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def test_names_with_odd_characters(tmp_path: Path) -> None:
    model = peftc.compile(
        'peft 1\nedit e at "parts.*" { h += lora(x, r=1) }', Parts(), sample={"x": torch.zeros(2, 3, 4)}
    )
    files = forwards(model)
    assert files
    for name, text in files.items():
        stem, _, suffix = name.partition(".")
        assert stem.isidentifier()
        assert suffix in ("py", "diff")
        assert len(name) < 120
        body = ast.parse(text).body if suffix == "py" else []
        assert not [node for node in body if isinstance(node, ast.Import) and "os" in ast.unparse(node)]
    done = write_folder(tmp_path / "out", files)
    assert sorted(done.written) == sorted(files)
    assert texts(tmp_path / "out") == files


@pytest.mark.parametrize("name", ["../Layer", 'A*"b"', "Block漢", "C:\\x", "\ud800", "HTTPServerLayer", "A" * 500])
def test_names_of_classes_become_names_of_files(name: str) -> None:
    stem = snake_case(name)
    assert f"forward_{stem}".isidentifier()
    assert len(stem) <= 100


# The folder
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "empty", "a leftover"])
def test_a_folder_that_is_new_or_empty(there: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    if there != "nothing":
        folder.mkdir(parents=True)
    if there == "a leftover":
        (folder / ".peftc-abcd_123").mkdir()
        (folder / ".peftc-abcd_123" / "forward_x.py").write_text("half")
    write_folder(folder, OLD)
    assert texts(folder) == OLD


def user_folder(folder: Path) -> None:
    """A folder without our marker; its files have names like ours."""
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "spec.peft").write_text("mine")
    (folder / "forward_x.py").mkdir()
    (folder / "forward_x.py" / "thesis.tex").write_text("mine")


def one_file(folder: Path) -> None:
    folder.write_text("mine")


def foreign_marker(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        user_folder(folder)
        (folder / MARKER).write_text(text)

    return make


def linked_marker(folder: Path) -> None:
    user_folder(folder)
    write_folder(folder.parent / "other", OLD)
    (folder / MARKER).symlink_to(folder.parent / "other" / MARKER)


def marker_that_reaches_out(folder: Path) -> None:
    outside = folder.parent / "outside.txt"
    outside.write_text("mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    foreign_marker(json.dumps({"format_version": "1.0", "peftc": "0", "files": {"../outside.txt": digest}}))(folder)


def hidden_file(folder: Path) -> None:
    folder.mkdir()
    (folder / ".peftc-notes").write_text("mine")


REFUSED_FOLDERS = {
    "a user's": user_folder,
    "a file": one_file,
    "a marker that is no JSON": foreign_marker("mine"),
    "a marker of something else": foreign_marker('{"files": 3}'),
    "a marker with another key": foreign_marker('{"peftc": "0", "files": {}, "owner": "me"}'),
    "a marker of a newer format": foreign_marker('{"format_version": "2.0", "peftc": "9", "files": {}}'),
    "a marker that is a link": linked_marker,
    "a marker that reaches out": marker_that_reaches_out,
    "a hidden file": hidden_file,
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", REFUSED_FOLDERS)
def test_any_other_folder_is_refused(case: str, force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    REFUSED_FOLDERS[case](folder)
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW, force)) == "P420"
    assert contents(tmp_path) == before


def test_a_folder_of_ours_is_written_again(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD)
    (tmp_path / "notes.txt").write_text("mine")
    done = write_folder(tmp_path, NEW)
    assert (done.removed, done.modified) == (("forward_old.py",), ())
    assert texts(tmp_path) == NEW | {"notes.txt": "mine"}
    write_folder(tmp_path, NEW)
    assert texts(tmp_path) == NEW | {"notes.txt": "mine"}


def edited(path: Path) -> None:
    path.write_text("mine")


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [edited, linked])
def test_a_changed_file_is_overwritten_only_with_force(change: Callable[[Path], None], tmp_path: Path) -> None:
    """A symbolic link is replaced; its target is not written to."""
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    change(folder / "spec.peft")
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW)) == "P550"
    assert contents(tmp_path) == before
    write_folder(folder, NEW, force=True)
    assert texts(folder) == NEW
    if change is linked:
        assert (tmp_path / "elsewhere").read_text() == OLD["spec.peft"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("change", [edited, linked])
def test_a_changed_file_of_an_earlier_run_stays(change: Callable[[Path], None], force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    change(folder / "forward_old.py")
    done = write_folder(folder, NEW, force)
    assert (done.removed, done.modified) == ((), ("forward_old.py",))
    assert (folder / "forward_old.py").exists()
    write_folder(folder, NEW)  # from now on the file belongs to the user
    assert (folder / "forward_old.py").exists()
    assert code_of(lambda: write_folder(folder, OLD, force=True)) in ("P551",)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_in_the_way_is_never_touched(kind: str, force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, OLD)
    (tmp_path / "elsewhere").write_text("mine")
    if kind == "file":
        (folder / "forward_new.py").write_text("mine")
    elif kind == "folder":
        (folder / "forward_new.py").mkdir()
    else:
        (folder / "forward_new.py").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    assert code_of(lambda: write_folder(folder, NEW, force)) == "P551"
    assert contents(tmp_path) == before


def test_a_deleted_file_comes_back(tmp_path: Path) -> None:
    write_folder(tmp_path, OLD)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "forward_old.py").unlink()
    write_folder(tmp_path, NEW)
    assert texts(tmp_path) == NEW


@pytest.mark.parametrize("there", [True, False])
def test_killed_at_every_boundary(there: bool, tmp_path: Path) -> None:
    """Each file is old, new or missing. The next run completes the folder, and the user's file
    stays.
    """
    first = tmp_path / "first"
    if there:
        write_folder(first, OLD)
        (first / "notes.txt").write_text("mine")
    mine = {"notes.txt": "mine"} if there else {}
    for n in range(1, 200):
        folder = tmp_path / str(n)
        if there:
            shutil.copytree(first, folder)
        ended = killed_at(n, folder, lambda folder=folder: write_folder(folder, NEW))
        assert ended in (0, KILLED)
        for name, text in (texts(folder) if folder.exists() else {}).items():
            if not name.startswith(".peftc-"):
                assert text in (NEW.get(name), OLD.get(name) if there else None, mine.get(name))
        if ended == 0:
            break
        write_folder(folder, OLD if n % 2 else NEW)
        assert texts(folder) == (OLD if n % 2 else NEW) | mine
        assert "pending" not in json.loads((folder / MARKER).read_text())
    assert ended == 0
    assert n > 20
    assert texts(folder) == NEW | mine


@pytest.mark.parametrize("operation", ["replace", "fsync", "unlink"])
def test_an_error_leaves_a_folder_that_the_next_run_accepts(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, operation)
    for n in range(1, 20):
        folder, count = tmp_path / str(n), 0
        write_folder(folder, OLD)

        def failing(*args: object, n: int = n, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == n:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            try:
                write_folder(folder, NEW)
            except peftc.PeftcError as error:
                codes = [d.code for d in error.diagnostics]
            else:
                break
        assert codes == ["P420"]
        assert not list(folder.glob(".peftc-*"))
        write_folder(folder, NEW)
        assert texts(folder) == NEW
    assert n > 1
