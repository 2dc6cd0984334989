"""Modules whose edits differ in the names of sites alone share what is generated, but for names."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

import peftc
from peftc.installation.record import installation_of
from peftc.specialization import generated_class
from peftc.specialization.generated_class import GeneratedClass
from tests import zoo

ATTENTION = "layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o"
FFN = "layer[*].ffn.gate | layer[*].ffn.up | layer[*].ffn.down"
SPECS = {
    "one edit": f"edit a at {ATTENTION} | {FFN} {{ h += lora(x, r=2) }}",
    "two edits": f"edit a at {ATTENTION} {{ h += lora(x, r=2) }}\n"
    "edit b at layer[*].attn.q | layer[*].attn.k { h += 2 * lora(x, r=3) }",
}
# With some of these lengths, lines are too long for the names of some sites.
SPECS |= {
    f"{length} letters": f"edit {'a' * length} at {ATTENTION} | {FFN} {{ h += lora(x, r=2) + lora(x, r=3) }}"
    for length in range(60, 90, 3)
}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many functions were printed."""
    count: Counter[str] = Counter()
    print_body = generated_class.function_body

    def counting(*args: object) -> list[str]:
        count["functions"] += 1
        return print_body(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(generated_class, "function_body", counting)
    return count


def classes(spec: str) -> list[GeneratedClass]:
    model: nn.Module = peftc.compile(f"peft 1\n{spec}\n", zoo.build("llama"), cache=False)
    return list({id(kind): kind for _, kind in installation_of(model).regions}.values())


@pytest.mark.parametrize("name", SPECS)
def test_the_code_is_that_of_a_class_made_alone(name: str) -> None:
    for kind in classes(SPECS[name]):
        alone = GeneratedClass(kind.base, kind.inline, kind.edits, kind.name)
        assert kind.source == alone.source
        assert [str(v.graph) for v in kind.variants] == [str(v.graph) for v in alone.variants]


@pytest.mark.parametrize(("name", "functions"), [("one edit", 1), ("two edits", 2)])
def test_code_is_printed_once_for_all_names(name: str, functions: int, printed: Counter[str]) -> None:
    assert len(classes(SPECS[name])) == (7 if name == "one edit" else 4)
    assert printed["functions"] == functions
