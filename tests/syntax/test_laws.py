"""parse ∘ print is the identity; print ∘ parse is idempotent and keeps every comment once."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from peftc.filesystem import resources
from peftc.syntax import ast, parse_text, print_spec
from peftc.syntax.lexer import Lexemes
from tests.syntax.specs import specs, specs_2

RECIPES = sorted(resources.recipes().values())
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(specs | specs_2)
@QUICK
def test_parsing_inverts_printing(spec: ast.Spec) -> None:
    text = print_spec(spec)
    again = parse_text(text)
    printed = print_spec(again)
    assert again == spec
    assert print_spec(parse_text(printed)) == printed
    assert comments_in(printed) == comments_in(text)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_specs_are_formatted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert print_spec(parse_text(text)) == text


SCRAMBLED = """# 1
peft 1 # 2

# 3

#4
method m( # 5
  l = 30, # 6
  # 7
  r = 512 # 8
  # 9
) # 10
{ # 11
  # 12
  edit # 13
    a at # 14
    layer[*].attn # 15
  { # 16
    h += adapter( # 17
      x, r=r) # 18
    # 19
    let g # 20
      = 3 } # 21
  train t = [w, # 22
    b] at layer[*].norm # 23
  # 24

  expect # 25
    stored # 26
    <= 3% # 27
  # 28
} # 29
use mam from # 30
  std # 31
apply mam() edit b at layer[*].ffn { h += l * x } # 32
edit c at layer[*].ffn { # 33
  h += x } # 34
# 35

# 36
"""


def test_comments_between_any_two_words_are_kept() -> None:
    spec = parse_text(SCRAMBLED)
    printed = print_spec(spec)
    assert comments_in(printed) == comments_in(SCRAMBLED)
    assert len(comments_in(printed)) == 36
    assert print_spec(parse_text(printed)) == printed
    assert parse_text(printed) == spec


@pytest.mark.parametrize(
    ("head", "printed"),
    [
        ("method m(r = 8 # c\n) {", "method m(\n    r = 8,  # c\n) {"),
        ("method m(r = 8, # c\n) {", "method m(\n    r = 8,  # c\n) {"),
        ("method m(r = 8) # c\n{", "# c\nmethod m(r = 8) {"),
        ("method m(r = 8, s = 2,) # c\n{", "# c\nmethod m(r = 8, s = 2) {"),
        ("method m(r = 8) { # c\n", "method m(r = 8) {  # c"),
    ],
)
def test_a_comment_in_the_head_of_a_method_stays_with_its_line(head: str, printed: str) -> None:
    assert print_spec(parse_text(f"peft 1\n{head} expect stored < 3 }}")) == (
        f"peft 1\n\n{printed}\n    expect stored < 3\n}}\n"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_comment_after_every_word_is_kept(path: Path) -> None:
    """A text with a different comment at every position that allows one."""
    words = Lexemes(path.read_text(encoding="utf-8")).tokens[:-1]
    text = "".join(f"{word} #{number}\n" for number, word in enumerate(words))
    printed = print_spec(parse_text(text))
    assert comments_in(printed) == comments_in(text)
    assert print_spec(parse_text(printed)) == printed


def comments_in(text: str) -> Counter[str]:
    return Counter(comment.text.rstrip() for comment in Lexemes(text).comments)


def test_layout_is_free() -> None:
    text = "peft 1\nedit a at layer[*].ffn {\n    let g = gate(h)\n    h += g * adapter(h, r=48)\n}\n"
    assert parse_text(re.sub(r"\s+", " ", text)) == parse_text(text)
    assert parse_text(text.replace("\n", "\r\n")) == parse_text(text)
    assert parse_text("\ufeff" + text) == parse_text(text)


def test_spans_are_where_the_words_are() -> None:
    text = "peft 1\nedit low at layer[0..5].ffn {\n  h += 4 * adapter(x,\n    r=64)\n}\n"
    edit = parse_text(text).statements[0]
    assert isinstance(edit, ast.Edit)
    line = edit.body[0]
    assert isinstance(line, ast.Equation)
    assert isinstance(line.value, ast.Binary)
    call = line.value.right
    assert isinstance(call, ast.Call)
    assert isinstance(edit.selector, ast.Path)
    texts = {
        "edit.name": (edit.name_span, "low"),
        "selector": (edit.selector.span, "layer[0..5].ffn"),
        "step": (edit.selector.steps[1].span, "ffn"),
        "target": (line.target_span, "h"),
        "call": (call.span, "adapter(x,\n    r=64)"),
        "function": (call.function_span, "adapter"),
        "keyword": (call.kwargs[0].span, "r=64"),
    }
    assert {name: text[span.start : span.end] for name, (span, _) in texts.items()} == {
        n: t for n, (_, t) in texts.items()
    }
    at = call.kwargs[0].span
    assert (at.line, at.column, at.end_line, at.end_column) == (4, 5, 4, 9)


def test_the_example_of_the_language_parses() -> None:
    text = """peft 1
