"""A function of the model's code that decides on what is known only while it runs stays whole: the
graph calls it, and edits around it act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

import peftc
from peftc.specialization.generated_class import GeneratedClass
from tests.laws.harness import randomise


class Memory:
    """The last tokens of earlier calls, which join those of the next one."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def update(self, x: Tensor) -> Tensor:
        joined = x if self.tokens is None else torch.cat([self.tokens, x], dim=1)
        self.tokens = joined[:, -2:].detach()
        return joined


def scan(x: Tensor, decay: Tensor, last: bool = False) -> tuple[Tensor, Tensor | None]:
    """A recurrence over as many tokens as there are."""
    states = [x[:, 0]]
    for i in range(1, x.shape[1]):
        states.append(decay * states[-1] + x[:, i])
    return torch.stack(states, dim=1), states[-1] if last else None


def depthwise(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[2]).transpose(1, 2)


class Recurrent(nn.Module):
    keeps_last = False

    def __init__(self) -> None:
        super().__init__()
        self.i, self.o, self.conv = nn.Linear(4, 6), nn.Linear(6, 4), nn.Conv1d(6, 6, 3, groups=6)
        self.decay, self.limits = nn.Parameter(torch.rand(6)), (0.0, float("inf"))

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        y = self.i(x)
        if memory is not None:
            y = memory.update(y)
        y = depthwise(y, self.conv.weight)
        if self.limits != (0.0, float("inf")):
            y = y.clamp(*self.limits)
        y, last = scan(y, self.decay, last=self.keeps_last)
        if last is not None:
            y = y + last[:, None]
        return self.o(y)


class KeepsLast(Recurrent):
    keeps_last = True


