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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import TextIteratorStreamer

import peftc
from tests import zoo
from tests.laws.harness import randomise
from tests.survival.test_checkpointing import switch_on

SPEC = """peft 1
edit each at layer[*].ffn per task { h += adapter(x, r=4, act=relu) }
edit side at layer[*].attn.q { h += lora(x, r=2) }
train norms = [w] at layer[*].norm
"""
SECOND = "peft 1\nedit late at layer[*].attn.v { h += lora(x, r=2) }"
IDS = torch.arange(12).reshape(2, 6)


@cache
def pristine() -> Any:
    model = peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=0, name="first", tasks=["a", "b"])
    peftc.compile(SECOND, model, seed=0, name="second")
    randomise(peftc.parameters(model))
    return model


def compiled() -> Any:
    return copy.deepcopy(pristine())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@cache
def expected() -> dict[str, Tensor]:
    """The outputs of each choice; all differ."""
    model = compiled()
    outputs = {"base": logits(zoo.build("llama", torch.float64))}
    for name, choice in CHOICES.items():
        with choice(model):
            outputs.setdefault(name, logits(model))
            assert torch.equal(logits(model), outputs[name])
    assert all(not torch.equal(outputs[a], outputs[b]) for a in outputs for b in outputs if a != b)
    return outputs


@contextmanager
def both(model: Any) -> Iterator[Any]:
    with peftc.task(model, "a"), peftc.disabled(model, "second"):
        yield model


CHOICES: dict[str, Callable[[Any], Any]] = {
    "a": lambda m: peftc.task(m, "a"),
    "b": lambda m: peftc.task(m, "b"),
    "rows": lambda m: peftc.task(m, task_ids=["b", "a"]),
    "base": peftc.disabled,
    "in part": both,
    "second alone": lambda m: peftc.disabled(m, "first"),
}


def check(model: Any, name: str) -> None:
    assert torch.equal(logits(model), expected()[name]), name


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


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recomputation_has_the_choice_of_the_forward(reentrant: bool) -> None:
    """Backward in another thread and in another block; for transformers' checkpointing, and for a
    user's own.
    """
    model = compiled().train()
    model.enable_input_require_grads()
    for name, choice in CHOICES.items():
        for own in (False, True):
            grads: list[dict[str, Tensor]] = []
            for again in (False, True):
                model.zero_grad()
                if again and not own:
                    switch_on(model, reentrant)
                embedded = model.model.embed_tokens(IDS).detach().requires_grad_()
                call: Any = lambda x: model(inputs_embeds=x).logits  # noqa: E731
                with choice(model):
                    out = checkpoint(call, embedded, use_reentrant=reentrant) if again and own else call(embedded)
                getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
                with peftc.disabled(model, "second"), peftc.task(model, "b"):
                    if again:
                        thread = threading.Thread(target=out.square().mean().backward)
                        thread.start()
                        thread.join()
                    else:
                        out.square().mean().backward()
                grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                assert embedded.grad is not None
                grads[-1]["input"] = embedded.grad
            assert grads[0].keys() == grads[1].keys(), name
            assert all(torch.allclose(grads[0][k], grads[1][k], rtol=0, atol=1e-12) for k in grads[0]), name
            edited = {n for n in grads[0] if "peftc" in n or "norm" in n}
            assert bool(edited) == (name != "base")


def test_whole_graphs_of_each_context() -> None:
    """One compilation for each choice; each context has its own at the same time."""
    model, names = compiled(), ["a", "base", "in part", "b"]
    expected()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    fast = torch.compile(model, backend=counter, fullgraph=True)

    async def run(name: str, meet: asyncio.Barrier) -> None:
        with CHOICES[name](model):
            for _ in range(2):
                await meet.wait()
                assert torch.equal(logits(fast), expected()[name]), name

    async def all_of_them() -> None:
        meet = asyncio.Barrier(len(names))
        await asyncio.gather(*(run(name, meet) for name in names))

    asyncio.run(all_of_them())
    assert counter.frame_count == len(names)
    outputs: list[Tensor] = []
    with peftc.disabled(model):
        context = contextvars.copy_context()
    for run_in in (context.run, partial(contextvars.Context().run)):
        with peftc.task(model, "b"):
            thread = threading.Thread(target=lambda run_in=run_in: outputs.append(run_in(in_a, model, fast)))
            thread.start()
            thread.join()
    assert torch.equal(outputs[0], expected()["base"])
    assert torch.equal(outputs[1], expected()["a"])
    assert counter.frame_count == len(names)
    torch._dynamo.reset()


def in_a(model: Any, fast: Any) -> Tensor:
    with peftc.task(model, "a"):
        return logits(fast)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [True, False])
def test_exported_with_the_choice(strict: bool) -> None:
    model = compiled()
    expected()
    for name in ("a", "base"):
        with CHOICES[name](model), torch.no_grad():
            logits(model)
            program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=strict)
        got = program.module()(IDS, use_cache=False).logits
        assert torch.allclose(got, expected()[name], rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_replicas_in_other_threads() -> None:
    """As in `nn.DataParallel`: created in the context of the call, run in threads without it."""
    model = compiled()
    for name, choice in CHOICES.items():
        with choice(model):
            replica = replicated(model)
        outputs: list[Tensor] = []
        thread = threading.Thread(target=lambda outputs=outputs, replica=replica: outputs.append(logits(replica)))
        thread.start()
        thread.join()
        assert torch.equal(outputs[0], expected()[name]), name


def replicated(model: nn.Module) -> Any:
    """`torch.nn.parallel.replicate` for one device, without copying values."""
    replicas: dict[nn.Module, Any] = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, None if child is None else replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach().view_as(parameter))
        for name, buffer in module._buffers.items():
            setattr(replica, name, buffer)
    return replicas[model]


class Words:
    """A tokenizer whose words are numbers."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(f"{int(t)} " for t in torch.as_tensor(tokens).flatten())


def test_streaming_from_a_thread() -> None:
    model, inputs = compiled(), {"input_ids": IDS[:1], "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    texts: dict[str, str] = {}
    for name in ("a", "b", "base"):
        with CHOICES[name](model):
            want = model.generate(**inputs)
            streamer = TextIteratorStreamer(Words(), timeout=60)  # type: ignore[arg-type]
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(model.generate,), kwargs={**inputs, "streamer": streamer})
            thread.start()
        texts[name] = "".join(streamer)  # after the block: the thread has the context of its start
        thread.join()
        assert texts[name].split() == [str(int(t)) for t in want[0]]
    assert len(set(texts.values())) == 3


class Listed(nn.Linear):
    """Reads its weight from a list, like recurrent modules."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.flat = [self.weight]

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.flat[0], self.bias)


def test_weights_that_a_module_reads_from_a_list_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Listed(4, 4))
    peftc.compile('peft 1\ntrain t = [w, b] at "1"', model, sample={"input": torch.zeros(1, 4)}, seed=0)
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.disabled(model)
    assert excinfo.value.diagnostics[0].code == "P432"
