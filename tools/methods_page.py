"""The table of methods, `docs/methods.md`: what each method of a peer is here, and what it trains.

python -m tools.methods_page > docs/methods.md
python -m tools.methods_page --record [TYPE …]    # PEFT's counts, in tests/data/method_counts.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import peftc
from peftc.models.catalogue import find
from peftc.semantics.recipes import recipes
from tests.exchange import (
    test_adaption_prompt,
    test_cached_rows,
    test_drawn_types,
    test_import,
    test_prompts,
    test_types,
    test_types_in_common,
)
from tools import adapterhub_methods
from tools.gallery_page import with_links
from tools.methods import PEFT, Method, config_of, count_in_peft, plan_of

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "data" / "method_counts.json"
MODELS = ("bert-base-uncased", "meta-llama/Llama-3.2-1B")
NONE = "—"
NARROW = {"vocab_size": 8}  # which no method reads that needs a model with data
WITH_DATA = ("ADALORA", "SHIRA")  # PEFT would count a number for each AdaLoRA, and has no SHiRA

HEAD = """# Methods

What other libraries of fine-tuning methods have, and what it is in peftc. `make docs` makes this page; tests compare it
with plans and with the libraries, whose counts on the two models `python -m tools.methods_page --record` recorded in
`tests/data/method_counts.json`.

- *Spec*: the [recipe](gallery.md), or the equation with the form that adapters of the library come with
  ([exchange](exchange.md)).
- *Trained*: the parameters with a gradient, in the plan of peftc and as the library counts them
  (`print_trainable_parameters`), with the same numbers at the same modules: those of the recipe's defaults. `—` with a
  code is a model that the spec does not fit.
- *Same outputs*: the test that gives both the same parameters and compares their outputs, and how near these are.
"""

FLOAT64 = "1e-10, in float64"
FLOAT32 = "1e-6: PEFT computes it in float32"
ROUNDED = "1e-6: PEFT has prompts in float32"
SINGLE = "1e-4, in float32: PEFT has no float64"
# Tables of cases of tests, each with the test that runs them.
TABLES: tuple[tuple[Any, Mapping[str, tuple[Any, ...]], str], ...] = (
    (test_import, test_import.TYPES, "test_other_types_are_equations"),
    (test_types, test_types.CASES, "test_a_type_comes_and_goes_back"),
    (test_types, test_types.ONE_WAY, "test_a_type_comes"),
    (test_drawn_types, test_drawn_types.CASES, "test_a_type_comes_and_goes_back"),
    (test_drawn_types, test_drawn_types.ONE_WAY, "test_a_type_comes"),
    (test_drawn_types, test_drawn_types.PSOFT, "test_psoft_comes_and_goes_back"),
    (test_drawn_types, test_drawn_types.ADAMSS, "test_adamss_comes"),
    (test_types_in_common, test_types_in_common.CASES, "test_outputs_and_gradients_are_those_of_peft"),
    (test_adaption_prompt, test_adaption_prompt.CASES, "test_it_comes_and_goes_back"),
    (test_cached_rows, test_cached_rows.CASES, "test_rows_come_and_go_back"),
    (test_prompts, test_prompts.CASES, "test_a_prompt_comes_and_goes_back"),
)
OTHER_TESTS = {  # of other tables
    "LORA": (test_import, "test_lora_computes_the_same_and_goes_back"),
    "TRAINABLE_TOKENS": (test_types_in_common, "test_rows_of_embeddings_come_and_go_back"),
}


@cache
def tests_of_peft() -> Mapping[str, tuple[str, str]]:
    """The test of each type of PEFT, and how near the outputs are."""
    names = {cls: key.value for key, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    tests = {name: (_test(module, test), FLOAT64) for name, (module, test) in OTHER_TESTS.items()}
    for module, cases, test in TABLES:
        for case, values in cases.items():
            near = FLOAT32 if module is test_types and test_types.rounding(case) else FLOAT64
            near = ROUNDED if module is test_types_in_common and values[-1] else near
            near = SINGLE if test == "test_psoft_comes_and_goes_back" else near
            tests.setdefault(names[values[1]], (f"{_test(module, test)}[{case}]", near))
    return tests


def _test(module: Any, test: str) -> str:
    return f"{Path(module.__file__).stem}::{test}"


def recorded() -> dict[str, Any]:
    """What libraries have counted: by library its versions, and counts by method and model."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@cache
