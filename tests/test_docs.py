"""What README.md and docs/ show is what happens: commands print what is shown, Python runs, specs
are plans, links lead somewhere.

The blocks of a page run in order, in one folder and with the same Python names, as a reader would
follow them. A line `…` in what is shown stands for any lines, `"…"` for any string.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import peftc
from peftc.checking.configuration import read_configuration
from peftc.cli.main import main
from peftc.filesystem import resources
from peftc.models.catalogue import catalogue
from peftc.semantics.recipes import recipes
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from tests import zoo
from tests.sharding.test_launchers import CLUSTER_COMMANDS, COMMANDS
from tools.gallery_page import statements_of
from tools.site_hooks import on_page_markdown

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
RUN_ELSEWHERE = (
    "pip install .",  # by .ci/package
    *COMMANDS,  # by tests/sharding
    *CLUSTER_COMMANDS,  # on several machines
)


@dataclass(frozen=True)
class Block:
    language: str
    options: dict[str, str]
    text: str
    line: int  # of the first line in it


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^(?:<!-- (\w+): ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", text, re.S | re.M)
    return [Block(m[3], {m[1]: m[2]} if m[1] else {}, m[4], text.count("\n", 0, m.start(4)) + 1) for m in matches]


@cache
def tiny(name: str) -> nn.Module:
    """A model on which specs that are no files are planned."""
    return zoo.build(name)


@dataclass
class Session:
    """A reader who follows a page."""

    page: Path
    folder: Path
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    printed: str = ""  # by the last block of Python, until it is shown

    def run(self, block: Block) -> None:
        where = f"{self.page.name}:{block.line}"
        if block.language != "text":
            assert not self.printed, f"{where}: the Python before this block prints something that is not shown"
        getattr(self, f"run_{block.language}")(block, where)

    def run_python(self, block: Block, where: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * (block.line - 1) + block.text, self.page.name, "exec"), self.names)
        self.printed = out.getvalue()

    def run_text(self, block: Block, where: str) -> None:
        assert_shown(self.printed, block.text, where)
        self.printed = ""

    def run_console(self, block: Block, where: str) -> None:
        for part in re.split(r"^(?=\$ )", block.text, flags=re.M):
            if part:
                command, _, shown = part.removeprefix("$ ").partition("\n")
                assert_shown(self.output_of(shlex.split(command)), shown, f"{where}: {command}")

    def output_of(self, command: list[str]) -> str:
        if command[0] == "cat":
            return "".join((self.folder / name).read_text(encoding="utf-8") for name in command[1:])
        assert command[0] == "peftc", f"cannot run {command}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
            main(command[1:])
        return out.getvalue()

    def run_peft(self, block: Block, where: str) -> None:
        if title := block.options.get("file"):
            path = self.folder / title
            if not path.exists():
                path.write_text(block.text, encoding="utf-8")
            assert path.read_text(encoding="utf-8") == block.text, f"{where}: {title} is another text"
            return
        if recipe := block.options.get("recipe"):
            assert block.text == statements_of(recipes()[recipe]), f"{where}: the recipe is another text"
            return
        if re.search(r"^form \w+\(", block.text, re.M) and not re.search(r"^edit ", block.text, re.M):
            (form,) = parse_text(f"peft 2\n{block.text}").statements
            assert isinstance(form, ast.Form)
            assert form == built_in(form.name), where
            return
        text = block.text if re.search(r"^peft \d", block.text, re.M) else f"peft 1\n{block.text}"
        assert peftc.plan(text, tiny(block.options.get("model", "bart"))).edits, where

    def run_toml(self, block: Block, where: str) -> None:
        """A configuration, each key of which is known."""
        path = self.folder / "configuration" / block.options["file"]
        for name in ("", "shared"):
            (path.parent / name).mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        assert read_configuration(path) is not None, where

    def run_yaml(self, block: Block, where: str) -> None:
        """A workflow of GitHub, which gives the action of this repository inputs that it has."""
        action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
        steps = [step for job in yaml.safe_load(block.text)["jobs"].values() for step in job["steps"]]
        (step,) = (step for step in steps if "/peftc@" in step["uses"])
        assert step["with"].keys() <= action["inputs"].keys(), where

    def run_sh(self, block: Block, where: str) -> None:
        """Commands that CI runs elsewhere: targets of the Makefile, modules of benchmarks/."""
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        for line in block.text.splitlines():
            program, *words = line.partition("#")[0].split()
            module = words[-1].replace(".", "/") if words[:-1] == ["-m"] else words[-1].removesuffix(".py")
            known = words[0] in targets if program == "make" else (ROOT / f"{module}.py").is_file()
            assert known or " ".join([program, *words]) in RUN_ELSEWHERE, f"{where}: {line}"


def built_in(name: str) -> ast.Statement:
    """A form of the package, as its file has it."""
    return parse_text(resources.forms()[name].read_text(encoding="utf-8")).statements[0]


def assert_shown(printed: str, shown: str, where: str) -> None:
    lines = [line.rstrip() for line in printed.splitlines()]
    if "…" in (line.strip() for line in shown.splitlines()) or '"…"' in shown:
        pattern = "\n".join(map(line_pattern, shown.splitlines()))
        if re.fullmatch(pattern.replace(".*\n", "(?:.*\n)*").replace("\n.*\\Z", "(?:\n.*)*"), "\n".join(lines)):
            return
    assert lines == shown.splitlines(), where


def line_pattern(line: str) -> str:
    return ".*" if line.strip() == "…" else re.escape(line).replace('"…"', '"[^"]*"')


@pytest.mark.ahead_of_time
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_happens(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("specs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    session = Session(page, tmp_path)
    for block in blocks(page):
        session.run(block)
    assert not session.printed, "the last block of Python prints something that is not shown"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_code_is_out_of_reach_of_this_test(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(page)), "a block names its language, and nothing else"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    assert not re.findall(r"^    \S.*$", prose, re.M), "indented code does not run"


def test_the_mam_of_the_readme_is_that_of_the_file() -> None:
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "peft")
    assert first.options == {"file": "specs/mam.peft"}
    assert first.text == (ROOT / "specs" / "mam.peft").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    folders = "peftc|tests|tools|benchmarks|examples|grammar"
    names = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_numbers_of_recipes_and_of_the_catalogue() -> None:
    assert f"the {len(resources.recipes())} methods of `specs/`" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"of {len(catalogue())} checkpoints" in (DOCS / "models.md").read_text(encoding="utf-8")


# Links and navigation ------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and Python-Markdown make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of each link within the repository."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not target.startswith(("http:", "https:", "mailto:")):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert page.parent != DOCS or target.is_relative_to(DOCS), f"{path} is not in docs/: a site has not got it"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_navigation_lists_the_pages() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [file for entry in settings["nav"] for file in entry.values()]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    assert len(listed) == len(set(listed))


def test_the_site_loads_nothing_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    assert settings["theme"]["font"] is False
    sheets = [(DOCS / name).read_text(encoding="utf-8") for name in settings["extra_css"]]
    assert not [part for part in (text, *sheets) if re.search(r"https?:|//\w|@import|url\(", part)]
    assert not any("```mermaid" in page.read_text(encoding="utf-8") for page in PAGES), "the theme would load it"


def test_escaped_pipes_are_pipes_on_the_site() -> None:
    shown = on_page_markdown("| `a \\| b` | c \\| d |\ne `f \\| g`")
    assert shown == "| `a | b` | c \\| d |\ne `f \\| g`"
