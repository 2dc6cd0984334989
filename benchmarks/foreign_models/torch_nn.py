"""torch.nn's own transformers, and blocks around nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.case import Case, Stack


def packed(kind: str, at: str, norm: str, width: int = 16) -> dict[str, str]:
    """The roles of an nn.MultiheadAttention with `in_proj_weight`."""
    rows = {"q": (0, width), "k": (width, 2 * width), "v": (2 * width, 3 * width)}
    roles = {f"attn.{kind}.{role}": f"{at}.in_proj_weight[{a}:{b}]" for role, (a, b) in rows.items()}
    return roles | {f"attn.{kind}.o": f"{at}.out_proj.weight", f"attn.{kind}.norm": norm}


def linears(at: str, norm: str) -> dict[str, str]:
    return {"ffn.up": f"{at}.linear1.weight", "ffn.down": f"{at}.linear2.weight", "ffn.norm": norm}


def encoder_roles(at: str) -> dict[str, str]:
    return packed("self", f"{at}.self_attn", f"{at}.norm1.weight") | linears(at, f"{at}.norm2.weight")


def decoder_roles(at: str) -> dict[str, str]:
    self_attn = packed("self", f"{at}.self_attn", f"{at}.norm1.weight")
    cross = packed("cross", f"{at}.multihead_attn", f"{at}.norm2.weight")
    return self_attn | cross | linears(at, f"{at}.norm3.weight")


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **options), 2)


def source() -> dict[str, Any]:
    return {"src": torch.randn(3, 5, 16)}


def padded() -> dict[str, Any]:
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return {"src": torch.randn(3, 5, 16), "src_key_padding_mask": mask}


def causal() -> dict[str, Any]:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return {"src": torch.randn(3, 5, 16), "mask": mask, "is_causal": True}


def target() -> dict[str, Any]:
    return {"tgt": torch.randn(3, 4, 16), "memory": torch.randn(3, 5, 16)}


def unbatched() -> dict[str, Any]:
    return {"tgt": torch.randn(4, 3, 16), "memory": torch.randn(5, 3, 16)}


# A language model as PyTorch's tutorial has it: nn.TransformerEncoder inside a model of tokens.
class TransformerModel(nn.Module):
    def __init__(self, ntoken: int = 50, d_model: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ntoken, d_model)
        self.register_buffer("pe", torch.randn(16, 1, d_model))
        layers = nn.TransformerEncoderLayer(d_model, 2, 32, 0.2)
        self.transformer_encoder = nn.TransformerEncoder(layers, 2)
        self.d_model = d_model
        self.linear = nn.Linear(d_model, ntoken)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        src = self.embedding(src) * self.d_model**0.5
        src = src + self.pe[: src.size(0)]
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.linear(self.transformer_encoder(src, src_mask))


# A block around nn.MultiheadAttention, as vision repositories write it.
class Residual(nn.Module):
    def __init__(self, attn: nn.MultiheadAttention, need_weights: bool, width: int = 16) -> None:
        super().__init__()
        self.attn = attn
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.ln_2 = nn.LayerNorm(width)
        self.need_weights = need_weights

    def attention(self, x: Tensor, memory: Tensor | None) -> Tensor:
        memory = x if memory is None else memory
        if self.need_weights:
            out, weights = self.attn(query=x, key=memory, value=memory)
            return out + 0.1 * weights.mean()
        return self.attn(x, memory, memory, need_weights=False)[0]

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.ln_1(x), memory)
        return x + self.mlp(self.ln_2(x))


class Blocks(nn.Module):
    def __init__(self, need_weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(nn.MultiheadAttention(16, 2, batch_first=True, **options), need_weights) for _ in range(2)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


FEED_FORWARD = {
    "ffn.up": "blocks.{i}.mlp.0.weight",
    "ffn.down": "blocks.{i}.mlp.2.weight",
    "ffn.norm": "blocks.{i}.ln_2.weight",
}
NORM = "blocks.{i}.ln_1.weight"
PACKED = Stack((0, 1), packed("self", "blocks.{i}.attn", NORM) | FEED_FORWARD)
# What enters the sum is more than the module's output.
WEIGHTS = Stack(PACKED.layers, PACKED.roles, {"attn.self.h": None})
CROSS = Stack((0, 1), packed("cross", "blocks.{i}.attn", NORM) | FEED_FORWARD)
SEPARATE = Stack(
    (0, 1),
    {f"attn.cross.{role}": f"blocks.{{i}}.attn.{role}_proj_weight" for role in "qkv"}
    | {"attn.cross.o": "blocks.{i}.attn.out_proj.weight", "attn.cross.norm": NORM}
    | FEED_FORWARD,
)


def images() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16)}


def queries(width: int = 16) -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16), "memory": torch.randn(2, 4, width)}


def case(name: str, build: Any, inputs: Any, *stacks: Stack) -> Case:
    return Case(f"torch/{name}", "torch", build, inputs, stacks)


ENCODER = Stack((0, 1), encoder_roles("layers.{i}"))
DECODER = Stack((0, 1), decoder_roles("layers.{i}"))
CASES = (
    case("encoder_post_norm", lambda: encoder(dropout=0.0), source, ENCODER),
    case("encoder_post_norm_batch_first", lambda: encoder(batch_first=True), padded, ENCODER),
    case("encoder_pre_norm", lambda: encoder(norm_first=True, activation="gelu"), source, ENCODER),
    case(
        "encoder_pre_norm_batch_first",
        lambda: encoder(norm_first=True, batch_first=True, dropout=0.0, bias=False),
        source,
        ENCODER,
    ),
    case("encoder_causal", lambda: encoder(batch_first=True, dropout=0.0), causal, ENCODER),
    case("decoder_post_norm", lambda: decoder(dropout=0.0), unbatched, DECODER),
    case("decoder_pre_norm_batch_first", lambda: decoder(norm_first=True, batch_first=True), target, DECODER),
    case(
        "transformer",
        lambda: nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True),
        lambda: {"src": torch.randn(3, 5, 16), "tgt": torch.randn(3, 4, 16)},
        Stack((0, 1), encoder_roles("encoder.layers.{i}")),
        Stack((0, 1), decoder_roles("decoder.layers.{i}")),
    ),
    case(
        "transformer_pre_norm",
        lambda: nn.Transformer(16, 2, 2, 2, 32, norm_first=True),
        lambda: {"src": torch.randn(5, 3, 16), "tgt": torch.randn(4, 3, 16)},
        Stack((0, 1), encoder_roles("encoder.layers.{i}")),
        Stack((0, 1), decoder_roles("decoder.layers.{i}")),
    ),
    case(
        "language_model",
        TransformerModel,
        lambda: {"src": torch.randint(50, (5, 2))},
        Stack((0, 1), encoder_roles("transformer_encoder.layers.{i}")),
    ),
    case("mha", lambda: Blocks(), images, PACKED),
    case("mha_need_weights", lambda: Blocks(need_weights=True), images, WEIGHTS),
    case("mha_cross", lambda: Blocks(), queries, CROSS),
    case("mha_kdim_vdim", lambda: Blocks(kdim=12, vdim=12), lambda: queries(12), SEPARATE),
    case("mha_bias_kv", lambda: Blocks(add_bias_kv=True, add_zero_attn=True), images, PACKED),
    case("mha_without_bias", lambda: Blocks(bias=False, need_weights=True), images, WEIGHTS),
)
