"""`peftc.task` and `peftc.disabled` are local to the current context and to the model, not to its
modules or copies.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from tests.tasks.choices import CHOICES, check, compiled, expected, logits


def test_nested_blocks_and_errors() -> None:
    model = compiled()
    with peftc.task(model, "a"):
        with peftc.disabled(model):
            with peftc.task(model, "b"):
                check(model, "base")
            with pytest.raises(KeyError), peftc.disabled(model, "second"):
                raise KeyError
            check(model, "base")
        check(model, "a")
        with peftc.task(model, "b"):
            check(model, "b")
        check(model, "a")
    again = peftc.disabled(model)
    with again, again:
        check(model, "base")
    with peftc.task(model, "b"):
        check(model, "b")


def test_overlapping_blocks_of_one_context() -> None:
    """Generators share their caller's context, and may end in any order."""
    model, other = compiled(), compiled()

    def inside(block: Any) -> Iterator[None]:
        with block:
            yield

    blocks = [peftc.task(model, "a"), peftc.disabled(model), peftc.disabled(other), peftc.disabled(model, "second")]
    running = [inside(block) for block in blocks]
    for one in running:
        next(one)
    check(model, "base")
    running[1].close()
    check(model, "in part")
    running[3].close()
    check(model, "a")
    check(other, "base")
    running[0].close()
    running[2].close()
    for m in (model, other):
        with peftc.task(m, "b"):
            check(m, "b")


@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
def test_contexts_are_isolated(threads: bool) -> None:
    """Each choice in a context of its own, all blocks open at once."""
    model, names = compiled(), list(CHOICES)
    expected()

    async def run(name: str, meet: asyncio.Barrier) -> None:
        with CHOICES[name](model):
            await meet.wait()
            check(model, name)
            await meet.wait()
            check(model, name)

    async def all_of_them() -> None:
        meet = asyncio.Barrier(len(names))
        await asyncio.gather(*(run(name, meet) for name in names))

    if threads:
        meet, failures = threading.Barrier(len(names), timeout=60), []

        def work(name: str) -> None:
            try:
                with CHOICES[name](model):
                    meet.wait()
                    check(model, name)
                    meet.wait()
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not failures
    else:
        asyncio.run(all_of_them())
    with pytest.raises(peftc.PeftcError, match="none is chosen"):
        logits(model)


def test_leaving_a_block_in_another_context_is_an_error() -> None:
    model = compiled()

    def inside() -> Iterator[None]:
        with peftc.disabled(model):
            yield

    generator = inside()
    contextvars.copy_context().run(next, generator)
    with pytest.raises(peftc.PeftcError) as excinfo:
        generator.close()
    assert excinfo.value.diagnostics[0].code == "P431"
    with peftc.task(model, "a"):
        check(model, "a")


def copies(model: Any) -> Iterator[Any]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)
    twin = compiled()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(model.state_dict())
    yield twin


def test_copies_made_inside_a_block_have_no_choice() -> None:
    model = compiled()
    with peftc.disabled(model), peftc.task(model, "b"):
        twins = list(copies(model))
        names = {name for name, _ in model.named_parameters()}
        assert peftc.parameters(model).keys() == peftc.parameters(twins[0]).keys()
        for twin in twins:
            with peftc.task(twin, "a"):
                check(twin, "a")
        check(model, "base")
    assert names == {name for name, _ in model.named_parameters()}
    for twin in twins:
        with pytest.raises(peftc.PeftcError, match="none is chosen"):
            logits(twin)
        with peftc.disabled(twin):
            check(twin, "base")


def test_switched_for_all_contexts_and_copies() -> None:
    model = compiled()
    assert peftc.set_task(model, "a") is model
    check(model, "a")
    with peftc.task(model, "b"):
        check(model, "b")
    peftc.set_enabled(model, False, "second")
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(logits(model)))
    thread.start()
    thread.join()
    assert torch.equal(outputs[0], expected()["in part"])
    for twin in list(copies(model))[:3]:
        check(twin, "in part")
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.remove(model)
    assert excinfo.value.diagnostics[0].code == "P529"
    peftc.set_enabled(model, False)
    check(model, "base")
    peftc.set_enabled(model, True, "first")
    check(model, "in part")
    peftc.set_enabled(model, True)
    check(model, "a")
    peftc.drop_task(model, "a")
    check(model, "b")
    for wrong in (lambda: peftc.set_task(model, "a"), lambda: peftc.set_enabled(model, False, "third")):
        with pytest.raises(peftc.PeftcError):
            wrong()


def test_changes_of_the_model_are_refused_in_its_own_block_only() -> None:
    model = compiled()
    with peftc.disabled(model, "second"), pytest.raises(peftc.PeftcError) as excinfo:
        peftc.remove(model)
    assert excinfo.value.diagnostics[0].code == "P529"
    with peftc.task(model, task_ids=["a", "b"]):
        peftc.drop_task(model, "a")
        with pytest.raises(peftc.PeftcError, match="choose again"):
            logits(model)
    with peftc.task(model, "b"):
        check(model, "b")
    with peftc.disabled(model):
        outside = contextvars.Context()
        outside.run(peftc.remove, model)  # a change of the model is visible in every context
        check(model, "base")
    check(model, "base")
