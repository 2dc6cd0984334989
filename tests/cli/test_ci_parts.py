"""What runs in the CI of others: action.yml, the template for GitLab, the hooks of pre-commit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
TEMPLATE = yaml.safe_load((ROOT / "templates/peftc.gitlab-ci.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
SPEC = "peft 1\n\nedit qv at layer[*].attn.q {{ h += lora(x, r={}) }}\n"
WRONG = "peft 1\n\nedit ff at layer[*].fnn { h += lora(x, r=8) }\n"
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a spec, of which the last commit is the base."""
    folder = tmp_path / "work"
    (folder / "specs").mkdir(parents=True)
    (folder / "specs/a b.peft").write_text(SPEC.format(8))
    (folder / "config.json").write_text(json.dumps(BERT))
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], cwd=folder, check=True, capture_output=True)
    return folder


def environment(folder: Path, **values: str) -> dict[str, str]:
    """With a `peftc` that runs this checkout."""
    commands = folder.parent / "bin"
    commands.mkdir(exist_ok=True)
    script = commands / "peftc"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m peftc "$@"\n')
    script.chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": path, "PYTHONPATH": str(ROOT), "PEFTC_CACHE": "", **values}


def run_step(name: str, folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    """A step of the action, as GitHub runs it."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == name)
    inputs = {key: str(row["default"]) for key, row in ACTION["inputs"].items()}
    names = {key: re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value) for key, value in step["env"].items()}
    settings = {key: values.get(match[1], inputs[match[1]]) for key, match in names.items() if match is not None}
    assert settings.keys() == step["env"].keys()
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    variables = environment(folder, GITHUB_STEP_SUMMARY=str(folder / "summary.md"), **settings)
    return subprocess.run(shell, cwd=folder, env=variables, capture_output=True, text=True)


def test_the_action_annotates_errors_and_fails(repository: Path) -> None:
    assert run_step("Check specs", repository, paths="specs").returncode == 0
    (repository / "specs/wrong.peft").write_text(WRONG)
    result = run_step("Check specs", repository, paths="specs")
    assert result.returncode == 1
    assert "::error file=specs/wrong.peft,line=3" in result.stdout


def test_the_action_passes_its_options(repository: Path) -> None:
    (repository / "specs/unused.peft").write_text("peft 1\n\nlet r = 8\n\n" + SPEC.format(4).removeprefix("peft 1\n\n"))
    assert run_step("Check specs", repository, paths="specs").returncode == 0
    assert run_step("Check specs", repository, paths="specs", strict="true").returncode == 1
    (repository / "specs/unused.peft").write_text(SPEC.format(400))
    assert run_step("Check specs", repository, paths="specs").returncode == 0
    result = run_step("Check specs", repository, paths="specs", models="config.json")
    assert result.returncode == 1
    assert "P317" in result.stdout
    assert run_step("Check specs", repository, paths="specs", models="config.json", locked="true").returncode == 1


def test_the_action_shows_what_changed_in_the_plans(repository: Path) -> None:
    (repository / "specs/a b.peft").write_text(SPEC.format(4))
    (repository / "specs/new.peft").write_text(SPEC.format(2))
    result = run_step("Compare plans", repository, paths="specs", models="config.json", base="HEAD")
    assert result.returncode == 0, result.stderr
    summary = (repository / "summary.md").read_text()
    assert "a b.peft" in summary
    assert "1,024" in summary  # 2 sites · 8 · (32 + 32)
    assert "512" in summary
    assert "new.peft" not in summary


@pytest.mark.parametrize(("spec", "code"), [(SPEC.format(8), 0), (WRONG, 1)])
def test_the_gitlab_template_writes_both_reports(repository: Path, spec: str, code: int) -> None:
    (repository / "specs/a b.peft").write_text(spec)
    lines = "\n".join(TEMPLATE["peftc"]["script"])
    variables = environment(repository, **TEMPLATE["variables"] | {"PEFTC_PATHS": "specs"})
    assert subprocess.run(["bash", "-eo", "pipefail", "-c", lines], cwd=repository, env=variables).returncode == code
    reports = TEMPLATE["peftc"]["artifacts"]["reports"]
    findings = json.loads((repository / reports["codequality"]).read_text())
    assert [finding["check_name"] for finding in findings] == ["P208"] * code
    suites = ElementTree.parse(repository / reports["junit"]).getroot()
    assert len([*suites.iter("failure")]) == code


def test_this_repository_uses_the_action() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/specs.yml").read_text(encoding="utf-8"))
    (step,) = (step for step in workflow["jobs"]["specs"]["steps"] if step["uses"] == "./")
    assert step["with"].keys() <= ACTION["inputs"].keys()
    for path in (*step["with"]["paths"].split(), step["with"]["options"].split()[-1]):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hook_reads_the_files_that_it_names(hook: dict[str, str], repository: Path) -> None:
    files = [path for path in ("specs/a b.peft", "config.json") if re.search(hook["files"], path)]
    assert files == ["specs/a b.peft"]
    command = [*hook["entry"].split(), *files]
    assert subprocess.run(command, cwd=repository, env=environment(repository), capture_output=True).returncode == 0
