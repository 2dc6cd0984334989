"""Arguments in each other's place, folders of another program: one message says what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import peftc
from peftc.diagnostics import Diagnostic, PeftcError
from tests import zoo

EDIT = "edit a at layer[*].attn.q { h += lora(x, r=2) }"
SPEC = f"peft 1 {EDIT}"
SPEC_FIRST = "`peftc.compile(spec, model)`"


def error_of(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Diagnostic:
    with pytest.raises(PeftcError) as caught:
        function(*arguments, **settings)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama")


@pytest.mark.parametrize("function", [peftc.compile, peftc.plan])
@pytest.mark.parametrize("spec", [SPEC, EDIT, "specs/lora.peft"])
def test_the_spec_comes_first(function: Callable[..., Any], spec: str, model: Any) -> None:
    diagnostic = error_of(function, model, spec)
    assert diagnostic.code in ("P502", "P545")
    assert SPEC_FIRST in (diagnostic.help or "")


def test_a_text_without_its_first_line_is_no_path(model: Any) -> None:
    diagnostic = error_of(peftc.plan, EDIT, model)
    assert (diagnostic.code, diagnostic.help) == ("P001", "write `peft 2` on the first line")


def test_a_path_may_have_a_brace(tmp_path: Path, model: Any) -> None:
    path = tmp_path / "a{b}.peft"
    path.write_text(SPEC)
    assert peftc.plan(str(path), model).edits == peftc.plan(SPEC, model).edits


@pytest.mark.parametrize(("function", "call"), [(peftc.load, "peftc.load"), (peftc.attach, "peftc.attach")])
def test_the_directory_comes_first(function: Callable[..., Any], call: str, model: Any) -> None:
    assert error_of(function, model, "folder").help == f"the directory comes first: `{call}(directory, model)`"
    assert error_of(function, "folder", "model").help == "build the model first"


@pytest.mark.parametrize("function", [peftc.save, peftc.import_adapter])
def test_a_module_is_no_directory(function: Callable[..., Any], model: Any) -> None:
    source = model if function is peftc.import_adapter else "folder"
    diagnostic = error_of(function, source, model)
    assert diagnostic.message == "a directory is a path, not a module, LlamaForCausalLM"
    assert diagnostic.help is not None


@pytest.mark.parametrize("function", [peftc.load, peftc.attach])
def test_what_another_program_wrote_is_imported(function: Callable[..., Any], tmp_path: Path, model: Any) -> None:
    assert error_of(function, tmp_path, model).help is None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "peftc.import_adapter" in (error_of(function, tmp_path, model).help or "")


@pytest.mark.parametrize("function", [peftc.load, peftc.attach])
def test_a_spec_is_compiled(function: Callable[..., Any], model: Any) -> None:
    diagnostic = error_of(function, SPEC, model)
    assert "layer" not in diagnostic.message
    assert diagnostic.help == f"compile it: {SPEC_FIRST}"


def test_what_peftc_wrote_is_loaded(tmp_path: Path) -> None:
    model = peftc.compile(SPEC, zoo.build("llama"))
    folder = peftc.save(model, tmp_path / "own")
    diagnostic = error_of(peftc.import_adapter, folder, tmp_path / "other", model=zoo.build("llama"))
    assert diagnostic.code == "P803"
    assert "peftc.load(directory, model)" in (diagnostic.help or "")


def test_a_graph_is_rewritten_by_region(model: Any) -> None:
    assert "peftc.trace" in (error_of(peftc.rewrite, model, SPEC).help or "")


def test_messages_name_the_argument(model: Any) -> None:
    text = "peft 1 method a(r=2) { edit a at layer[*].attn.q { h += lora(x, r=r) } }"
    for settings in ({"r": "2 +"}, {"q": 2}):
        diagnostic = error_of(peftc.plan, text, model, settings=settings)
        assert "--" not in str(diagnostic)
    assert str(error_of(peftc.plan, SPEC, "./nothing")).startswith("model:1:1: error[P502]")