def pair(cls: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A module, and one with the same weights whose forward is generated."""
    torch.manual_seed(0)
    base, module = cls().double(), cls().double()
    module.load_state_dict(base.state_dict())
    module.__class__ = GeneratedClass(cls, frozenset([""]), (), cls.__name__).cls
    return base, module


@pytest.mark.parametrize("cls", [Recurrent, KeepsLast])
def test_a_loop_over_tokens_that_a_cache_has_added_to(cls: type[Recurrent]) -> None:
    base, module = pair(cls)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for lengths in ((5, 1, 3), (1, 2), (7,)):
        one, other = Memory(), Memory()
        for length in lengths:
            y, z = (x[:, :1].repeat(1, length, 1).requires_grad_() for _ in range(2))
            result, expected = module(y, one), base(z, other)
            assert torch.equal(result, expected)
            result.sum().backward()
            expected.sum().backward()
            assert y.grad is not None
            assert torch.equal(y.grad, z.grad)
    assert torch.equal(module(x), base(x))


def optional(x: Tensor) -> Tensor | None:
    return x.flip(1) if len(range(x.shape[1])) > 3 else None


class Optional(Recurrent):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = memory.update(self.i(x))
        more = optional(y)
        if more is not None:
            y = y + more
        return self.o(y)


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5)])
def test_what_a_function_returns_has_to_keep_its_type(lengths: tuple[int, int]) -> None:
    """Python has decided on it: the decision is rechecked."""
    base, module = pair(Optional)
    first, other = (torch.randn(2, length, 4).double() for length in lengths)
    assert torch.equal(module(first, Memory()), base(first, Memory()))
    with pytest.raises(peftc.PeftcError, match="P408"):
        module(other, Memory())


def several(x: Tensor) -> list[Tensor]:
    return [x] * len(range(x.shape[1]))


def precise(x: Tensor) -> Tensor:
    return x.float() if len(range(x.shape[1])) > 3 else x


def deep(x: Tensor) -> Tensor:
    return x[None] if len(range(x.shape[1])) > 3 else x


def named(x: Tensor) -> dict[str, Tensor]:
    return {str(i): x for i in range(x.shape[1])}


QUESTIONS: dict[str, Callable[[Tensor], float]] = {
    "len": lambda x: len(several(x)),
    "parts": lambda x: sum(1.0 for _ in several(x)[1:]),
    "dtype": lambda x: 1.0 if precise(x).dtype == torch.float32 else 2.0,
    "ndim": lambda x: deep(x).ndim,
    "dim": lambda x: deep(x).dim(),
    "keys": lambda x: sum(int(key) for key, _ in named(x).items()),
}


class Asking(Recurrent):
    question = "len"

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = memory.update(self.i(x))
        return self.o(y * QUESTIONS[self.question](y))


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_code_asks_of_a_result_is_rechecked(question: str) -> None:
    base, module = pair(type("Asking", (Asking,), {"question": question}))
    first, other = (torch.randn(2, length, 4).double() for length in (5, 2))
    assert torch.equal(module(first, Memory()), base(first, Memory()))
    assert torch.equal(module(first, Memory()), base(first, Memory()))
    with pytest.raises(peftc.PeftcError, match="P408") as error:
        module(other, Memory())
    assert "tensor(" not in str(error.value)


SEEN = {"tokens": 0}


def count(x: Tensor) -> Tensor:
    SEEN["tokens"] += len(range(x.shape[1]))
    return x


class Counting(Recurrent):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = count(memory.update(self.i(x)))
        return self.o(y * SEEN["tokens"])


def test_a_function_that_writes_what_others_read_is_refused() -> None:
    _, module = pair(Counting)
    with pytest.raises(peftc.PeftcError, match=r"P406|P407"):
        module(torch.randn(2, 5, 4).double(), Memory())


def total(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values), dim=1)


def run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return total(function(x[:, i]) for i in range(x.shape[1]))


def collect(x: Tensor, parts: list[Tensor]) -> Tensor:
    parts += [x[:, i : i + 1] for i in range(x.shape[1])]
    return parts[0]


class CallsModule(Recurrent):
    """Gives a function a module, whose call the graph has to hold."""

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        return run(self.o, memory.update(self.i(x)))


class CallsMethod(Recurrent):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        return run(self.o.forward, memory.update(self.i(x)))


class CallsClosure(Recurrent):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = memory.update(self.i(x))
        return self.o(run(lambda z: z + y[:, 0], y))


class Collects(Recurrent):
    """Gives a function a list, to which it appends."""

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        parts: list[Tensor] = []
        y = collect(memory.update(self.i(x)), parts)
        return self.o(torch.cat([y, *parts], dim=1))


@pytest.mark.parametrize("cls", [CallsModule, CallsMethod, CallsClosure, Collects])
def test_calls_that_a_graph_cannot_hold_as_a_whole(cls: type[nn.Module]) -> None:
    base, module = pair(cls)
    x = torch.randn(2, 3, 4).double()
    base(x, Memory())
    with pytest.raises(peftc.PeftcError, match=r"P40[67]"):
        module(x, Memory())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) * float(k.shape[1]) ** -0.5
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """An attention whose scale is a number of keys, which a cache has added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        y = self.norm(x)
        z = y if memory is None else memory.update(y)
        x = x + self.o(attend(self.q(y), self.k(z), self.v(z)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, memories: list[Memory] | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, None if memories is None else memories[i])
        return x


def test_a_state_of_the_functions_code_is_refused_by_what_refuses_the_code() -> None:
    """Joining rows changes the softmax, which the function computes."""
    x = torch.randn(2, 3, 4)
    for body, is_refused in (("kv = concat(prefix(len=2), kv)", True), ("h += adapter(x, r=2)", False)):
        model = Stack()
        peftc.compile(f"peft 1  edit e at layer[*].attn {{ {body} }}", model, seed=0, sample={"x": x})
        model(x)
        if is_refused:
            with pytest.raises(peftc.PeftcError, match=r"P406[\s\S]*in attend: `scores"):
                model(x, [Memory(), Memory()])
        else:
            base = model(x, [Memory(), Memory()])
            randomise(peftc.parameters(model))
            assert not torch.equal(model(x, [Memory(), Memory()]), base)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_linears_of_a_mixer_whose_code_reads_their_weights(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20, "state_size": 4}
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4} if name == "mamba2" else {}
    config = AutoConfig.for_model(name, **sizes, **heads)
    base, model = (AutoModel.from_config(config).double().eval() for _ in range(2))
    base.load_state_dict(model.state_dict())
    ids = torch.randint(20, (2, 6))
    mixers = [f"layers.{i}.mixer" for i in range(2)]
    spec = "\n".join(f'edit e{i} at "{m}.out_proj" {{ h += lora(x, r=2) }}' for i, m in enumerate(mixers))
    peftc.compile(f"peft 1\n{spec}", model, seed=0, sample={"input_ids": ids})
    randomise(peftc.parameters(model))
    for i, mixer in enumerate(mixers):
        a, b = (v for key, v in peftc.parameters(model).items() if key.startswith(f"e{i}/"))
        base.get_submodule(f"{mixer}.out_proj").register_forward_hook(
            lambda _, args, h, a=a, b=b: h + args[0] @ a.T @ b.T
        )

    def states(net: nn.Module) -> list[Tensor]:
        """A call without a cache, a prompt, one more token, and three more."""
        results, cache = [net(ids, use_cache=False)], None
        for part in (ids[:, :3], ids[:, 3:4], ids[:, 3:]):
            results.append(net(part, cache_params=cache, use_cache=True))
            cache = results[-1].cache_params
        return [result.last_hidden_state for result in results]

    for mode in (True, False):
        torch.testing.assert_close(states(model.train(mode)), states(base.train(mode)), rtol=1e-8, atol=1e-8)
    before = states(model)
    peftc.fold(model)
    torch.testing.assert_close(states(model), before, rtol=1e-8, atol=1e-8)
