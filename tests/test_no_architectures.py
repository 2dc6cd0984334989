"""No architecture is named in peftc's code: what it knows of models it derives from them.

The rule: no word of a Python file, in code or strings, is a model type of transformers. A word is a
run of letters and digits; words joined by `_`, and the words of CamelCase, count on their own and
together. Ids of the catalogue (`org/name`), which say nothing of an architecture, may stand as
examples. Comments and docstrings may name the models that need a rule. The catalogue is JSON.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "peftc").rglob("*.py"))
IDS = frozenset(
    name for name in json.loads((ROOT / "peftc/models/catalogue.json").read_text())["models"] if "/" in name
)

# Model types that are English words, and an attribute of every config
# (`is_encoder_decoder`).
ENGLISH = frozenset({"align", "bit", "encoderdecoder"})
# Names that are not of the architecture, by file.
OTHERS = {
    "peftc/dataflow/operations.py": {"clip"},  # `torch.clip`
    "peftc/models/settings.py": {"beam"},  # `num_beam_groups`, a setting of `generate`
    "peftc/exchange/peft_format/rows/prompts.py": {"opt"},  # `opt_loss_decay_factor`, a key of PEFT's CPT
    "peftc/cli/check/watch.py": {"ctrl"},  # the key
    **{key: {"git"} for key in ("peftc/checking/configuration.py", "peftc/cli/parser/commands.py")},
    "peftc/comparison/sides.py": {"git"},
    **{key: {"aria"} for key in (f"peftc/pictures/{name}.py" for name in ("code", "page", "svg"))},  # of HTML
}


def types() -> frozenset[str]:
    """Model types as one word: `gpt_neox`, `gpt-sw3` and `GPTNeoX` all give `gptneox`."""
    return frozenset(plain(name) for name in CONFIG_MAPPING_NAMES) - ENGLISH


def plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def code_of(text: str) -> str:
    """The text of a file with empty comments and docstrings."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(lines)


def words(text: str) -> Iterator[tuple[int, str]]:
    """The line of each word, and the word: alone, and with the words that it is joined to."""
    for n, line in enumerate(text.splitlines(), 1):
        for catalogue_id in IDS:
            line = line.replace(catalogue_id, "")
        for word in re.findall(r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*", line):
            parts = re.findall(r"[A-Z]+[0-9]*(?![a-z])|[A-Z]?[a-z]+[0-9]*|[0-9]+", word)
            for i in range(len(parts)):
                for j in range(i + 1, len(parts) + 1):
                    yield n, plain("".join(parts[i:j]))


def named(text: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[tuple[int, str]]:
    model_types = types() - allowed
    return sorted({(n, word) for n, word in words(text) if word in model_types})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_architecture_is_named(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    names = named(code_of(path.read_text(encoding="utf-8")), OTHERS.get(name, set()))
    assert not names, "\n".join(f"{name}:{line}: {word}" for line, word in names)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('if config.model_type == "bart":', "bart"),
        ("from transformers import LlamaForCausalLM", "llama"),
        ("def is_gpt_neox(config):", "gptneox"),
        ('"""T5\'s config"""', "t5"),
        ("class GPTNeoXBlock:", "gptneox"),
        ("qwen2_moe", "qwen2moe"),
        ("GPT2Attention", "gpt2"),
        ('"xlm-roberta"', "xlmroberta"),
    ],
)
def test_the_rule_finds_names(text: str, word: str) -> None:
    assert word in {other for _, other in named(text)}


def test_comments_and_docstrings_may_name_models() -> None:
    assert not named(code_of("x = 1  # Seen in: Longformer, LED\n# BART\n"))
    assert not named(code_of('def f():\n    """Seen in: BART.\n\n    And LED.\n    """\n'))
    assert named(code_of('def f():\n    """A docstring."""\n    return "bart"\n'))
    assert named(code_of('x = "bart"  # BART\n'))


def test_ids_of_the_catalogue_may_be_named() -> None:
    assert not named("peftc plan specs/mam.peft --model facebook/bart-large")
    assert named("facebook/bart-enormous")


def test_exclusions_are_needed_and_are_model_types() -> None:
    """The lists hold nothing that the rule does not need."""
    assert {plain(name) for name in CONFIG_MAPPING_NAMES} >= ENGLISH
    texts = {path.relative_to(ROOT).as_posix(): code_of(path.read_text(encoding="utf-8")) for path in FILES}
    needed = {word for text in texts.values() for _, word in words(text)}
    assert needed >= ENGLISH, ENGLISH - needed
    for name, allowed in OTHERS.items():
        assert allowed <= {word for _, word in words(texts[name])}, name