edit qv     at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=8, alpha=16) }         # LoRA
edit dora   at layer[*].attn.q { w = magnitude(w + lowrank(r=8, alpha=16)) }
edit gated  at layer[*].ffn { let g = gate(h)   h += g * adapter(h, r=48, act=relu) }
edit heads  at layer[*].attn.heads { h += bottleneck(q, r=30, act=relu) }
train bias  = [b] at layer[*].**
edit high   at layer[6..].attn.q  { h += lora(x, r=16) } edit x at encoder.layer[-2..] - "a.*.b" {h = h}
use mam from std apply mam(r=256) at encoder as enc
expect foldable(qv) expect sites(qv) == 72 expect stored <= 6.8%
"""
    spec = parse_text(text)
    assert [type(s).__name__ for s in spec.statements] == [
        *["Edit"] * 4,
        "Train",
        *["Edit"] * 2,
        "Use",
        "Apply",
        *["Expect"] * 3,
    ]
    assert spec.statements[0].trailing == "# LoRA"


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("((a*b))+c", "a * b + c"),
        ("a*(b+c)/d", "a * (b + c) / d"),
        ("a/(b*c)", "a / (b * c)"),
        ("-(a+b)", "-(a + b)"),
        ("-(a)*b", "-a * b"),
        ("a - -b", "a - -b"),
        ("f( (a+b) ,c = (1),)", "f(a + b, c=1)"),
    ],
)
def test_only_necessary_parentheses_are_printed(source: str, printed: str) -> None:
    assert print_spec(parse_text(f"peft 1 let l = {source}")) == f"peft 1\n\nlet l = {printed}\n"


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("a|b|c", "a | b | c"),
        ("a-b|c", "(a - b) | c"),
        ("a-(b|c)", "a - (b | c)"),
        ("(a-b)-c", "a - b - c"),
        ("a-(b-c)", "a - (b - c)"),
        ('("x.*")', '"x.*"'),
        ("layer[ 0,3 .. 5 ,-2..,..4,*]", "layer[0, 3..5, -2.., ..4, *]"),
    ],
)
def test_selectors_are_printed_unambiguously(source: str, printed: str) -> None:
    assert print_spec(parse_text(f"peft 1 train t=[b] at {source}")) == f"peft 1\n\ntrain t = [b] at {printed}\n"


OPERATORS = "+-*/"


@pytest.mark.parametrize("outer", OPERATORS)
@pytest.mark.parametrize("inner", OPERATORS)
def test_every_nesting_of_two_operators_keeps_its_meaning(outer: str, inner: str) -> None:
    a, b, c = (ast.Name(name) for name in "abc")
    trees = [ast.Binary(outer, ast.Binary(inner, a, b), c), ast.Binary(outer, a, ast.Binary(inner, b, c))]
    trees += [ast.Negative(tree) for tree in trees] + [
        ast.Binary(outer, ast.Negative(trees[0]), ast.Negative(trees[1]))
    ]
    for tree in trees:
        spec = ast.Spec(1, (ast.Let("l", tree),))
        assert parse_text(print_spec(spec)) == spec


def test_every_nesting_of_selectors_keeps_its_meaning() -> None:
    a, b, c = (ast.Path((ast.Step(name),)) for name in "abc")
    pairs = [lambda x, y: ast.Difference(x, y), lambda x, y: ast.Union((x, y))]
    for outer, inner in product(pairs, pairs):
        for selector in (outer(inner(a, b), c), outer(a, inner(b, c))):
            spec = ast.Spec(1, (ast.Train("t", ("b",), selector),))
            assert parse_text(print_spec(spec)) == spec
