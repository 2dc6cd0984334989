"""The sites of each architecture, written by hand from transformers' modeling files. peftc infers
them; tests must not, or they would share its mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Rows:
    """The output features [start, stop) of a linear module; all of them where `stop` is None."""

    module: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Sublayer:
    """`edit_module`: the module whose hand-written forward has h, x and res; `slot` names the
    sub-layer in it; `norm` its norm.
    """

    path: str
    edit_module: str
    slot: str
    norm: str


@dataclass(frozen=True)
class Attention(Sublayer):
    """`core` is the module that is passed to the attention function."""

    core: str = ""
    q: Rows = field(default=Rows(""))
    k: Rows = field(default=Rows(""))
    v: Rows = field(default=Rows(""))
    o: Rows = field(default=Rows(""))


@dataclass(frozen=True)
class Ffn(Sublayer):
    """`gate` is the linear before the activation of a gated ffn, `up` the one it is multiplied with
    (or the only one).
    """

    up: Rows = field(default=Rows(""))
    gate: Rows | None = None
    down: Rows = field(default=Rows(""))


@dataclass(frozen=True)
class Layer:
    stack: str  # "encoder" or "decoder"
    index: int
    attentions: tuple[Attention, ...]
    ffn: Ffn
    module: str  # the layer itself

    @property
    def path(self) -> str:
        return f"{self.stack}.layer[{self.index}]"


def layers(name: str, model: nn.Module) -> tuple[Layer, ...]:
    """All layers of a zoo model in order: of the encoder, then of the decoder."""
    family = _FAMILIES[name]
    return tuple(family(model))


def attentions(name: str, model: nn.Module) -> tuple[Attention, ...]:
    return tuple(a for layer in layers(name, model) for a in layer.attentions)


def ffns(name: str, model: nn.Module) -> tuple[Ffn, ...]:
    return tuple(layer.ffn for layer in layers(name, model))


def _bart(model: nn.Module) -> Iterator[Layer]:
    depths = {"encoder": model.config.encoder_layers, "decoder": model.config.decoder_layers}
    for stack, depth in depths.items():
        for i in range(depth):
            at, path = f"model.{stack}.layers.{i}", f"{stack}.layer[{i}]"
            attentions = [_bart_attention(at, path, "self", "self_attn")]
            if stack == "decoder":
                attentions.append(_bart_attention(at, path, "cross", "encoder_attn"))
            ffn = Ffn(f"{path}.ffn", at, "ffn", f"{at}.final_layer_norm", up=Rows(f"{at}.fc1"), down=Rows(f"{at}.fc2"))
            yield Layer(stack, i, tuple(attentions), ffn, at)


def _bart_attention(at: str, path: str, kind: str, name: str) -> Attention:
    q, k, v, o = (Rows(f"{at}.{name}.{p}_proj") for p in ("q", "k", "v", "out"))
    return Attention(f"{path}.attn.{kind}", at, kind, f"{at}.{name}_layer_norm", f"{at}.{name}", q, k, v, o)


def _bert(prefix: str):
    def walk(model: nn.Module) -> Iterator[Layer]:
        for i in range(model.config.num_hidden_layers):
            at, path = f"{prefix}encoder.layer.{i}", f"encoder.layer[{i}]"
            core, out = f"{at}.attention.self", f"{at}.attention.output"
            q, k, v = (Rows(f"{core}.{p}") for p in ("query", "key", "value"))
            attention = Attention(
                f"{path}.attn.self", out, "self", f"{out}.LayerNorm", core, q, k, v, Rows(f"{out}.dense")
            )
            ffn = Ffn(
                f"{path}.ffn", f"{at}.output", "ffn", f"{at}.output.LayerNorm",
                up=Rows(f"{at}.intermediate.dense"), down=Rows(f"{at}.output.dense"),
            )  # fmt: skip
            yield Layer("encoder", i, (attention,), ffn, at)

    return walk


def _t5(model: nn.Module) -> Iterator[Layer]:
    gated = model.config.is_gated_act
    depths = {"encoder": model.config.num_layers, "decoder": model.config.num_decoder_layers}
    for stack, depth in depths.items():
        for i in range(depth):
            at, path = f"{stack}.block.{i}.layer", f"{stack}.layer[{i}]"
            attentions = [_t5_attention(f"{at}.0", path, "self", "SelfAttention")]
            if stack == "decoder":
                attentions.append(_t5_attention(f"{at}.1", path, "cross", "EncDecAttention"))
            last = f"{at}.{len(attentions)}"
            dense = f"{last}.DenseReluDense"
            up, gate = (Rows(f"{dense}.wi_1"), Rows(f"{dense}.wi_0")) if gated else (Rows(f"{dense}.wi"), None)
            ffn = Ffn(f"{path}.ffn", last, "ffn", f"{last}.layer_norm", up=up, gate=gate, down=Rows(f"{dense}.wo"))
            yield Layer(stack, i, tuple(attentions), ffn, at.removesuffix(".layer"))


def _t5_attention(at: str, path: str, kind: str, name: str) -> Attention:
    q, k, v, o = (Rows(f"{at}.{name}.{p}") for p in "qkvo")
    return Attention(f"{path}.attn.{kind}", at, kind, f"{at}.layer_norm", f"{at}.{name}", q, k, v, o)


def _gpt2(model: nn.Module) -> Iterator[Layer]:
    d = model.config.n_embd
    for i in range(model.config.n_layer):
        at, path = f"transformer.h.{i}", f"decoder.layer[{i}]"
        q, k, v = (Rows(f"{at}.attn.c_attn", j * d, (j + 1) * d) for j in range(3))
        attention = Attention(
            f"{path}.attn.self", at, "self", f"{at}.ln_1", f"{at}.attn", q, k, v, Rows(f"{at}.attn.c_proj")
        )
        ffn = Ffn(f"{path}.ffn", at, "ffn", f"{at}.ln_2", up=Rows(f"{at}.mlp.c_fc"), down=Rows(f"{at}.mlp.c_proj"))
        yield Layer("decoder", i, (attention,), ffn, at)


def _llama(model: nn.Module) -> Iterator[Layer]:
    for i in range(model.config.num_hidden_layers):
        at, path = f"model.layers.{i}", f"decoder.layer[{i}]"
        q, k, v, o = (Rows(f"{at}.self_attn.{p}_proj") for p in "qkvo")
        attention = Attention(f"{path}.attn.self", at, "self", f"{at}.input_layernorm", f"{at}.self_attn", q, k, v, o)
        ffn = Ffn(
            f"{path}.ffn", at, "ffn", f"{at}.post_attention_layernorm",
            up=Rows(f"{at}.mlp.up_proj"), gate=Rows(f"{at}.mlp.gate_proj"), down=Rows(f"{at}.mlp.down_proj"),
        )  # fmt: skip
        yield Layer("decoder", i, (attention,), ffn, at)


def _opt(model: nn.Module) -> Iterator[Layer]:
    for i in range(model.config.num_hidden_layers):
        at, path = f"model.decoder.layers.{i}", f"decoder.layer[{i}]"
        q, k, v, o = (Rows(f"{at}.self_attn.{p}_proj") for p in ("q", "k", "v", "out"))
        attention = Attention(
            f"{path}.attn.self", at, "self", f"{at}.self_attn_layer_norm", f"{at}.self_attn", q, k, v, o
        )
        ffn = Ffn(f"{path}.ffn", at, "ffn", f"{at}.final_layer_norm", up=Rows(f"{at}.fc1"), down=Rows(f"{at}.fc2"))
        yield Layer("decoder", i, (attention,), ffn, at)


_FAMILIES = {
    "bart": _bart, "mbart": _bart,
    "bert": _bert("bert."), "bert-base": _bert(""), "bert-classifier": _bert("bert."), "roberta": _bert("roberta."),
    "t5": _t5, "t5-gated": _t5,
    "gpt2": _gpt2,
    "llama": _llama, "qwen2": _llama, "qwen3": _llama, "mistral": _llama,
    "opt": _opt,
}  # fmt: skip
