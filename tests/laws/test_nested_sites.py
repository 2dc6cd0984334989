"""Edits of one value at sites inside of each other: whatever modules of a model their code is in,
each reads what the others have made of the value.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.exchange.peft_format.rows.attention.adaption import FORM
from tests import zoo
from tests.laws.harness import close, seed_of
from tests.layers import Attention, Layers
from tests.refusals import refused

NAMES = ("bart", "bert", "t5", "t5-gated", "gpt2", "llama", "opt", "vit")
SCALE = "edit a at layer[*].ffn.hidden { h *= vector(init=1) }"
PAIRS = {  # edits of what `down` reads, and the same as one edit
    "read around": (
        f"{SCALE}\nedit b at layer[*].ffn {{ h += lora(z, r=2) }}",
        "z *= vector(init=1)\nh += lora(z, r=2)",
    ),
    "read around, first": (
        f"edit b at layer[*].ffn {{ h += lora(z, r=2) }}\n{SCALE}",
        "z *= vector(init=1)\nh += lora(z, r=2)",
    ),
    "read inside": (
        f"{SCALE}\nedit b at layer[*].ffn.down {{ h += lora(x, r=2) }}",
        "z *= vector(init=1)\nh += lora(z, r=2)",
    ),
    "written around": (
        f"edit b at layer[*].ffn {{ z += 1\nh += lora(z, r=2) }}\n{SCALE}",
        "z *= vector(init=1)\nz += 1\nh += lora(z, r=2)",
    ),
}


@torch.no_grad()
def output(name: str, spec: str, tasks: list[str] | None = None) -> Tensor:
    """That of the model, with values that depend on the shapes of parameters and on the layer."""
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{spec}", model, seed=0, tasks=tasks)
    if tasks:
        peftc.set_task(model, tasks[0])
    for key, parameter in peftc.parameters(model).items():
        site = key.split("/")[1].partition(".ffn")[0]
        generator = torch.Generator().manual_seed(seed_of(f"{site} {key.rpartition('.')[2]}"))
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model(**zoo.inputs(name, model))[0]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_two_edits_are_the_one_that_says_both(name: str, pair: str) -> None:
    several, equations = PAIRS[pair]
    close(output(name, several), output(name, f"edit e at layer[*].ffn {{ {equations} }}"), pair)


@pytest.mark.parametrize("name", ["bart", "opt"])
def test_an_edit_per_task_is_in_the_code_around_the_layer(name: str) -> None:
    """OPT has no batch in its ffn, which the choice of a task needs."""
    several = PAIRS["read inside"][0]
    close(output(name, several.replace("down {", "down per task {"), ["t"]), output(name, several))


class EinsumLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(8)
        self.up, self.down = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + torch.einsum("bnm,md->bnd", torch.relu(x @ self.up), self.down)

    def forward_with_edits(self, x: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The equations of both edits, by hand."""
        x = x + self.attn(x)
        hidden = torch.relu(x @ self.up) * scale
        return x + hidden @ self.down + hidden @ a.T @ b.T


