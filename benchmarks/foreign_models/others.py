"""Code bases with a model or two each. Read: the modules that the imports below name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import (
    Roles,
    attention,
    both,
    feed_forward,
    ffn,
    glu,
    image,
    packed,
    split_kv,
    tokens,
)


def built(module: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(module), name)(**arguments)


def sentences() -> nn.Module:
    """A tiny BERT, saved and loaded, as the library asks for; a pool and a Linear behind it."""
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizer

    with tempfile.TemporaryDirectory() as folder:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
        (Path(folder) / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).save_pretrained(folder)
        return SentenceTransformer(modules=[models.Transformer(folder), models.Pooling(16), models.Dense(16, 8)])


def sentence_input() -> dict[str, Any]:
    return {"input": {"input_ids": torch.randint(1, 50, (2, 8)), "attention_mask": torch.ones(2, 8).long()}}


def projections(at: str, norm: str, kind: str) -> Roles:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    return attention(kind, norm=norm, **{role: f"{at}.{name}" for role, name in names.items()})


def rtdl_layer(first: bool) -> Roles:
    """ReGLU: the first half is the value, the second the gate. The first block lacks a norm."""
    at = "backbone.blocks.{i}"
    names = {"q": "W_q", "k": "W_k", "v": "W_v", "o": "W_out"}
    norm = "" if first else f"{at}.attention_normalization"
    table = attention(norm=norm, **{role: f"{at}.attention.{name}" for role, name in names.items()})
    return table | glu(f"{at}.ffn.linear1", 32, f"{at}.ffn.linear2", f"{at}.ffn_normalization")


def x_clip_layer(at: str) -> Roles:
    """Norms before, behind the output projection, and of the hidden state."""
    table = packed(f"{at}.0.fn.to_qkv", 128, o=f"{at}.0.fn.to_out.0")
    table |= attention(norm=(f"{at}.0.norm.g!", f"{at}.0.fn.to_out.1.g!"))
    return table | glu(f"{at}.1.fn.net.0", 64, f"{at}.1.fn.net.4", (f"{at}.1.norm.g!", f"{at}.1.fn.net.2.g!"))


def monai_layer(at: str) -> Roles:
    roles = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "out_proj"}
    tables = (
        attention(kind, norm=f"{at}.{norm}", **{role: f"{at}.{attn}.{name}" for role, name in roles.items()})
        for kind, attn, norm in (("self", "attn1", "norm1"), ("cross", "attn2", "norm2"))
    )
    return both(*tables, glu(f"{at}.ff.linear1", 64, f"{at}.ff.linear2", f"{at}.norm3"))


SAM_BLOCK = packed("blocks.{i}.attn.qkv", 16, o="blocks.{i}.attn.proj", norm="blocks.{i}.norm1") | ffn(
    "blocks.{i}.mlp.lin1", "blocks.{i}.mlp.lin2", "blocks.{i}.norm2"
)
TWO_WAY = both(
    projections("layers.{i}.self_attn", "layers.{i}.norm1", "self"),
    projections("layers.{i}.cross_attn_token_to_image", "layers.{i}.norm2", "cross"),
    ffn("layers.{i}.mlp.lin1", "layers.{i}.mlp.lin2", "layers.{i}.norm3"),
    projections("layers.{i}.cross_attn_image_to_token", "layers.{i}.norm4", "cross"),
)
PALM = {
    "attn.q": "layers.{i}.fn.fused_attn_ff_proj.weight[0:16]",
    "attn.k": "layers.{i}.fn.fused_attn_ff_proj.weight[16:24]",
    "attn.v": "layers.{i}.fn.fused_attn_ff_proj.weight[24:32]",
    "attn.o": "layers.{i}.fn.attn_out.weight",
    "attn.norm": "layers.{i}.fn.norm.gamma",
    "ffn.up": "layers.{i}.fn.fused_attn_ff_proj.weight[32:96]",
    "ffn.gate": "layers.{i}.fn.fused_attn_ff_proj.weight[96:160]",
    "ffn.down": "layers.{i}.fn.ff_out.2.weight",
}
BERT = {
    **{
        f"attn.{r}": f"0.model.encoder.layer.{{i}}.attention.self.{n}.weight"
        for r, n in zip("qkv", ("query", "key", "value"), strict=True)
    },
    "attn.o": "0.model.encoder.layer.{i}.attention.output.dense.weight",
    "attn.norm": "0.model.encoder.layer.{i}.attention.output.LayerNorm.weight",
    "ffn.up": "0.model.encoder.layer.{i}.intermediate.dense.weight",
    "ffn.down": "0.model.encoder.layer.{i}.output.dense.weight",
    "ffn.norm": "0.model.encoder.layer.{i}.output.LayerNorm.weight",
}

CASES = (
    Case(
        "fair-esm/esm2",
        "fair-esm",
        built("esm.model.esm2", "ESM2", num_layers=2, embed_dim=16, attention_heads=2),
        lambda: {"tokens": torch.randint(4, 20, (2, 8))},
        (
            Stack(
                (0, 1),
                projections("layers.{i}.self_attn", "layers.{i}.self_attn_layer_norm", "")
                | ffn("layers.{i}.fc1", "layers.{i}.fc2", "layers.{i}.final_layer_norm"),
            ),
        ),
        lambda out: out["logits"],
    ),
    Case(
        "x-clip/model",
        "x-clip",
        built(
            "x_clip",
            "CLIP",
            dim_text=16,
            dim_image=16,
            dim_latent=8,
            num_text_tokens=50,
            text_enc_depth=2,
            text_seq_len=8,
            text_heads=2,
            visual_enc_depth=2,
            visual_image_size=32,
            visual_patch_size=16,
            visual_heads=2,
        ),
        lambda: {"text": torch.randint(1, 50, (2, 8)), "image": torch.randn(2, 3, 32, 32)},
        tuple(
            Stack((0, 1), x_clip_layer(f"{at}.{{i}}"), {"attn.h": f"{at}.{{i}}.0.fn.to_out.1"})
            for at in ("text_transformer.transformer.layers", "visual_transformer.transformer.layers")
        ),
    ),
    # The last block computes queries of one token.
    Case(
        "rtdl/ft_transformer",
        "rtdl_revisiting_models",
        built(
            "rtdl_revisiting_models",
            "FTTransformer",
            n_cont_features=3,
            cat_cardinalities=[4, 5],
            d_out=5,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.0,
            ffn_d_hidden=None,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        lambda: {"x_cont": torch.randn(2, 3), "x_cat": torch.randint(0, 4, (2, 2))},
        (Stack((0,), rtdl_layer(first=True)), Stack((1,), rtdl_layer(first=False))),
    ),
    Case(
        "monai/vit",
        "monai",
        built(
            "monai.networks.nets",
            "ViT",
            in_channels=3,
            img_size=(32, 32),
            patch_size=(16, 16),
            hidden_size=16,
            mlp_dim=32,
            num_layers=2,
            num_heads=2,
            classification=True,
            num_classes=5,
            spatial_dims=2,
        ),
        image(),
        (
            Stack(
                (0, 1),
                packed("blocks.{i}.attn.qkv", 16, o="blocks.{i}.attn.out_proj", norm="blocks.{i}.norm1")
                | ffn("blocks.{i}.mlp.linear1", "blocks.{i}.mlp.linear2", "blocks.{i}.norm2"),
            ),
        ),
        source="`cross_attn` and `norm_cross_attn` are built and never called.",
    ),
    Case(
        "monai/diffusion_unet",
        "monai",
        built(
            "monai.networks.nets",
            "DiffusionModelUNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 16),
            attention_levels=(False, True),
            num_head_channels=8,
            num_res_blocks=1,
            norm_num_groups=4,
            with_conditioning=True,
            cross_attention_dim=12,
            transformer_num_layers=2,
        ),
        lambda: {"x": torch.randn(1, 1, 16, 16), "timesteps": torch.tensor([3]), "context": torch.randn(1, 5, 12)},
        tuple(
            Stack((0, 1), monai_layer(f"{at}.transformer_blocks.{{i}}"))
            for at in (
                "down_blocks.1.attentions.0",
                "middle_block.attention",
                "up_blocks.0.attentions.0",
                "up_blocks.0.attentions.1",
            )
        ),
    ),
    # Attention in windows, then global; biases of relative positions that depend on the query.
    Case(
        "segment-anything/image_encoder",
        "segment-anything",
        built(
            "segment_anything.modeling",
            "ImageEncoderViT",
            img_size=32,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            out_chans=8,
            use_rel_pos=True,
            window_size=2,
            global_attn_indexes=(1,),
        ),
        image(),
        (Stack((0, 1), SAM_BLOCK),),
    ),
    # Two streams; the first layer's self-attention has no residual.
    Case(
        "segment-anything/two_way",
        "segment-anything",
        built("segment_anything.modeling", "TwoWayTransformer", depth=2, embedding_dim=16, mlp_dim=32, num_heads=2),
        lambda: {
            "image_embedding": torch.randn(2, 16, 4, 4),
            "image_pe": torch.randn(2, 16, 4, 4),
            "point_embedding": torch.randn(2, 5, 16),
        },
        (Stack((0, 1), TWO_WAY),),
    ),
    Case(
        "memory-efficient-attention/model",
        "memory-efficient-attention-pytorch",
        built(
            "memory_efficient_attention_pytorch.transformer",
            "Transformer",
            num_tokens=50,
            max_seq_len=8,
            dim=16,
            depth=2,
            heads=2,
            dim_head=8,
            causal=True,
            q_bucket_size=4,
            k_bucket_size=4,
        ),
        tokens(),
        (
            Stack(
                (0, 1),
                split_kv("layers.{i}.0.fn.to_q", "layers.{i}.0.fn.to_kv", 16, o="layers.{i}.0.fn.to_out")
                | attention(norm="layers.{i}.0.norm")
                | ffn("layers.{i}.1.fn.net.0", "layers.{i}.1.fn.net.2", "layers.{i}.1.norm"),
            ),
        ),
    ),
    Case(
        "megabyte/model",
        "MEGABYTE-pytorch",
        built(
            "MEGABYTE_pytorch",
            "MEGABYTE",
            num_tokens=50,
            dim=(16, 16),
            max_seq_len=(4, 2),
            depth=(2, 2),
            heads=2,
            dim_head=8,
            flash_attn=False,
        ),
        tokens("ids"),
        tuple(
            Stack(
                (0, 1),
                split_kv(f"{at}.0.to_q", f"{at}.0.to_kv", 16, o=f"{at}.0.to_out")
                | attention(norm=f"{at}.0.norm.g!")
                | feed_forward(f"{at}.1", "0.g!", 1, 4),
            )
            for at in ("transformers.0.layers.{i}", "transformers.1.layers.{i}")
        ),
        source="Inputs of both sub-layers are shifted by a token in half of their features.",
    ),
    # One projection for q, one head of k and v, and the feed-forward part beside the attention.
    Case(
        "palm/model",
        "PaLM-rlhf-pytorch",
        built("palm_rlhf_pytorch", "PaLM", num_tokens=50, dim=16, depth=2, dim_head=8, heads=2),
        tokens(),
        (Stack((0, 1), PALM),),
    ),
    Case(
        "sentence-transformers/bert",
        "sentence-transformers",
        sentences,
        sentence_input,
        (Stack((0, 1), BERT),),
        lambda out: out["sentence_embedding"],
    ),
)
