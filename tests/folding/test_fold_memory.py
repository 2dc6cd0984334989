"""Memory of a fold: running out of it leaves the model unchanged, and only one weight at a time
exists twice.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import peftc
from peftc.folding import ffn_width
from peftc.installation import compiled_model, journal
from tests import zoo
from tests.laws.harness import randomise

SPEC = """peft 1
edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }
edit b at layer[*].attn.k { h += vector(init=0) }
edit c at layer[*].attn.o { w = magnitude(w + lowrank(r=2)) }
edit p at layer[*].ffn { h += adapter(h, r=2) }
"""


def compiled() -> nn.Module:
    model = peftc.compile(SPEC, zoo.build("llama"), seed=0).eval()
    randomise(peftc.parameters(model))
    return model


def state(model: nn.Module) -> dict[str, Any]:
    values = {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    return values | {f"class of {name}": type(module) for name, module in model.named_modules()}


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    now = state(model)
    assert list(now) == list(before)
    for name, value in now.items():
        if isinstance(value, tuple):
            assert value[:2] == before[name][:2], name
            assert torch.equal(value[2], before[name][2]), name
        else:
            assert value is before[name], name


def failing(owner: Any, name: str, count: int, error: BaseException, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes call number `count` of a function fail."""
    original, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)
    return lambda: calls


@torch.no_grad()
def result(model: nn.Module) -> torch.Tensor:
    return model(**zoo.inputs("llama", model))[0]


PLACES = [(torch.Tensor, "copy_"), (torch.Tensor, "to"), (journal.Journal, "save"), (nn.Module, "register_parameter")]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_memory_that_runs_out_at_any_call_leaves_the_model(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled()
    before, want = state(model), result(model)
    failed = 0
    for count in range(1, 400, 7):
        with monkeypatch.context() as patch:
            reached = failing(owner, name, count, torch.OutOfMemoryError("injected"), patch)
            try:
                peftc.fold(model)
            except (
                torch.OutOfMemoryError,
                peftc.PeftcError,
            ):  # the latter where planning what stays cannot read a layer for it
                error = True
            else:  # none, or it came while a variant was tried that can be made later
                error = False
        if error:
            failed += 1
            assert_same(model, before)
            assert torch.equal(result(model), want)
        else:
            assert torch.allclose(result(model), want, atol=1e-5)
            assert len(peftc.parameters(model)) == 4 * 3  # of `p` alone
            model = compiled()
            before = state(model)
        if reached() < count:
            break
    assert failed


TRAINED = """peft 1
edit a at layer[*].attn.q { h += lora(x, r=2) }
train n = [w] at layer[*].ffn.down | norm
"""
WIDER = """peft 1
edit a at layer[*].attn.q { h += lora(x, r=2) }
edit b at layer[*].ffn { h += adapter(x, r=2, act=relu) }
"""


class Failing(TorchDispatchMode):
    """Makes one of torch's own calls, by its number, run out of memory."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [None, "one"])
def test_trained_weights_are_all_put_back_by_remove_or_none(name: str | None) -> None:
    def begin() -> nn.Module:
        model = peftc.compile(TRAINED, zoo.build("llama"), seed=0, name="one").eval()
        if name is not None:
            peftc.compile("peft 1\nedit o at layer[*].attn.o { h += lora(x, r=2) }", model, seed=0, name="two")
        randomise(peftc.parameters(model))
        return model

    model = begin()
    with Failing(0) as counted:
        peftc.remove(model, name)
    model = begin()
    before, want = state(model), result(model)
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    reached = 0
    for at in range(1, counted.calls + 1) if name is None else range(counted.calls - 12, counted.calls + 1):
        try:
            with Failing(at):
                peftc.remove(model, name)
        except (torch.OutOfMemoryError, peftc.PeftcError):
            reached += 1
            assert_same(model, before)
            assert torch.equal(result(model), want)
            assert next(model.parameters()).grad is not None
        else:
            model = begin()
            next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
            before = state(model)
    assert reached > 4
    peftc.remove(model, name)
    for key, parameter in zoo.build("llama").named_parameters():
        assert torch.equal(model.get_parameter(key), parameter), key


def wider() -> nn.Module:
    model = peftc.compile(WIDER, zoo.build("opt"), seed=0).eval()
    randomise(peftc.parameters(model))
    return model


def observed(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**zoo.inputs("opt", model))[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_fold_that_widens_is_done_or_undone_as_a_whole(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: before, in, or after the second write."""
    model = wider()
    before, want, config = state(model), observed(model), str(model.config)
    places = [
        (ffn_width.Widening, "widen"),
        (ffn_width.WiderFfn, "swap"),
        (ffn_width, "wider_config"),
        (compiled_model, "uninstall"),
    ]
    for owner, name in places:
        with monkeypatch.context() as patch:
            failing(owner, name, 1, error("injected"), patch)
            with pytest.raises(error):
                peftc.fold(model, widen=True)
        assert_same(model, before)
        assert torch.equal(observed(model), want)
        assert str(model.config) == config
        assert list(peftc.specs(model)) == ["default"]
        assert {name.partition("/")[0] for name in peftc.parameters(model)} == {"a", "b"}
    assert not peftc.fold(model, widen=True).refused
    assert torch.allclose(observed(model), want, atol=1e-5)


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    before = state(model)

    class Full:
        def __init__(self, **_: Any) -> None:
            self.written = 0

        def seek(self, *_: Any) -> int:
            return self.written

        def write(self, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(journal, "SpooledTemporaryFile", Full)
    with pytest.raises(peftc.PeftcError) as error:
        peftc.fold(model)
    assert [d.code for d in error.value.diagnostics] == ["P546"]
    assert_same(model, before)


MEASURE = """
import ctypes, gc, re, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import peftc

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def model(width, layers):
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=64,
    )
    edited = peftc.compile(SPEC, LlamaForCausalLM(config).to(getattr(torch, sys.argv[1])), seed=0)
    for parameter in peftc.parameters(edited).values():
        parameter.data.normal_(std=0.02)
    return edited

torch.set_num_threads(1)
peftc.fold(model(32, 1))  # what the first fold imports is not counted
large = model(1024, 8)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = kilobytes("VmRSS")
peftc.fold(large)
weights = sum(p.numel() * p.element_size() for p in large.parameters())
print((kilobytes("VmHWM") - before) * 1024, weights)
"""
LINEARS = " | ".join(
    f"layer[*].{p}" for p in ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory that begins anew")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_weight_at_a_time_exists_twice(dtype: str) -> None:
    """Every weight is folded into, with less than three quarters of their memory as overhead.
    Holding all old and new values at once would need twice as much.
    """
    spec = f"peft 1\nedit a at {LINEARS} {{ h += lora(x, r=4) }}\n"
    code = f"SPEC = {spec!r}\n{MEASURE}"
    done = subprocess.run([sys.executable, "-c", code, dtype], capture_output=True, text=True, check=True)
    more, weights = map(int, done.stdout.split())
    assert weights > 1e8
    assert more < 0.75 * weights, f"{more / 1e6:.0f} MB for weights of {weights / 1e6:.0f} MB"