def test_an_einsum_reads_what_an_edit_has_made_of_its_operand() -> None:
    """Where the features are is a matter of the model's code, before any edit."""
    layers, x = (EinsumLayer().double(), EinsumLayer().double()), torch.randn(2, 5, 8).double()
    model, expected = Layers(*copy.deepcopy(layers)), x
    edit = "edit b at layer[*].ffn.down { h += lora(x, r=2) }"
    peftc.compile(f"peft 2\n{SCALE}\n{edit}", model, seed=0, sample={"x": x})
    parameters = {key: p.detach().normal_() for key, p in peftc.parameters(model).items()}
    for i, layer in enumerate(layers):
        expected = layer.forward_with_edits(
            expected, *(p for key, p in sorted(parameters.items()) if f"layer[{i}]" in key)
        )
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("order", ["before", "after", "one edit"])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_what_attention_returns_reads_the_query_of_every_edit(name: str, order: str) -> None:
    """`adaption_prompt` has the queries of the attention as its input."""
    query, result = "q = 3 * q", "h += adaption_prompt(q, weight(k, v), len=3)"
    orders = {"before": (result, query), "after": (query, result), "one edit": (f"{result}\n{query}",)}
    edits = (f"edit e{n} at layer[*].attn.heads {{ {body} }}" for n, body in enumerate(orders[order]))
    model = zoo.build(name, torch.float64).eval()
    peftc.compile("\n".join(["peft 2", FORM, *edits]), model, seed=0)
    for parameter in peftc.parameters(model).values():
        parameter.data += 0.5
    assert not peftc.verify(model).findings


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_verification_applies_edits_of_inner_sites_first(name: str) -> None:
    spec = "peft 2\nedit b at layer[*].ffn { z += 1 }\nedit a at layer[*].ffn.hidden { h *= vector(init=3) }"
    assert not peftc.verify(peftc.compile(spec, zoo.build(name, torch.float64).eval(), seed=0)).findings


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize(
    ("site", "changed", "change"),
    [
        ("layer[*].ffn", "layer[*].ffn.norm", "h *= vector(init=1)"),
        ("layer[*].ffn", "layer[*].ffn.norm", "w += 0.1 * w"),
        ("head", "head", "w += 0.1 * w"),
        ("head", "head", "w += 0.1 * w\nh += 1"),
    ],
)
def test_no_other_edit_changes_a_module_that_is_called(site: str, changed: str, change: str, name: str) -> None:
    """Where a norm is behind its sub-layer, the call would have the edit, and elsewhere not."""
    function = "head" if site == "head" else "norm"
    spec = f"peft 2\nedit a at {changed} {{ {change} }}\nedit b at {site} {{ h += 0.1 * {function}(x) }}"
    model = zoo.build(name, torch.float64).eval()
    error = refused("P324", lambda: peftc.compile(spec, model), model)
    assert error.message.startswith(f"`b` calls `{function}`")
    assert error.message.endswith(f"`a` changes its `{change[0]}`")


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_an_edit_beside_a_call_of_the_head_does_not_fold(name: str) -> None:
    spec = "peft 2\nedit a at head { h += lora(x, r=2) }\nedit b at head { h += 0.1 * head(x) }"
    model = peftc.compile(spec, zoo.build(name, torch.float64).eval(), seed=0)
    for parameter in peftc.parameters(model).values():
        parameter.data += 0.1
    assert not peftc.verify(model).findings
    before = model(**zoo.inputs(name, model)).logits
    assert not peftc.fold(model).folded
    close(model(**zoo.inputs(name, model)).logits, before)


SITES = {  # and their states; the first is written
    **{f"attn.{linear}": ("h", "x") for linear in "qkvo"},
    "attn": ("h", "x", "res", "q", "k", "v"),
    "attn.norm": ("h", "x"),
    "ffn": ("h", "x", "res", "z"),
    "ffn.up": ("h", "x"),
    "ffn.down": ("h", "x"),
    "ffn.hidden": ("h", "x"),
    "ffn.norm": ("h", "x"),
    "ffn.add": ("h",),
}


def equations(source: random.Random, states: tuple[str, ...]) -> Iterator[str]:
    for _ in range(source.choice((1, 1, 2))):
        written = source.choice([state for state in states if state not in ("x", "res")])
        form = source.choice(("lora(STATE, r=2)", "lora(STATE, r=2)", "adapter(STATE, r=2, act=tanh)", "0.3 * STATE"))
        read = written if form.endswith("* STATE") else source.choice(states)
        yield f"{written} *= vector(init=1)" if source.random() < 0.3 else f"{written} += {form}".replace("STATE", read)


def random_spec(seed: int) -> str:
    source = random.Random(seed)
    statements: list[str] = []
    for number in range(source.choice((2, 3))):
        site = source.choice([*SITES])
        body = "\n".join(equations(source, SITES[site]))
        statements.append(f"edit e{number} at layer[*].{site} {{ {body} }}")
    return "peft 2\n" + "\n".join(statements)


@pytest.mark.parametrize("seed", range(16))
def test_random_edits_compute_their_equations(seed: int) -> None:
    name, spec = NAMES[seed % len(NAMES)], random_spec(seed)
    model = zoo.build(name, torch.float64).eval()
    try:
        peftc.compile(spec, model, seed=0)
    except peftc.PeftcError as error:
        if {one.code for one in error.diagnostics} <= {"P201", "P310"}:  # no such site, other shapes
            pytest.skip("the model has no such site")
        raise
    generator = torch.Generator().manual_seed(seed)
    for parameter in peftc.parameters(model).values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    assert not peftc.verify(model).findings, spec
