"""Equality with PEFT: same weights, same outputs, same gradients, in float64.

LoHa, LoKr and OFT of PEFT 0.21 do not support the Conv1D of GPT-2: those tests leave it out.
"""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from tests import zoo
from tests.laws.harness import Case, Inputs, close, loss
from tests.laws.recipe import Recipe
from tests.reference import methods, peers
from tests.reference.reference import Reference

SITES = "layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down"
PLAIN = "layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | " + SITES


def sites_of(name: str) -> str:
    """PEFT edits a fused Linear as a whole: q, k and v of GPT-2 are tested through the
    glob below.
    """
    return SITES if name == "gpt2" else PLAIN


def roles_of(name: str) -> str:
    return "o up down" if name == "gpt2" else "q k v o up down"


def assert_same(case: Case, model: nn.Module, parameters: peers.Parameters) -> None:
    assert set(parameters) == set(case.parameters)
    for inputs in case.batches:
        _same_outputs(case.model, model, inputs)
    for key, parameter in parameters.items():
        want, got = parameter.grad, case.parameters[key].grad
        assert want is not None
        assert got is not None
        close(got, want.reshape(got.shape), key)


def _same_outputs(ours: nn.Module, theirs: nn.Module, inputs: Inputs) -> None:
    mine, total = loss(ours, inputs)
    total.backward()
    other, total = loss(theirs, inputs)
    total.backward()
    close(mine, other, "outputs")


