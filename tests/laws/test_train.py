"""`train`: parameters of the base that learn with the base's own gradients, and that `remove`
restores.
"""

from __future__ import annotations

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import Before, close, loss

SPECS = {
    "bitfit": "train e = [b] at layer[*].**",
    "layernorm": "train e = [w, b] at layer[*].norm",
    "cross": "train e = [w, b] at layer[*].attn.cross.**",
}
NORMS = ("norm", "ln_1", "ln_2", "Norm")


def belongs(spec: str, key: str, layer: str) -> bool:
    """Whether a base parameter should be trainable, by its name."""
    inside, last = f".{layer}." in f".{key}", key.rsplit(".", 1)[-1]
    if spec == "bitfit":
        return inside and last == "bias" and "relative_attention_bias" not in key
    if spec == "layernorm":
        return inside and any(n in key for n in NORMS)
    cross = "encoder_attn" in key or (
        key.startswith("decoder.block.") and ".layer.1." in key
    )  # its norm is a child of it
    return inside and cross


LAYER = {"bart": "layers", "t5": "block", "gpt2": "h", "llama": "layers", "qwen3": "layers", "opt": "layers"}
CASES = [
    (spec, name)
    for name in zoo.ARCHITECTURES
    for spec in SPECS
    if not (spec == "cross" and name not in ("bart", "t5"))
    and not (spec == "bitfit" and name in ("t5", "llama", "qwen3"))
]


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_exactly_these_are_trained_with_the_bases_gradients(spec: str, name: str) -> None:
    model, base = (zoo.build(name, torch.float64) for _ in range(2))
    peftc.compile("peft 1\n" + SPECS[spec], model, seed=0)
    want = {k for k, _ in base.named_parameters() if belongs(spec, k, LAYER.get(name, "layer"))}
    assert want
    if name == "qwen3" and spec == "layernorm":  # norms of queries and keys belong to `attn.q` and `attn.k`
        want = {k for k in want if ".q_norm" not in k and ".k_norm" not in k} | {
            k for k, p in model.named_parameters() if p.requires_grad and (".q_norm" in k or ".k_norm" in k)
        }
    assert {k for k, p in model.named_parameters() if p.requires_grad} == want
    assert {id(p) for p in peftc.parameters(model).values()} == {id(model.get_parameter(k)) for k in want}
    inputs = zoo.inputs(name, model)
    for m in (model, base):
        loss(m, inputs)[1].backward()
    for key in want:
        close(model.get_parameter(key).grad, base.get_parameter(key).grad, key)  # type: ignore[arg-type]


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_remove_restores_trained_parameters(spec: str, name: str) -> None:
    model = zoo.build(name)
    before = Before.of(model)
    peftc.compile("peft 1\n" + SPECS[spec], model, seed=0)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    loss_of = model(**zoo.inputs(name, model))[0].pow(2).mean()
    loss_of.backward()
    optimiser.step()
    assert not all(torch.equal(model.state_dict()[k], v) for k, v in before.state.items())
    peftc.remove(model)
    before.assert_same(model)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_disabled_is_the_base_while_trained_parameters_wait(name: str) -> None:
    model = zoo.build(name)
    inputs = zoo.inputs(name, model)
    with torch.no_grad():
        want = model(**inputs)[0]
        peftc.compile("peft 1\n" + SPECS["layernorm"], model, seed=0)
        for parameter in peftc.parameters(model).values():
            parameter.add_(0.5)
        output = model(**inputs)[0]
        assert not torch.equal(output, want)
        with peftc.disabled(model):
            assert torch.equal(model(**inputs)[0], want)
        assert torch.equal(model(**inputs)[0], output)


@pytest.mark.parametrize("act", [peftc.remove, peftc.parameters, peftc.graphs], ids=lambda f: f.__name__)
def test_functions_of_compiled_models_refuse_others(act) -> None:
    with pytest.raises(peftc.PeftcError) as excinfo:
        act(zoo.build("bert"))
    assert excinfo.value.diagnostics[0].code == "P410"
