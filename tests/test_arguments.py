"""Arguments of wrong types or values: a diagnostic, and an unchanged model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import Before

EDITS = {
    "tasks": "per task { h += adapter(h, r=2) }",
    "plain": "{ h += adapter(h, r=2) }",
    "sparse": "{ h += sparse_adapter(h, r=2, density=0.5, select=snip) }",
    "routes": "{ h += mixture(h, n=2, r=2) }",
    "fusion": "{ h += fusion(h, n=1, r=2) }",
}


MORE = "peft 1\nedit f at layer[*].ffn { h *= vector() }"


@cache
def model_of(name: str) -> Any:
    """One model for all tests; none changes it."""
    tasks = ["a", "b"] if name == "tasks" else None
    return peftc.compile(f"peft 1\nedit e at layer[*].ffn {EDITS[name]}", zoo.build("bert"), seed=0, tasks=tasks)


def model_inputs(model: Any) -> dict[str, torch.Tensor]:
    return zoo.inputs("bert", model, labels=True)


def run(model: Any, **how: Any) -> torch.Tensor:
    with torch.no_grad(), peftc.task(model, **how):
        return model(**model_inputs(model)).logits


def refused(model: Any, code: str, call: Callable[[Any], object]) -> None:
    before = Before.of(model)
    with pytest.raises(peftc.PeftcError, match=code):
        call(model)
    before.assert_same(model)


TASKS: list[tuple[str, Callable[[Any], object]]] = [
    *(("P535", lambda m, v=v: run(m, task_ids=v)) for v in ([None] * 2, 5, "ab", [[0, 1]], [0.5, 1], [True, False])),
    *(("P535", lambda m, v=v: run(m, task_ids=v)) for v in (torch.tensor([True, False]), {"a": 1}, [0, 2])),
    *(("P534", lambda m, v=v: run(m, name=v)) for v in (0, ["a"])),
    *(("P534", lambda m, v=v: peftc.drop_task(m, v)) for v in (None, 3)),
    *(("P537", lambda m, v=v: peftc.add_task(m, v)) for v in (None, 3)),
    ("P534", lambda m: peftc.add_task(m, "c", like=3)),
    *(("P537", lambda m, v=v: peftc.compile(MORE, m, tasks=v)) for v in ([1], [None], 5)),
]


def test_tasks_are_names_or_numbers_in_a_tensor_or_a_list() -> None:
    model = model_of("tasks")
    want = run(model, task_ids=torch.tensor([1, 0]))
    for ids in ([1, 0], ("b", "a"), [torch.tensor(1), "a"], torch.tensor([1, 0]).numpy()):
        assert torch.equal(run(model, task_ids=ids), want)


@pytest.mark.parametrize("case", range(len(TASKS)))
def test_invalid_tasks(case: int) -> None:
    refused(model_of("tasks"), *TASKS[case])


def test_a_model_without_tasks_has_none_to_drop() -> None:
    with pytest.raises(peftc.PeftcError, match=r"P537.*no edit of the model is `per task`"):
        peftc.drop_task(model_of("plain"), "a")


def calibrated(**how: Any) -> Callable[[Any], object]:
    return lambda m: peftc.calibrate(m, **{"data": [model_inputs(m)], **how})


@pytest.mark.parametrize(
    "how",
    [
        *({"loss": loss} for loss in (5, lambda m, b: None, lambda m, b: 0.5, lambda m, b: m(**b).logits)),
        *({"data": data} for data in (5, {"input_ids": torch.ones(1, 1)}, "ab", [torch.ones(1, 1)], [{1: 2}])),
        *({"lr": lr} for lr in (-1, 0, math.nan, math.inf, "a", None)),
    ],
)
def test_arguments_that_select_nothing(how: Any) -> None:
    refused(model_of("sparse"), "P541", calibrated(**how))


def routes(**how: Any) -> Callable[[Any], object]:
    def call(model: Any) -> object:
        return peftc.losses(
            model, **{"inputs": model_inputs(model), "logits": model(**model_inputs(model)).logits, **how}
        )

    return call


CALLS: list[tuple[str, Callable[[Any], object]]] = [
    *(("routes", lambda m, v=v: peftc.step(m, v)) for v in ("a", None, 1.5, -1, True)),
    *(("routes", routes(logits=v)) for v in (5, torch.ones(1), torch.ones(1, 2), torch.ones(2, 2, dtype=torch.long))),
    ("routes", routes(inputs=5)),
    *(("plain", lambda m, v=v: peftc.warm_start(m, v)) for v in (None, ["x"], b"x")),
    *(("plain", lambda m, v=v: peftc.save(m, v)) for v in (None, ["x"])),
    *(("plain", lambda m, v=v: peftc.load(v, m)) for v in (None, ["x"])),
    *(("plain", lambda m, v=v: peftc.from_pretrained(v)) for v in (None, ["x"])),
    *(("plain", lambda m, v=v: peftc.push(m, v)) for v in (None, ["x"])),
    *(("plain", lambda m, v=v: peftc.checkpoint_adapters(v)) for v in (None, "x")),
    *(("fusion", lambda m, v=v: peftc.fuse(m, v)) for v in (None, [None], 5)),
    ("fusion", lambda m: peftc.fuse(m, "x", edits=["e"])),
    *(("plain", lambda m, v=v, w=w: peftc.fold(m, only=v, widen=w)) for v in (5, [5]) for w in (False, True)),
    *(("plain", lambda m, v=v: peftc.compile(MORE, m, name=v)) for v in (5, ["x"])),
    ("plain", lambda m: peftc.compile(MORE, m, prefix=5)),
]


@pytest.mark.parametrize("case", range(len(CALLS)))
def test_arguments_of_wrong_types(case: int) -> None:
    name, call = CALLS[case]
    refused(model_of(name), "P545", call)


@pytest.mark.parametrize("name", [5, ["x"]])
def test_invalid_names_of_specs(name: Any, tmp_path: Path) -> None:
    refused(model_of("plain"), "P413", lambda m: peftc.save(m, tmp_path / "x", name))
    refused(model_of("plain"), "P413", lambda m: peftc.remove(m, name))


def test_routes_are_unchanged_after_a_failed_forward() -> None:
    model = model_of("routes")
    peftc.step(model, 1)
    before = [b.clone() for n, b in model.named_buffers() if n.endswith("route")]
    with pytest.raises(ValueError, match="input_ids"):
        routes(inputs={"nonsense": 1})(model)
    after = [b for n, b in model.named_buffers() if n.endswith("route")]
    assert before
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
