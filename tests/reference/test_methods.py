"""The references against each other and against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.reference import methods
from tests.reference.reference import Reference

TINY = 1e-12
D, HEADS = 32, 4


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def fresh(name: str) -> Reference:
    return Reference(name, zoo.build(name, torch.float64))


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def given_for(ref: Reference, padding: zoo.Padding | None = None) -> dict[str, Tensor]:
    return zoo.inputs(ref.name, ref.model, padding=padding)


def prefix_weights(ref: Reference, length: int = 3, zero: bool = False) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    config = ref.model.config
    heads = getattr(config, "num_key_value_heads", None) or HEADS
    d_head = getattr(config, "head_dim", None) or D // HEADS
    for i, site in enumerate(ref.attentions):
        for j, key in enumerate(("key", "value")):
            tensors[f"p/{site.path}/prefix.{key}"] = draw(2 * i + j, heads, length, d_head) * (0 if zero else 3)
    return tensors


@pytest.mark.parametrize("name", zoo.ALL)
def test_the_attention_function_without_edits_is_the_models_own(name: str) -> None:
    ref = fresh(name)
    inputs = given_for(ref)
    want = logits(ref.model, inputs)
    for site in ref.attentions:
        ref.inside(site)
    assert (logits(ref.model, inputs) - want).abs().max() < 1e-12


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", zoo.ALL)
def test_concatenated_prefix_is_the_gated_form(name: str, padding: zoo.Padding | None) -> None:
    """Eq. 5 and Eq. 7 of He et al. are one function."""
    one, two, base = fresh(name), fresh(name), fresh(name)
    weights = prefix_weights(one)
    methods.prefix("p")(one, weights)
    methods.prefix("p", form="gated")(two, weights)
    inputs = given_for(one, padding)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY
    assert (logits(one.model, inputs) - logits(base.model, inputs)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "llama"])
def test_prefix_with_a_cache_is_prefix_without(name: str) -> None:
    ref = fresh(name)
    methods.prefix("p")(ref, prefix_weights(ref))
    inputs = given_for(ref, "left")
    inputs.pop("decoder_input_ids", None)
    outputs = [
        ref.model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=c, num_beams=b)
        for b in (1, 3)
        for c in (True, False)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    base = fresh(name).model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert not torch.equal(outputs[0], base)


def test_one_key_with_no_score_is_a_uniform_share() -> None:
    """A zero prefix of length l takes Σ exp(0) = l of the mass and adds nothing: h = (1 - λ)
    Attn.
    """
    ref, other = fresh("bert"), fresh("bert")
    methods.prefix("p")(ref, prefix_weights(ref, zero=True))
    lengths = 3

    for site in other.attentions:
        core = other.model.get_submodule(site.core)

        def shrink(module: nn.Module, args: tuple, kwargs: dict, out: tuple, core: nn.Module = core) -> tuple:  # type: ignore[type-arg]
            x = args[0]
            q, k = (m(x).view(2, 7, HEADS, -1).transpose(1, 2) for m in (core.query, core.key))
            mass = (q @ k.transpose(-1, -2) * core.scaling).exp().sum(-1)
            share = mass / (mass + lengths)
            h = out[0].view(2, 7, HEADS, -1) * share.transpose(1, 2)[..., None]
            return (h.reshape(2, 7, D), *out[1:])

        core.register_forward_hook(shrink, with_kwargs=True)
    inputs = given_for(ref)
    assert (logits(ref.model, inputs) - logits(other.model, inputs)).abs().max() < TINY


def linear_weights(ref: Reference, roles: str, r: int = 4) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, (path, rows) in enumerate(methods.linears(ref, roles)):
        d_out, d_in = ref.w(rows)[0].shape
        tensors[f"e/{path}/lora.A"] = tensors[f"e/{path}/lowrank.A"] = draw(2 * i, r, d_in)
        tensors[f"e/{path}/lora.B"] = tensors[f"e/{path}/lowrank.B"] = draw(2 * i + 1, d_out, r)
        tensors[f"e/{path}/vector.scale"] = 1 + draw(i, d_out)
    return tensors


@pytest.mark.parametrize("name", zoo.ALL)
def test_lora_is_a_changed_weight(name: str) -> None:
    """As an edit of h, as an edit of w, and written into the stored weight: the same function."""
    roles = "q k v o up gate down"
    one, two, three = fresh(name), fresh(name), fresh(name)
    weights = linear_weights(one, roles)
    methods.lora("e", roles, alpha=8.0)(one, weights)
    methods.lowrank("e", roles, alpha=8.0)(two, weights)
    with torch.no_grad():
        for path, rows in methods.linears(three, roles):
            change = 2.0 * weights[f"e/{path}/lora.B"] @ weights[f"e/{path}/lora.A"]
            stored = three.model.get_submodule(rows.module).weight
            if "Conv1D" in type(three.model.get_submodule(rows.module)).__name__:
                stored[:, rows.start : rows.stop] += change.T
            else:
                stored[rows.start : rows.stop] += change
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY
    assert (logits(one.model, inputs) - logits(three.model, inputs)).abs().max() < TINY


@pytest.mark.parametrize("name", zoo.ALL)
def test_dora_with_the_weights_own_lengths_is_lora(name: str) -> None:
    one, two = fresh(name), fresh(name)
    weights = linear_weights(one, "q v")
    for path, rows in methods.linears(one, "q v"):
        full = one.w(rows)[0] + 2.0 * weights[f"e/{path}/lora.B"] @ weights[f"e/{path}/lora.A"]
        weights[f"e/{path}/magnitude.m"] = full.norm(dim=1)
    methods.lora("e", "q v", alpha=8.0)(one, weights)
    methods.dora("e", "q v", alpha=8.0)(two, weights)
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY


@pytest.mark.parametrize("name", zoo.ALL)
def test_scaling_a_projection_is_scaling_its_rows_and_bias(name: str) -> None:
    one, two = fresh(name), fresh(name)
    weights = linear_weights(one, "k v")
    methods.scaled("e", "k v")(one, weights)
    with torch.no_grad():
        for path, rows in methods.linears(two, "k v"):
            module, value = two.model.get_submodule(rows.module), weights[f"e/{path}/vector.scale"]
            if "Conv1D" in type(module).__name__:
                module.weight[:, rows.start : rows.stop] *= value
            else:
                module.weight[rows.start : rows.stop] *= value[:, None]
            if module.bias is not None:
                module.bias[rows.start : rows.stop] *= value
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY


def adapter_weights(ref: Reference, which: str, r: int = 5) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, site in enumerate(methods.sublayers(ref, which)):
        shapes = {"down": (r, D), "down_bias": (r,), "up": (D, r), "up_bias": (D,)}
        for j, (key, shape) in enumerate(shapes.items()):
            tensors[f"e/{site.path}/adapter.{key}"] = draw(4 * i + j, *shape)
    return tensors


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "opt", "mbart"])
def test_parallel_adapter_with_the_ffns_activation_is_a_wider_ffn(name: str) -> None:
    """h + s (act(x D + d) U + u) = act([W_up; D] x + …) [W_down, s U] + …: methods.md, folding by
    widening.
    """
    one, two = fresh(name), fresh(name)
    weights = adapter_weights(one, "ffn")
    act = {"bart": "gelu", "mbart": "gelu", "t5": "relu", "gpt2": "gelu_tanh", "opt": "relu"}[name]
    methods.parallel("e", "ffn", act=act, s=2.0)(one, weights)
    for ffn in two.ffns:
        w = {k: weights[f"e/{ffn.path}/adapter.{k}"] for k in ("down", "down_bias", "up", "up_bias")}
        up, down = (two.model.get_submodule(r.module) for r in (ffn.up, ffn.down))
        conv = "Conv1D" in type(up).__name__
        zeros = torch.zeros(up.weight.shape[1 if conv else 0], dtype=torch.float64)
        wide = torch.cat([up.weight.T if conv else up.weight, w["down"]])
        bias = torch.cat([zeros if up.bias is None else up.bias, w["down_bias"]])
        deep = torch.cat([down.weight.T if conv else down.weight, 2.0 * w["up"]], 1)
        last = 2.0 * w["up_bias"] + (0 if down.bias is None else down.bias)
        for rows, weight, b in ((ffn.up, wide, bias), (ffn.down, deep, last)):
            plain = nn.Linear(*weight.T.shape, dtype=torch.float64)
            plain.weight, plain.bias = nn.Parameter(weight), nn.Parameter(b)
            two.model.set_submodule(rows.module, plain)
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY


@pytest.mark.parametrize("name", zoo.ALL)
def test_linear_sequential_adapter_after_the_last_linear_folds_into_it(name: str) -> None:
    """(I + UD) W, (I + UD) b + U d + u."""
    one, two = fresh(name), fresh(name)
    weights = adapter_weights(one, "attn ffn")
    methods.sequential("e", "attn ffn", act="none")(one, weights)
    for site in methods.sublayers(two, "attn ffn"):
        w = {k: weights[f"e/{site.path}/adapter.{k}"] for k in ("down", "down_bias", "up", "up_bias")}
        m = torch.eye(D, dtype=torch.float64) + w["up"] @ w["down"]
        shift = w["up"] @ w["down_bias"] + w["up_bias"]
        last = site.o if hasattr(site, "o") else site.down  # type: ignore[attr-defined]
        two.linear(last, lambda h, x, m=m, shift=shift: h @ m.T + shift)
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY


def test_multi_head_adapter_by_hand_on_bert() -> None:
    """head ← head + relu(q P_kᵀ) P_v, again with loops."""
    one, two = fresh("bert"), fresh("bert")
    weights = {
        f"e/{s.path}.heads/bottleneck.{k}": draw(i, HEADS, 5, D // HEADS)
        for i, s in enumerate(one.attentions)
        for k in ("keys", "values")
    }
    methods.multi_head("e")(one, weights)
    for site in two.attentions:
        core = two.model.get_submodule(site.core)

        def add(module: nn.Module, args: tuple, out: tuple, path: str = site.path) -> tuple:  # type: ignore[type-arg]
            q = module.query(args[0])
            h = out[0].clone()
            for i in range(HEADS):
                at = slice(i * 8, (i + 1) * 8)
                k, v = (weights[f"e/{path}.heads/bottleneck.{key}"][i] for key in ("keys", "values"))
                h[..., at] += torch.relu(q[..., at] @ k.T) @ v
            return (h, *out[1:])

        core.register_forward_hook(add)
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY


def test_seq_bn_on_bert_is_the_norm_used_twice() -> None:
    """out = LN(f(z) + h + res), z = LN(h + res)."""
    one, two = fresh("bert"), fresh("bert")
    weights = adapter_weights(one, "ffn")
    methods.seq_bn("e", "ffn")(one, weights)
    for ffn in two.ffns:
        norm = two.model.get_submodule(ffn.norm)

        def again(module: nn.Module, args: tuple, out: Tensor, path: str = ffn.path) -> Tensor:  # type: ignore[type-arg]
            w = {k: weights[f"e/{path}/adapter.{k}"] for k in ("down", "down_bias", "up", "up_bias")}
            f = torch.relu(out @ w["down"].T + w["down_bias"]) @ w["up"].T + w["up_bias"]
            return nn.functional.layer_norm(f + args[0], (D,), module.weight, module.bias, module.eps)

        norm.register_forward_hook(again)
    inputs = given_for(one)
    assert (logits(one.model, inputs) - logits(two.model, inputs)).abs().max() < TINY
