"""Mutated specs: recipes that are cut, spliced, repeated, and mixed with unlikely text."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.adversarial.outcome import Tally
from peftc import PeftcError
from peftc.diagnostics.formats.github import render_github
from peftc.diagnostics.formats.records import render_json
from peftc.diagnostics.render import render_text
from peftc.filesystem import resources
from peftc.installation.compiled_model import analyse_base, plan_on
from peftc.semantics import check_file, expand
from peftc.semantics.files import read_spec
from peftc.syntax import parse_text, print_spec
from tests import zoo

THINGS = (
    *(
        "peft",
        "peft 1",
        "peft 2",
        "method m() {",
        "use",
        "from std",
        "apply",
        "at",
        "as",
        "edit",
        "per task",
        "train",
        "expect",
        "let",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        ",",
        ".",
        "..",
        "=",
        "+=",
        "*=",
        "+",
        "-",
        "*",
        "**",
        "/",
        "|",
        "<=",
        "==",
        "#",
        '"',
        "'",
        "\\",
    ),
    *(
        "0",
        "-1",
        "1e400",
        "1e308",
        "0x1",
        "9" * 40,
        "9" * 400,
        "1.5.2",
        "30%",
        "4M",
        "1_000",
        "nan",
        "inf",
        "true",
        "none",
    ),
    *(
        "\0",
        "\ufeff",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "é",
        "×",
        "\u202e",
        "\x1b[2J",
        "\r\n",
        "\t",
        " ",
    ),
    *(
        '"/etc/passwd"',
        '"../../../../etc/passwd"',
        '"/dev/zero"',
        '"."',
        '"a\0b"',
        '"std"',
        '"**"',
        '"*.*.*.*.*.*.*.*"',
        '"["',
    ),
    *(
        "h",
        "x",
        "w",
        "b",
        "kv",
        "q",
        "res",
        "z",
        "c",
        "layer[*]",
        "layer[-1..]",
        "layer[99]",
        "encoder",
        "attn",
        "ffn",
        "embed",
        "head",
    ),
    *(
        "lora(x, r=2)",
        "adapter(h, r=0)",
        "prefix(len=-1)",
        "prompt(len=1e9)",
        "sparse(density=200%)",
        "concat()",
        "shared(h)",
        "gate(gate(h))",
    ),
    *(
        "(" * 60,
        "-" * 60,
        "a." * 100,
        "# " * 50,
        "let a = a\n",
        "method a() { apply a() }\n",
        "edit a at layer[*] { }\n",
    ),
)
MODEL = "llama"


def texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(resources.recipes().values())]


Mutation = Callable[[random.Random, str, list[str]], str]


def _place(draw: random.Random, text: str) -> int:
    return draw.randrange(len(text) + 1)


def _cut(draw: random.Random, text: str, others: list[str]) -> str:
    at = _place(draw, text)
    return text[:at] + text[at + draw.choice((1, 3, 10, 100)) :]


def _end(draw: random.Random, text: str, others: list[str]) -> str:
    return text[: _place(draw, text)]


def _insert(draw: random.Random, text: str, others: list[str]) -> str:
    at = _place(draw, text)
    return text[:at] + draw.choice(THINGS) + text[at:]


def _exchange(draw: random.Random, text: str, others: list[str]) -> str:
    words = text.split(" ")
    words[draw.randrange(len(words))] = draw.choice(THINGS)
    return " ".join(words)


def _repeat(draw: random.Random, text: str, others: list[str]) -> str:
    start = _place(draw, text)
    part = text[start : start + draw.choice((1, 5, 40, 200))]
    return text[:start] + part * draw.choice((2, 5, 30)) + text[start:]


def _splice(draw: random.Random, text: str, others: list[str]) -> str:
    other = draw.choice(others)
    return text[: _place(draw, text)] + other[_place(draw, other) :]


def _character(draw: random.Random, text: str, others: list[str]) -> str:
    at = _place(draw, text)
    return (
        text[:at]
        + chr(draw.choice((draw.randrange(128), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))))
        + text[at + 1 :]
    )


def _lines(draw: random.Random, text: str, others: list[str]) -> str:
    lines = text.split("\n")
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def _number(draw: random.Random, text: str, others: list[str]) -> str:
    places = [i for i, char in enumerate(text) if char.isdigit()]
    if not places:
        return text
    at = draw.choice(places)
    return text[:at] + draw.choice(("0", "-1", "1e400", "9" * 30, "0.5", "1e-300", "300%", "2.5M")) + text[at + 1 :]


MUTATIONS: tuple[Mutation, ...] = (
    _cut,
    _end,
    _insert,
    _insert,
    _exchange,
    _exchange,
    _repeat,
    _splice,
    _character,
    _lines,
    _number,
    _number,
)


def mutated(draw: random.Random, sources: list[str]) -> str:
    """A recipe after one to four mutations; one in twenty is random fragments only."""
    if draw.random() < 0.05:
        return "peft 1\n" + " ".join(draw.choice(THINGS) for _ in range(draw.randrange(1, 60)))
    text = draw.choice(sources)
    for _ in range(draw.choice((1, 1, 2, 4))):
        text = draw.choice(MUTATIONS)(draw, text, sources)[:20_000]
    return text


def run(count: int, seed: int, tally: Tally) -> None:
    """This many specs: parsed, printed, checked, expanded, and planned on a model, as far as each
    gets.
    """
    draw, sources = random.Random(seed), texts()
    analysis = analyse_base(zoo.build(MODEL))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.peft"

        def attempt(text: str) -> None:
            try:
                spec = parse_text(text, str(path))
                assert parse_text(print_spec(spec)) == spec
                diagnostics = check_file(spec)
                tally.counts["parsed"] += 1
            except PeftcError as error:
                diagnostics = list(error.diagnostics)
            assert all(line.isprintable() for line in render_text(diagnostics).split("\n"))
            render_json(diagnostics), render_github(diagnostics)
            if any(error.severity == "error" for error in diagnostics):
                raise PeftcError(diagnostics)
            path.write_text(text, encoding="utf-8")
            flat = expand(read_spec(path))
            tally.counts["expanded"] += 1
            plan_on(analysis, flat)
            tally.counts["planned"] += 1

        for number in range(count):
            text = mutated(draw, sources)
            tally.run(f"spec {seed}/{number}: {text[:300]!r}", lambda text=text: attempt(text))
