"""Every Linear, embedding and convolution that a forward calls takes an edit by its name.

The reference adds B A x by forward hooks, to Linears and embeddings by the product with x, to
convolutions by a convolution with B A as kernel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo
from tests.laws.harness import TOLERANCE, Before, randomise

LEAVES = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def called_leaves(model: nn.Module, inputs: Mapping[str, Any]) -> Counter[str]:
    calls = Counter[str]()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, LEAVES):
                stack.callback(module.register_forward_hook(lambda *_, n=name: calls.update([n])).remove)
        model(**inputs)
    return calls


class TableReads(TorchFunctionMode):
    """The ids at which each table was read last, by the table's id."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            self.ids[id(args[1])] = args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked(model: nn.Module, changes: Mapping[str, tuple[Tensor, Tensor]]) -> Generator[None]:
    """Inside, the modules by these names compute h + B A x. `changes`: (A, B) by name."""
    with ExitStack() as stack:
        reads = stack.enter_context(TableReads())

        def change(name: str) -> Callable[..., Tensor]:
            a, b = changes[name]

            def hook(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
                if isinstance(module, nn.Embedding):
                    return (
                        result + F.one_hot(reads.ids[id(module.weight)], module.num_embeddings).to(b.dtype) @ a.T @ b.T
                    )
                x = next(iter((*args, *kwargs.values())))
                if isinstance(module, nn.Linear | Conv1D):
                    return result + x @ a.T @ b.T
                return result + module._conv_forward(x, (b @ a).reshape(module.weight.shape), None)

            return hook

        for name in changes:
            handle = model.get_submodule(name).register_forward_hook(change(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def factors(model: nn.Module, edits: Mapping[str, str]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) by module. `edits`: the edit of each module."""
    parameters = {key.partition("/")[0]: {} for key in peftc.parameters(model)}
    for key, parameter in peftc.parameters(model).items():
        parameters[key.partition("/")[0]][key.rpartition(".")[2]] = parameter.detach()
    return {module: (parameters[edit]["A"], parameters[edit]["B"]) for module, edit in edits.items()}


def edit_of_each(modules: Counter[str], form: str = "lora(x, r=1)") -> tuple[str, dict[str, str]]:
    """A spec with one edit for each module, and the names of the edits."""
    edits = {module: f"e{i}" for i, module in enumerate(modules)}
    lines = [f'edit {edit} at "{module}" {{ h += {form} }}' for module, edit in edits.items()]
    return "\n".join(["peft 1", *lines]), edits


@pytest.mark.parametrize("name", zoo.SPECIES)
def test_every_leaf_that_is_called_takes_lora_by_its_name(name: str) -> None:
    base, model = zoo.build(name, torch.float64), zoo.build(name, torch.float64)
    inputs = zoo.inputs(name, base)
    before, modules = Before.of(model), called_leaves(base, inputs)
    assert len(modules) > 10
    spec, edits = edit_of_each(modules)
    peftc.compile(spec, model, seed=0)
    assert torch.equal(first(model(**inputs)), first(base(**inputs)))
    randomise(peftc.parameters(model))
    edited = first(model(**inputs))
    with hooked(base, factors(model, edits)):
        expected = first(base(**inputs))
    assert not torch.allclose(edited, first(base(**inputs)))
    torch.testing.assert_close(edited, expected, rtol=TOLERANCE, atol=TOLERANCE)
    foldable = {edit.name for edit in peftc.plan(spec, base).edits if edit.foldable}
    assert foldable
    report = peftc.fold(model)
    assert {folded.edit for folded in report.folded} == foldable
    torch.testing.assert_close(first(model(**inputs)), expected, rtol=TOLERANCE, atol=TOLERANCE)
    other = zoo.build(name, torch.float64)
    peftc.remove(peftc.compile(spec, other, seed=0))
    before.assert_same(other)


def first(output: Any) -> Tensor:
    return output[0]


# Modules that no layer of transformers has ----


class OneBlock(nn.Module):
    """Runs one module, whatever it reads, and a head."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.module, self.head = module, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.module(x)
        return self.head(h.flatten(2).transpose(1, 2) if isinstance(self.module, nn.modules.conv._ConvNd) else h)


KERNELS = (
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 2, "stride": 2, "padding": "valid"},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "dilation": 2, "padding": "same"},
    {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
)


def modules() -> dict[str, tuple[nn.Module, int, Tensor]]:
    """Modules with their features, and what they read."""
    torch.manual_seed(0)
    images = {nn.Conv1d: (9,), nn.Conv2d: (8, 7), nn.Conv3d: (5, 6, 7)}
    cases: dict[str, tuple[nn.Module, int, Tensor]] = {
        f"{cls.__name__}-{i}": (cls(4, 5, **kernel), 5, torch.randn(2, 4, *size))
        for cls, size in images.items()
        for i, kernel in enumerate(KERNELS)
    }
    for rank in range(1, 6):
        cases[f"Linear of rank {rank}"] = (nn.Linear(4, 5), 5, torch.randn(*range(2, rank + 1), 4))
    cases["Embedding"] = (nn.Embedding(7, 5, padding_idx=1), 5, torch.tensor([[3, 1, 6], [0, 2, 2]]))
    return cases


@pytest.mark.parametrize("case", modules())
@pytest.mark.parametrize("form", ["lora(x, r=2)", "2 * linear(x)"])
def test_a_convolution_reads_patches_and_an_embedding_ids(case: str, form: str) -> None:
    module, width, x = modules()[case]
    x = x.double() if x.is_floating_point() else x
    model = OneBlock(module, width).double().requires_grad_(False)  # with a gradient, some kernels differ in bits
    base = model(x)
    peftc.compile(f'peft 1  edit e at "module" {{ h += {form} }}', model, seed=0, sample={"x": x})
    assert torch.equal(model(x), base)
    randomise(peftc.parameters(model))
    edited = model(x)
    values = {key.rpartition(".")[2]: parameter.detach() for key, parameter in peftc.parameters(model).items()}
    change = values["B"] @ values["A"] if "A" in values else 2 * values["weight"]
    constant = 2 * values["bias"] if "bias" in values else torch.zeros(width, dtype=torch.float64)
    other, _, _ = modules()[case]
    reference = OneBlock(other, width).double()
    reference.load_state_dict({name: value for name, value in model.state_dict().items() if ".peftc." not in name})
    with torch.no_grad():
        weight = reference.module.weight
        weight += (change.T + constant) if isinstance(module, nn.Embedding) else change.reshape(weight.shape)
        if not isinstance(module, nn.Embedding):
            own = reference.module.bias
            reference.module.bias = nn.Parameter(constant.clone() if own is None else own + constant)
    torch.testing.assert_close(edited, reference(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(edited, base)
    refused = module.bias is None and "bias" in values if not isinstance(module, nn.Embedding) else False
    report = peftc.fold(model)
    assert bool(report.folded) != refused
    torch.testing.assert_close(model(x), edited, rtol=TOLERANCE, atol=TOLERANCE)


def test_dropout_of_ids_drops_whole_tokens() -> None:
    """Of a one-hot vector, dropout drops the one entry that is not zero."""
    model = nn.Sequential(nn.Embedding(5, 4))
    peftc.compile(
        'peft 1  edit e at "0" { h += lora(x, r=2, dropout=0.5) }', model, sample={"input": torch.zeros(1, 9).long()}
    )
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.fill_(1.0)
    ids = torch.zeros(1, 400, dtype=torch.long)
    torch.manual_seed(0)
    change = model.train()(ids) - model[0].weight[0]
    values = change.detach().round(decimals=4).unique().tolist()
    assert values == [0.0, 4.0]


class SoftTable(nn.Embedding):
    """Takes ids, or probabilities of ids (Ovis 2)."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids @ self.weight if ids.is_floating_point() else super().forward(ids)


def test_a_table_that_a_call_multiplies_by_is_refused_by_the_plan() -> None:
    model, ids = nn.Sequential(SoftTable(5, 4), nn.Linear(4, 3)), torch.tensor([[1, 4, 2]])
    spec = 'peft 1  edit e at "0" { h += lora(x, r=2) }'
    assert peftc.plan(spec, model, sample={"input": ids}).edits
    with pytest.raises(peftc.PeftcError, match=r"P205[\s\S]*a call multiplies by the table"):
        peftc.plan(spec, model, samples=[{"input": ids}, {"input": torch.rand(1, 3, 5)}])


class DeltaBlock(nn.Module):
    """A layer whose code computes with the weights of two Linears that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.delta, self.scale = nn.Linear(6, 6), nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        y = F.gelu(y) * self.delta.weight.exp().sum(0) + self.scale.weight[0]
        return x + self.down(y)


def test_a_module_whose_weight_alone_is_read_takes_edits_of_the_weight() -> None:
    torch.manual_seed(0)
    model, base = (nn.Sequential(*(DeltaBlock() for _ in range(3))).double() for _ in range(2))
    base.load_state_dict(model.state_dict())
    sample = {"input": torch.randn(2, 5, 4, dtype=torch.float64)}
    for i in range(3):
        with pytest.raises(peftc.PeftcError) as refusal:
            peftc.plan(f'peft 1  edit e at "{i}.delta" {{ h += lora(x, r=2) }}', model, sample=sample)
        (diagnostic,) = refusal.value.diagnostics
        assert diagnostic.code == "P205"
        assert "in DeltaBlock.forward: `y = F.gelu(y) * self.delta.weight" in diagnostic.notes[-1]
        assert "w += lowrank" in str(diagnostic.help)
    peftc.compile('peft 1  edit e at "*.delta" | "*.scale" { w += lowrank(r=1) }', model, seed=0, sample=sample)
    randomise(peftc.parameters(model))
    values = {key: value.detach() for key, value in peftc.parameters(model).items()}
    with torch.no_grad():
        for i, layer in enumerate(base):
            for name in ("delta", "scale"):
                a, b = (
                    next(v for k, v in values.items() if f"{i}.{name}" in k and k.endswith(e)) for e in (".A", ".B")
                )
                layer.get_submodule(name).weight += b @ a
    expected = base(**sample)
    torch.testing.assert_close(model(**sample), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(peftc.fold(model).folded) == 1
    torch.testing.assert_close(model(**sample), expected, rtol=TOLERANCE, atol=TOLERANCE)


class TokenMixer(nn.Module):
    """A layer of MLP-Mixer whose convolutions have tokens as channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Conv1d(tokens, 7, 1), nn.GELU(), nn.Conv1d(7, tokens, 1))
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.norm1(x)) + x
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("tokens", [4, 6])
def test_a_convolution_over_tokens_reads_tokens_as_channels(tokens: int) -> None:
    """x and h are channels at a convolution, features of the stream at the sub-layer."""
    torch.manual_seed(0)
    model, base = (nn.Sequential(*(TokenMixer(tokens, 6) for _ in range(2))).double() for _ in range(2))
    base.load_state_dict(model.state_dict())
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    spec, edits = edit_of_each(called_leaves(base, {"input": x}))
    spec += "\nedit mixer at layer[*].mixer { h += linear(h, bias=false) }"
    peftc.compile(spec, model, seed=0, sample={"input": x})
    randomise(peftc.parameters(model))
    values = peftc.parameters(model)
    weights = {i: value for key, value in values.items() for i in (0, 1) if f"layer[{i}].mixer/" in key}
    assert len(weights) == 2
    with hooked(base, factors(model, edits)):
        for i, layer in enumerate(base):
            layer.mix.register_forward_hook(lambda _, __, h, w=weights[i]: h + h @ w.T)
        expected = base(x)
    torch.testing.assert_close(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)


class PositionBias(nn.Module):
    """An attention of which an MLP computes the bias, from coordinates in a buffer (Swin v2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.bias = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1, bias=False))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("coordinates", torch.randn(1, 5, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) / 8**0.5 + self.bias(self.coordinates).squeeze(-1)
        x = x + self.o(scores.softmax(-1) @ self.v(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_linears_that_read_a_buffer_take_edits() -> None:
    torch.manual_seed(0)
    model, base = (nn.Sequential(*(PositionBias() for _ in range(2))).double() for _ in range(2))
    base.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    spec, edits = edit_of_each(called_leaves(base, {"input": x}))
    assert len(edits) == 16
    peftc.compile(spec, model, seed=0, sample={"input": x})
    randomise(peftc.parameters(model))
    with hooked(base, factors(model, edits)):
        expected = base(x)
    torch.testing.assert_close(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(peftc.fold(model).folded) == 16
    torch.testing.assert_close(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("site", "version"), [("mixer", "1.4"), ("ffn", "1.2")])
def test_an_adapter_that_took_tokens_for_features_is_refused(site: str, version: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(TokenMixer(6, 6), TokenMixer(6, 6))

    sample = {"input": torch.randn(2, 6, 6)}
    spec = f"peft 1\nedit e at layer[*].{site} {{ h *= vector(init=1) }}"
    peftc.save(peftc.compile(spec, build(), seed=0, sample=sample), tmp_path)
    metadata = tmp_path / "adapter.json"
    description = json.loads(metadata.read_text())
    assert description["format_version"] == "1.5", "it has the text of `vector`"
    peftc.load(tmp_path, build(), sample=sample)
    metadata.write_text(json.dumps(description | {"format_version": "1.2"}))
    if version == "1.2":
        peftc.load(tmp_path, build(), sample=sample)
        return
    with pytest.raises(PeftcError, match="P567"):
        peftc.load(tmp_path, build(), sample=sample)


class Aliases(nn.Module):
    """Has two names for a Linear that it calls twice, and for a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second, self.parts, self.again = self.first, nn.ModuleDict({"inner": self.first}), self.block

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x).relu()))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("second", "first"),
        ("parts.inner", "first"),
        ("*.inner", "first"),
        ("again.0", "block.0"),
        ("again.*", "block.*"),
        ("aga?n.0", "block.0"),
    ],
)
def test_each_name_of_a_module_names_it(alias: str, name: str) -> None:
    x = torch.randn(2, 3, 4)
    results: list[tuple[list[str], Tensor]] = []
    for selector in (name, alias):
        torch.manual_seed(0)
        model = Aliases()
        peftc.compile(f'peft 1  edit e at "{selector}" {{ h += linear(h) }}', model, seed=0, sample={"x": x})
        randomise(peftc.parameters(model))
        results.append(([*peftc.parameters(model)], model(x).detach()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_all_names_of_a_module_are_one_edit_of_it() -> None:
    torch.manual_seed(0)
    model, base = Aliases().double(), Aliases().double()
    base.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    spec = 'peft 1  edit e at "first" | "second" | "parts.inner" { h += lora(x, r=2) }'
    peftc.compile(spec, model, seed=0, sample={"x": x})
    assert len(peftc.parameters(model)) == 2
    randomise(peftc.parameters(model))
    with hooked(base, factors(model, {"first": "e"})):
        expected = base(x)
    torch.testing.assert_close(model(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(peftc.PeftcError, match="P201"):
        peftc.plan('peft 1  edit e at "again.7" { h += linear(h) }', Aliases(), sample={"x": x.float()})


class TwiceAndNever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.other, self.grouped = nn.Linear(4, 4), nn.Linear(6, 4), nn.Conv1d(4, 4, 3, groups=2)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        if x is None:
            return self.other(y)
        h = self.twice(torch.relu(self.twice(x)))
        return h + self.grouped(h.transpose(1, 2)).mean()


def test_an_edit_acts_in_each_call_of_a_module() -> None:
    torch.manual_seed(0)
    model, x = TwiceAndNever().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    peftc.compile('peft 1  edit e at "twice" { h += lora(x, r=2) }', model, seed=0, sample={"x": x})
    randomise(peftc.parameters(model))
    edited = model(x)
    assert peftc.verify(model, {"x": x}).ok
    peftc.fold(model)
    assert type(model.twice) is nn.Linear
    torch.testing.assert_close(model(x), edited, rtol=TOLERANCE, atol=TOLERANCE)


def test_several_samples_reach_what_one_does_not() -> None:
    model, spec = TwiceAndNever(), 'peft 1  edit e at "twice" | "other" { h += lora(x, r=2) }'
    samples = [{"x": torch.randn(2, 5, 4)}, {"y": torch.randn(3, 6)}]
    with pytest.raises(peftc.PeftcError) as refusal:
        peftc.plan(spec, model, sample=samples[0])
    assert "no forward of the sample calls `other`" in str(refusal.value)
    assert "samples=[" in str(refusal.value)
    assert peftc.sites(model, samples=samples) == peftc.sites(model, sample=samples[0], samples=samples[1:])
    assert peftc.plan(spec, model, samples=samples).edits
    assert peftc.design(spec, model, samples=samples)
    peftc.compile(spec, model, seed=0, samples=samples)
    assert len(peftc.parameters(model)) == 4
    before = [model(**sample).detach() for sample in samples]
    randomise(peftc.parameters(model))
    after = [model(**sample) for sample in samples]
    assert not any(map(torch.equal, before, after))
    peftc.fold(model, samples=samples)
    for sample, result in zip(samples, after, strict=True):
        torch.testing.assert_close(model(**sample), result)


def test_samples_that_are_none_are_refused() -> None:
    for samples in ("x", {"x": 1}, [3], 7):
        with pytest.raises(peftc.PeftcError, match="P545"):
            peftc.sites(TwiceAndNever(), samples=samples)  # type: ignore[arg-type]


def test_a_convolution_in_groups_says_why_it_has_no_x() -> None:
    with pytest.raises(peftc.PeftcError, match="other channels for each of its 2 groups"):
        peftc.plan(
            'peft 1  edit e at "grouped" { h += lora(x, r=1) }', TwiceAndNever(), sample={"x": torch.ones(2, 5, 4)}
        )
