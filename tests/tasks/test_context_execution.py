"""The choice of a context in code that runs later or elsewhere: recomputation, whole graphs,
export, replicas, threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import TextIteratorStreamer

import peftc
from tests.survival.test_checkpointing import switch_on
from tests.tasks.choices import CHOICES, IDS, compiled, expected, logits


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
    model, names = compiled(), ["a", "base", "rows", "in part", "b"]
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
