"""Packages that implement one paper each. Read: the module of the package's own name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.efficient import built
from benchmarks.foreign_models.tables import Roles, attention, ffn, glu, packed, sequence, split_kv, tokens

SMALL: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8}
WIDE = SMALL | {"dim_head": 32}


def table() -> dict[str, Any]:
    return {"x_categ": torch.randint(0, 5, (2, 3)), "x_numer": torch.randn(2, 4)}


def tabular(name: str, streams: int, **more: Any) -> Any:
    sizes = SMALL | {"categories": (5, 5, 5), "num_continuous": 4, "num_residual_streams": streams} | more
    return built("tab_transformer_pytorch", name, **sizes)


def ft_layer(at: str) -> Roles:
    """Residual(Attention), Residual(Sequential of norm, GEGLU)."""
    table = packed(f"{at}.0.branch.to_qkv", 16, o=f"{at}.0.branch.to_out", norm=f"{at}.0.branch.norm")
    return table | glu(f"{at}.1.branch.1", 64, f"{at}.1.branch.4", f"{at}.1.branch.0")


def tab_layer(at: str) -> Roles:
    table = packed(f"{at}.0.branch.fn.to_qkv", 16, o=f"{at}.0.branch.fn.to_out", norm=f"{at}.0.branch.norm")
    return table | glu(f"{at}.1.branch.fn.net.0", 64, f"{at}.1.branch.fn.net.3", f"{at}.1.branch.norm")


def perceiver_ar() -> tuple[Stack, ...]:
    """The one Linear of keys and values is called for the prefix and for the sequence."""
    at = "{i}"
    cross = split_kv(
        f"perceive_layers.{at}.0.to_q",
        f"perceive_layers.{at}.0.to_kv",
        64,
        o=f"perceive_layers.{at}.0.to_out",
        norm=(f"perceive_layers.{at}.0.norm", f"perceive_layers.{at}.0.context_norm"),
    ) | ffn(f"perceive_layers.{at}.1.1", f"perceive_layers.{at}.1.4", f"perceive_layers.{at}.1.0")
    own = packed(f"layers.{at}.0.to_qkv", 64, o=f"layers.{at}.0.to_out", norm=f"layers.{at}.0.norm")
    return Stack((0,), cross), Stack((0, 1), own | ffn(f"layers.{at}.1.1", f"layers.{at}.1.4", f"layers.{at}.1.0"))


def retention(at: str) -> Roles:
    """(q k') times a decay, no softmax; a group norm without parameters; times act(g_proj(x))."""
    roles = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    table = attention(norm=f"{at}.norm1", **{role: f"{at}.retention.{name}" for role, name in roles.items()})
    return table | ffn(f"{at}.linear1", f"{at}.linear2", f"{at}.norm2")


def memory_layer(at: str) -> Roles:
    table = split_kv(
        f"{at}.0.branch.to_q",
        f"{at}.0.branch.to_kv",
        16,
        o=f"{at}.0.branch.to_out",
        norm=f"{at}.0.branch.norm",
    )
    return table | glu(f"{at}.1.branch.1", 42, f"{at}.1.branch.4", f"{at}.1.branch.0")


CASES = (
    Case(
        "tab-transformer/ft",
        "tab-transformer-pytorch",
        tabular("FTTransformer", 1),
        table,
        (Stack((0, 1), ft_layer("transformer.layers.{i}")),),
        source="A wrapper adds the residual to the first of what its branch returns, by tree_flatten.",
    ),
    Case(
        "tab-transformer/tab",
        "tab-transformer-pytorch",
        tabular("TabTransformer", 1, mlp_act=nn.ReLU()),
        lambda: {"x_categ": torch.randint(0, 5, (2, 3)), "x_cont": torch.randn(2, 4)},
        (Stack((0, 1), tab_layer("transformer.layers.{i}")),),
    ),
    # Four residual streams, mixed before and behind each branch by weights that are computed.
    Case(
        "tab-transformer/hyper_connections",
        "tab-transformer-pytorch",
        tabular("FTTransformer", 4),
        table,
        (
            Stack(
                (0, 1),
                ft_layer("transformer.layers.{i}"),
                optional={
                    "attn.norm": "transformer.layers.{i}.0.norm.gamma",
                    "ffn.norm": "transformer.layers.{i}.1.norm.gamma",
                },
            ),
        ),
    ),
    # Tokens are mixed by 1x1 convolutions whose channels are the tokens; the model is a Sequential.
    Case(
        "mlp-mixer/model",
        "mlp-mixer-pytorch",
        built("mlp_mixer_pytorch", "MLPMixer", image_size=16, channels=3, patch_size=4, dim=16, depth=2, num_classes=5),
        lambda: {"input": torch.randn(2, 3, 16, 16)},
        (Stack((2, 3), ffn("{i}.1.fn.0", "{i}.1.fn.3", "{i}.1.norm") | {"mixer.norm": "{i}.0.norm.weight"}),),
    ),
    # No norms, but affine maps; a scale behind the mlp is a parameter of its wrapper.
    Case(
        "res-mlp/model",
        "res-mlp-pytorch",
        built("res_mlp_pytorch", "ResMLP", image_size=16, patch_size=4, dim=16, depth=2, num_classes=5),
        lambda: {"input": torch.randn(2, 3, 16, 16)},
        (Stack((2, 3), ffn("{i}.1.fn.0", "{i}.1.fn.2"), {"ffn.h": None}),),
    ),
    Case(
        "perceiver-ar/model",
        "perceiver-ar-pytorch",
        built("perceiver_ar_pytorch", "PerceiverAR", num_tokens=50, max_seq_len=16, cross_attn_seq_len=4, **WIDE),
        tokens(length=10),
        perceiver_ar(),
    ),
    Case(
        "yet-another-retnet/model",
        "yet-another-retnet",
        built(
            "yet_another_retnet.retnet", "RetNet", num_tokens=50, d_model=16, nhead=2, num_layers=2, dim_feedforward=32
        ),
        lambda: {"inputs": torch.randint(0, 50, (2, 8)), "labels": torch.randint(0, 50, (2, 8))},
        (Stack((0, 1), retention("decoder.layers.{i}")),),
        source="`layer.forward_parallel(x)`: no layer is called. The result is a loss.",
    ),
    # Sorted blocks of keys; `(f, g), (f_args, g_args)` in a zip.
    Case(
        "sinkhorn-transformer/model",
        "sinkhorn-transformer",
        built("sinkhorn_transformer", "SinkhornTransformerLM", max_seq_len=16, bucket_size=4, num_tokens=50, **SMALL),
        tokens(length=16),
        (
            Stack(
                (0, 1),
                split_kv(
                    "sinkhorn_transformer.layers.layers.{i}.0.fn.to_q",
                    "sinkhorn_transformer.layers.layers.{i}.0.fn.to_kv",
                    16,
                    o="sinkhorn_transformer.layers.layers.{i}.0.fn.to_out",
                    norm="sinkhorn_transformer.layers.layers.{i}.0.norm",
                )
                | ffn(
                    "sinkhorn_transformer.layers.layers.{i}.1.fn.fn.w1",
                    "sinkhorn_transformer.layers.layers.{i}.1.fn.fn.w2",
                    "sinkhorn_transformer.layers.layers.{i}.1.norm",
                ),
            ),
        ),
    ),
    # `x = x + (attn(x) + x)`: the stream is doubled; later layers mix their values with the first.
    Case(
        "itransformer/model",
        "iTransformer",
        built(
            "iTransformer",
            "iTransformer",
            num_variates=5,
            lookback_len=12,
            pred_length=3,
            num_residual_streams=1,
            **SMALL,
        ),
        sequence(length=12, width=5),
        (
            Stack(
                (0, 1),
                packed(
                    "layers.{i}.0.branch.to_qkv.0",
                    16,
                    o="layers.{i}.0.branch.to_out.1",
                    norm="layers.{i}.0.branch.norm",
                )
                | glu("layers.{i}.1.branch.1", 42, "layers.{i}.1.branch.4", "layers.{i}.1.branch.0"),
            ),
        ),
    ),
    # Keys and values behind memories and a null key; a list of three results.
    Case(
        "recurrent-memory/model",
        "recurrent-memory-transformer-pytorch",
        built(
            "recurrent_memory_transformer_pytorch",
            "RecurrentMemoryTransformer",
            num_tokens=50,
            num_memory_tokens=3,
            seq_len=8,
            num_residual_streams=1,
            **SMALL,
        ),
        tokens(),
        (Stack((0, 1), memory_layer("layers.{i}")),),
    ),
    # Attention over coarser and coarser blocks; `exp` and a division by sums instead of softmax.
    Case(
        "h-transformer-1d/model",
        "h-transformer-1d",
        built("h_transformer_1d", "HTransformer1D", num_tokens=50, max_seq_len=32, block_size=4, causal=True, **SMALL),
        tokens(length=32),
        (
            Stack(
                (0, 1),
                packed(
                    "layers.layers.{i}.0.fn.to_qkv",
                    16,
                    o="layers.layers.{i}.0.fn.to_out",
                    norm="layers.layers.{i}.0.norm",
                )
                | ffn("layers.layers.{i}.1.fn.net.0", "layers.layers.{i}.1.fn.net.2", "layers.layers.{i}.1.norm"),
            ),
        ),
    ),
    # Half of the features come from the token before; two hierarchies, side by side in the loop.
    Case(
        "simple-hierarchical/model",
        "simple-hierarchical-transformer",
        built(
            "simple_hierarchical_transformer",
            "HierarchicalTransformer",
            num_tokens=50,
            seq_len=16,
            hierarchies=(1,),
            **SMALL,
        ),
        lambda: {"ids": torch.randint(1, 50, (2, 8))},
        (
            Stack(
                (0, 1),
                packed("layers.{i}.0.attn.to_qkv", 16, o="layers.{i}.0.attn.to_out")
                | ffn("layers.{i}.0.ff.net.1", "layers.{i}.0.ff.net.3")
                | {"attn.norm": "layers.{i}.0.attn.norm.gamma", "ffn.norm": "layers.{i}.0.ff.net.0.gamma"},
            ),
        ),
    ),
)