def planned(name: str, model: str) -> int | str:
    """What peftc would train, or the code of a refusal."""
    try:
        return plan_of(name, PEFT[name], model).totals.trained
    except peftc.PeftcError as error:
        return error.diagnostics[0].code


def has_count(name: str, model: str) -> bool:
    method = PEFT[name]
    return method.values is not None and not (method.causal and model == MODELS[0])


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, coverage(), *peft_section(), *adapterhub_methods.section()])


def coverage() -> str:
    """How many types and configurations have a spec."""
    own = [bool(method.recipe or method.equation[0]) for method in PEFT.values()]
    others = [bool(method.case) for method in adapterhub_methods.METHODS]
    every = [*own, *others]
    return (
        f"{sum(own)} of the {len(own)} types of PEFT and {sum(others)} of the {len(others)} configurations of "
        f"AdapterHub have a spec, {100 * sum(every) / len(every):.1f} % of both.\n"
    )


def peft_section() -> Iterator[str]:
    versions = recorded()["peft"]["versions"]
    yield f"## PEFT\n\nThe {len(PEFT)} types of PEFT {versions['peft']}.\n"
    yield f"| type | spec | {' | '.join(f'{model}: peftc | PEFT' for model in MODELS)} |"
    yield "|---|---|--:|--:|--:|--:|"
    for name, method in PEFT.items():
        counts = (one for model in MODELS for one in counts_of(name, model))
        yield f"| `{name}` | {spec_entry(method)} | {' | '.join(counts)} |"
    yield "\n| type | paper | same outputs | to |\n|---|---|---|---|"
    for name, method in PEFT.items():
        test, near = tests_of_peft().get(name, (NONE, NONE))
        yield f"| `{name}` | {paper_of(method)} | {f'`{test}`' if test != NONE else test} | {near} |"
    yield "\nWhy a type has no spec or no count, and what its spec leaves out:\n"
    yield from (f"- `{name}`: {method.note}." for name, method in PEFT.items() if method.note)
    yield ""


def counts_of(name: str, model: str) -> tuple[str, str]:
    """Ours and theirs."""
    if not has_count(name, model):
        return NONE, NONE
    ours = planned(name, model)
    theirs = recorded()["peft"]["counts"][name].get(model)
    return f"{ours:,}" if isinstance(ours, int) else f"{NONE} {ours}", NONE if theirs is None else f"{theirs:,}"


def spec_entry(method: Method) -> str:
    """A link to the recipe, or the equation."""
    if method.recipe:
        return f"[`{method.recipe}`](gallery.md#{method.recipe})"
    return f"`{method.equation[0].format(**method.settings)}`" if method.equation[0] else NONE


def paper_of(method: Method) -> str:
    """The number of arXiv."""
    number = method.paper or (recipes()[method.recipe].paper[2] if method.recipe else None)
    return with_links(f"arXiv:{number}") if number else NONE


# The peer's counts


def record(names: Collection[str]) -> None:
    """Counts of PEFT on models without data, where it needs none."""
    every = recorded()
    counts: dict[str, dict[str, int]] = every["peft"]["counts"] | {name: {} for name in names}
    for model in MODELS:
        for name in names:
            if has_count(name, model) and isinstance(planned(name, model), int):
                counts[name][model] = _count(name, PEFT[name], model)
    versions = {package: version(package) for package in ("peft", "transformers", "torch")}
    own = {"versions": versions, "counts": {name: counts[name] for name in PEFT}}
    text = json.dumps({**every, "peft": own}, indent=1)
    RECORDED.write_text(f"{text}\n", encoding="utf-8", newline="\n")


def _count(name: str, method: Method, model: str) -> int:
    has_data = name in WITH_DATA
    with torch.device("cpu" if has_data else "meta"):
        base = model_of(model, **NARROW if has_data else {})
    return count_in_peft(config_of(name, method, plan_of(name, method, model), base), base)


def model_of(name: str, **values: Any) -> nn.Module:
    """A model of the catalogue with random weights, in float32."""
    entry = find(name)
    assert entry is not None
    config = AutoConfig.for_model(entry.model_type, **{**entry.config, **values})
    cls = AutoModel if entry.head == "base" else AutoModelForCausalLM
    return cls.from_config(config, dtype=torch.float32)


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record(sys.argv[2:] or list(PEFT))
    else:
        sys.stdout.write(page())
