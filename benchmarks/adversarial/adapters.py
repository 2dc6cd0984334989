"""Adapters after tampering: each is refused with a code and changes nothing, or loads."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import peftc
from benchmarks.adversarial.outcome import Tally
from benchmarks.adversarial.tampering import changes
from peftc import PeftcError

SPEC = (
    "peft 1\nedit a at layer[*].attn.q { h += lora(x, r=2) }\n"
    "edit b at layer[*].ffn per task { h += adapter(h, r=2) }\n"
)
SECRET = "hunter2-" + "c0ffee" * 4


def model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).eval()


def state(base: nn.Module) -> dict[str, object]:
    modules = [(name, type(module), "forward" in vars(module)) for name, module in base.named_modules()]
    return {"modules": modules, "gradients": [p.requires_grad for p in base.parameters()], **base.state_dict()}


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = ((one[name], other[name]) for name in one)
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def run(seed: int, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "secret").write_text(SECRET)
        base = model()
        original = peftc.save(peftc.compile(SPEC, base, seed=0, tasks=["one", "two"]), root / "original")
        for number, (what, change) in enumerate(changes(random.Random(seed))):
            folder = root / str(number)
            shutil.copytree(original, folder)
            change(folder)
            tally.run(what, lambda folder=folder: attempt(folder))
            shutil.rmtree(folder)


def attempt(folder: Path) -> None:
    """Loads an adapter. After an error the model is unchanged, and the message reveals no other
    file.
    """
    base = model()
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state(base).items()}
    error = loading_error(folder, base)
    if error is not None:
        assert same(before, state(base)), "the model has changed"
        assert SECRET not in str(error), "the message shows another file"
        assert "root:" not in str(error), "the message shows another file"
        raise error
    with torch.no_grad(), peftc.task(base, next(iter(peftc.tasks(base)))):
        base(torch.zeros(1, 3, dtype=torch.long))
    peftc.remove(base)
    assert same(before, state(base)), "the model is not what it was"


def loading_error(folder: Path, base: nn.Module) -> PeftcError | None:
    try:
        peftc.load(folder, base)
    except PeftcError as error:
        return error
    return None
