"""`peftc compile -o DIR`: what it writes, and its diagnostics."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.main import main
from peftc.cli.model_commands import forwards, snake_case
from peftc.filesystem.atomic import MARKER, write_folder
from peftc.planning.report.plan_sites import PlanSiteRange, PlanSites
from tests import zoo
from tests.cli.compile_folder import SPEC, Out, contents, texts

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


def test_the_written_files(written: Path) -> None:
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


def test_generated_files_have_equations_captions_and_diffs(written: Path) -> None:
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
        (e["name"], e["trained"], len(PlanSites(PlanSiteRange(**one) for one in e["sites"]))) for e in plan["edits"]
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