def _never(ref: Reference, weights: methods.Weights) -> None:
    raise AssertionError("PEFT is the reference here")


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_lora_and_dora(name: str, dora: bool) -> None:
    equation = "w = magnitude(w + lowrank(r=4, alpha=8))" if dora else "h += lora(x, r=4, alpha=8)"
    case = Case(Recipe("peft", f"edit e at {sites_of(name)} {{ {equation} }}", _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    model, parameters = peers.lora(ref, peers.targets(ref, roles_of(name)), case.parameters, "e", 8.0, dora)
    assert_same(case, model, parameters)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_fused_linear_by_its_module_name(dora: bool) -> None:
    """`at "transformer.h.*.attn.c_attn"`: the whole Conv1D, as in PEFT."""
    equation = "w = magnitude(w + lowrank(r=4, alpha=8))" if dora else "h += lora(x, r=4, alpha=8)"
    glob = "transformer.h.*.attn.c_attn"
    case = Case(Recipe("peft", f'edit e at "{glob}" {{ {equation} }}', _never, True), "gpt2").at_random()
    ref = Reference("gpt2", zoo.build("gpt2", torch.float64))
    paths = sorted({key.split("/")[1] for key in case.parameters})
    assert len(paths) == len(ref.layers)
    sites = [(path, methods.Rows(f"transformer.h.{i}.attn.c_attn")) for i, path in enumerate(paths)]
    model, parameters = peers.lora(ref, sites, case.parameters, "e", 8.0, dora)
    assert_same(case, model, parameters)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ia3(name: str) -> None:
    spec = "edit ff at layer[*].ffn.hidden { h *= vector(init=1) }"
    if name != "gpt2":
        spec += "\nedit kv at layer[*].attn.k | layer[*].attn.v { h *= vector(init=1) }"
    case = Case(Recipe("peft", spec, _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    outputs = [(f"kv/{path}/vector.scale", rows) for path, rows in peers.targets(ref, "k v")]
    inputs = [(f"ff/{ffn.path}.hidden/vector.scale", ffn.down) for ffn in ref.ffns]
    model, parameters = peers.ia3(ref, outputs, inputs, case.parameters)
    assert_same(case, model, parameters)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_rslora(name: str) -> None:
    spec = f"edit e at {sites_of(name)} {{ h += lora(x, r=4, alpha=8, rslora=true) }}"
    case = Case(Recipe("peft", spec, _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    model, parameters = peers.lora(
        ref, peers.targets(ref, roles_of(name)), case.parameters, "e", 8.0, False, rslora=True
    )
    assert_same(case, model, parameters)


LINEARS = tuple(name for name in zoo.ARCHITECTURES if name != "gpt2")


def assert_same_at_linears(name: str, equation: str, form: str, config: peft.PeftConfig) -> None:
    case = Case(Recipe("peft", f"edit e at {sites_of(name)} {{ {equation} }}", _never, True), name).at_random()
    ref = Reference(name, zoo.build(name, torch.float64))
    model, parameters = peers.at_linears(ref, config, peers.targets(ref, roles_of(name)), case.parameters, form)
    for key in ("A", "B") if form == "vera" else ():  # one of each for all Linears
        parameter = getattr(model.get_submodule(ref.ffns[0].up.module), f"vera_{key}")["default"]
        parameter.copy_(case.fixed[f"e/e.vera/vera.{key}"])
    assert_same(case, model, parameters)


@pytest.mark.parametrize("name", LINEARS)
def test_loha(name: str) -> None:
    assert_same_at_linears(name, "w += hadamard(r=3, alpha=6)", "hadamard", peft.LoHaConfig(r=3, alpha=6))


@pytest.mark.parametrize("r", [2, 9], ids=["low", "whole"])
@pytest.mark.parametrize("name", LINEARS)
def test_lokr(name: str, r: int) -> None:
    """From half of the larger side of B on, PEFT's B is whole, but its scale stays alpha / r: the
    spec then leaves r out.
    """
    arguments = f"r={r}, alpha={3 * r}" if r == 2 else "alpha=3"
    assert_same_at_linears(name, f"h += kron(x, {arguments})", "kron", peft.LoKrConfig(r=r, alpha=3 * r))


@pytest.mark.parametrize("terms", [None, 5], ids=["exact", "neumann"])
@pytest.mark.parametrize("name", LINEARS)
def test_oft(name: str, terms: int | None) -> None:
    """PEFT's exact rotation is (I − Q)(I + Q)⁻¹, but its default, the series, approximates (I +
    Q)(I − Q)⁻¹, the transpose: the same weights rotate in the opposite direction.
    """
    neumann = "" if terms is None else f", neumann={terms}"
    exact = {"use_cayley_neumann": False} if terms is None else {"num_cayley_neumann_terms": terms}
    config = peft.OFTConfig(oft_block_size=8, **exact)
    assert_same_at_linears(name, f"w = orthogonal(w, block=8{neumann})", "orthogonal", config)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_vera(name: str) -> None:
    assert_same_at_linears(name, "h += vera(x, r=5)", "vera", peft.VeraConfig(r=5))


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_adalora_at_fixed_ranks(name: str) -> None:
    """PEFT's scale is alpha / (rank + 1e-5), not alpha / rank."""
    config = peft.AdaLoraConfig(init_r=3, lora_alpha=6, total_step=10, tinit=0, tfinal=0)
    assert_same_at_linears(name, "h += svd(x, r=3, alpha=6)", "svd", config)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_layer_norm_tuning(name: str) -> None:
    """PEFT trains copies of the norms, with a warning for each; peftc trains them in place."""
    has_bias = name not in ("t5", "llama", "qwen3")
    spec = f"train n = [{'w, b' if has_bias else 'w'}] at layer[*].norm"
    case = Case(Recipe("peft", spec, _never, True), name).at_random()
    model, parameters = peers.norms(Reference(name, zoo.build(name, torch.float64)), case.parameters)
    assert_same(case, model, parameters)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for an old name
@pytest.mark.parametrize(("name", "width"), [("gpt2", None), ("gpt2", 5), ("llama", None)])
def test_prefix_tuning_of_decoders(name: str, width: int | None) -> None:
    """PEFT passes the rows as a cache of earlier tokens, which moves the input `len` positions
    back: the test sets `position_ids` accordingly.
    """
    rows, rest = 3, "" if width is None else f", reparam=mlp({width}), keep=true"
    spec = f"edit e at layer[*].attn {{ kv = concat(prefix(len={rows}{rest}), kv) }}"
    case = Case(Recipe("peft", spec, _never, False), name).at_random()
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=rows,
        prefix_projection=width is not None,
        encoder_hidden_size=width,
    )
    theirs = peft.get_peft_model(zoo.build(name, torch.float64), config).eval()
    encoder = theirs.prompt_encoder["default"].double()
    own = case.parameters
    with torch.no_grad():
        if width is None:
            pairs = [own[key] for key in own]  # the key and the value of each layer, in order
            assert [key.rpartition(".")[2] for key in own] == ["key", "value"] * (len(own) // 2)
            encoder.embedding.weight.copy_(torch.cat([rows_of(p) for p in pairs], 1))
        else:
            by_name = {key.rpartition(".")[2]: p for key, p in own.items()}
            encoder.embedding.weight.copy_(by_name["embedding"])
            for at, part in ((0, "down"), (2, "up")):
                encoder.transform[at].weight.copy_(by_name[part])
                encoder.transform[at].bias.copy_(by_name[f"{part}_bias"])
    for inputs in case.batches:
        later = rows + torch.arange(inputs["input_ids"].shape[1])[None]
        mine, total = loss(case.model, {**inputs, "position_ids": later})
        total.backward()
        other, total = loss(theirs, inputs)
        total.backward()
        close(mine, other, "outputs")
    grad = encoder.embedding.weight.grad
    assert grad is not None
    if width is None:
        close(torch.cat([rows_of(p.grad) for p in own.values()], 1), grad, "rows")
    else:
        close(by_name["embedding"].grad, grad, "embedding")
        close(by_name["up"].grad, encoder.transform[2].weight.grad, "up")


def rows_of(pair: torch.Tensor | None) -> torch.Tensor:
    """(heads, rows, d_head) as (rows, heads · d_head)."""
    assert pair is not None
    return pair.permute(1, 0, 2).flatten(1)
