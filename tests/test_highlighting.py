"""What highlights specs knows the words of the grammar, and no others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import lark
import pytest
import regex
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String

from peftc.syntax.lexer import Lexemes
from peftc.syntax_highlighting import PeftLexer, token_types
from tools.textmate_grammar import grammar

ROOT = Path(__file__).resolve().parent.parent
EDITOR = ROOT / "editors" / "vscode"
FILES = sorted([*(ROOT / "specs").glob("*.peft"), *(ROOT / "forms").glob("*.peft")])
SCOPES = {
    "comment": Comment,
    "string": String,
    "constant.numeric": Number,
    "constant.language": Keyword,
    "keyword.operator": Operator,
    "keyword": Keyword,
    "entity.name.function": Name,
    "variable": Name,
    "punctuation": Punctuation,
    "invalid": Error,
}


def terminals() -> dict[str, str]:
    """The terminals of the grammar that are fixed texts, as Lark reads it."""
    text = (ROOT / "grammar" / "peft.lark").read_text(encoding="utf-8")
    parser = lark.Lark(text, start="spec", parser="lalr", lexer="basic")
    return {one.name: one.pattern.value for one in parser.terminals if isinstance(one.pattern, lark.lexer.PatternStr)}


def test_every_terminal_of_the_grammar_has_a_class() -> None:
    types = token_types()
    own = terminals()
    assert len(own) > 35
    for terminal, text in own.items():
        is_keyword = text[0].isalpha()
        assert (types[terminal] in Keyword) is is_keyword, terminal
        assert is_keyword or types[terminal] in (Operator, Punctuation), terminal
    tables = json.loads((ROOT / "grammar" / "peft.tables.json").read_text(encoding="utf-8"))
    assert {name for name, _ in tables["terminals"]} | own.keys() == types.keys() | {"NAME"}


def test_pygments_marks_the_keywords() -> None:
    for terminal, text in terminals().items():
        (token, word), *_ = PeftLexer().get_tokens(f"{text} peft 2\n" if text == "peft" else f"{text}\n")
        assert (token, word) == (token_types()[terminal], text)
    old = [(word, token) for token, word in PeftLexer().get_tokens("peft 1\nlet form = 1 @\n")]
    assert ("form", Name.Variable) in old  # a name, in version 1
    assert ("@", Error) in old
    assert ("@", Operator) in [(word, token) for token, word in PeftLexer().get_tokens("peft 2\nB @ A\n")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_specs_and_forms_are_highlighted(path: Path) -> None:
    """Pygments and TextMate give each word the same class, and none of them is an error."""
    text = path.read_text(encoding="utf-8")
    tokens = [(at, token, word) for at, token, word in PeftLexer().get_tokens_unprocessed(text)]
    assert "".join(word for _, _, word in tokens) == text
    assert not [word for _, token, word in tokens if token in Error]
    textmate = {at: (scope, word) for at, scope, word in tokenized(text)}
    for at, token, word in tokens:
        if not word.isspace():
            scope, other = textmate[at]
            assert other == word
            assert token in next(kind for name, kind in SCOPES.items() if scope.startswith(name)), (word, scope)


def tokenized(text: str) -> Iterator[tuple[int, str, str]]:
    """What the patterns of TextMate match, line by line: the first of them at the nearest place."""
    data = json.loads((EDITOR / "syntaxes" / "peft.tmLanguage.json").read_text(encoding="utf-8"))
    rules = [(one["name"], regex.compile(one["match"])) for one in data["patterns"]]
    start = 0
    for line in text.splitlines(keepends=True):
        at = 0
        while True:
            matches = ((rule.search(line, at), name) for name, rule in rules)
            best = min(((m.start(), n, m, name) for n, (m, name) in enumerate(matches) if m), default=None)
            if best is None:
                break
            _, _, match, scope = best
            yield start + match.start(), scope, match[0]
            at = match.end()
        start += len(line)


def test_textmate_marks_what_is_no_word() -> None:
    scopes = {word: scope for _, scope, word in tokenized('peft 2\nlet a = 1x + § + "open\n')}
    assert {scopes[word] for word in ("1x", "§", '"open')} == {"invalid.illegal.peft"}


def test_the_textmate_grammar_is_that_of_the_words() -> None:
    data = json.loads((EDITOR / "syntaxes" / "peft.tmLanguage.json").read_text(encoding="utf-8"))
    assert data == grammar(), "make tables"


def test_the_lexer_is_an_entry_point_of_pygments() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["pygments.lexers"]["peft"].partition(":")
    assert getattr(__import__(module, fromlist=[name]), name) is PeftLexer
    assert Lexemes("peft 1").version == "1"


STUBS = {
    "vscode": """module.exports = { workspace: {
        getConfiguration: () => ({ get: (key) => ({ command: ["peftc", "lsp"], model: "m", tasks: [] })[key] }),
        createFileSystemWatcher: (pattern) => pattern } };""",
    "vscode-languageclient/node": """module.exports = { TransportKind: { stdio: 0 },
        LanguageClient: class { constructor(...a) { this.a = a; }
            start() { console.log(JSON.stringify(this.a)); } stop() { console.log("stopped"); } } };""",
}


def test_the_extension_starts_the_server(tmp_path: Path) -> None:
    """With stand-ins for the modules of VS Code, which are not here."""
    node = shutil.which("node", path=str(Path(sys.executable).parent)) or shutil.which("node")
    assert node is not None
    for name, text in STUBS.items():
        file = tmp_path / "node_modules" / f"{name}.js"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copy(EDITOR / "extension.js", tmp_path)
    code = "const e = require('./extension.js'); e.activate({ subscriptions: [] }); e.deactivate();"
    ran = subprocess.run([node, "-e", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    started, stopped = ran.stdout.splitlines()
    _, _, server, options = json.loads(started)
    assert server == {"command": "peftc", "args": ["lsp"], "transport": 0}
    assert options["initializationOptions"] == {"model": "m", "tasks": []}
    package = json.loads((EDITOR / "package.json").read_text(encoding="utf-8"))
    assert options["documentSelector"] == [{"language": package["contributes"]["languages"][0]["id"]}]
    assert {"peftc.command", "peftc.model", "peftc.tasks"} == package["contributes"]["configuration"][
        "properties"
    ].keys()
    named = [package["main"], *(one["path"] for one in package["contributes"]["grammars"])]
    named += [one["configuration"] for one in package["contributes"]["languages"]]
    assert all((EDITOR / name).is_file() for name in named)
    assert stopped == "stopped"
