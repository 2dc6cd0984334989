"""A configuration made tiny by the names of its fields, nested ones included.

All hidden sizes become 32, so that towers and projections that must match still do; 4 heads of 8
features; 4 experts, 2 active. Nothing here knows a model: exceptions are in `overrides`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.families.depth import DEPTHS, shallow

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 32, 4, 2, 8, 48, 100
POSITIONS, EXPERTS, TOP, PATCH, IMAGE, MELS = 64, 4, 2, 4, 16, 16
FIRST_FREE, LAST_FREE = 12, 60  # token ids between these are never special

Rule = int | Callable[[Any, Mapping[str, Any]], Any]


def _kv_heads(value: Any, values: Mapping[str, Any]) -> int:
    heads = next((values[n] for n in ("num_attention_heads", "n_head", "n_heads") if values.get(n)), None)
    return HEADS if value == heads else min(value, KV_HEADS)


_RULES: tuple[tuple[str, Rule], ...] = (
    (r"(.*_)?(hidden_size|hidden_dim|embed_dim|embedding_size|embed_size|emb_dim|d_model|n_embd)", HIDDEN),
    (r"(dim|width|lru_width|word_embed_proj_dim|out_hidden_size|projection_dim|projection_size|output_dim)", HIDDEN),
    (r"(projector|adapter|vision|text)_(in|out|input|output)_(dim|size)|pooler_output_size", HIDDEN),
    (r"classifier_proj_size|backbone_hidden_size|embedding_dim|entity_emb_size|output_hidden_size", HIDDEN),
    (r".*intermediate_size(_mlp)?|ffn_dim|.*_ffn_dim|d_ff|dff|dim_ff|mlp_dim|n_inner|d_inner|.*ffn_hidden_size", FFN),
    (r"moe_hidden_size|feed_forward_size|share_expert_dim", FFN),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads|n_head|nhead)|resampler_n_heads", HEADS),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads)|num_query_groups", _kv_heads),
    (r"qk_head_dim", 2 * HEAD),
    (r"(.*_)?head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|resampler_dim_head", HEAD),
    (r"rotary_dim|rotary_ndims", 4),
    (r"query_pre_attn_scalar", HEAD),
    (r"(.*_)?lora_rank", 16),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|ffn_num_experts)", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts", lambda v, _: min(v, TOP)),
    (r"n_group|num_expert_group", lambda v, _: min(v, 2)),
    (r"topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers", lambda v, _: min(v, 1)),
    (
        r"(.*_)?max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len|seq_length",
        POSITIONS,
    ),
    (r"(original|left|right)_max_position_embeddings|max_2d_position_embeddings", POSITIONS),
    (r"(.*_)?vocab_size", lambda v, _: min(v, VOCAB)),
    (r"(src|tgt)_vocab_size|vocab_size_per_layer_input", VOCAB),
    (r"(.*_)?sliding_window(_size)?|local_attention|attention_window_size", 6),
    (r"patch_size", PATCH),
    (r"image_size|video_size", IMAGE),
    (r"num_mel_bins|n_mel_bins", MELS),
    (r"mm_tokens_per_image", 4),
    (r"num_query_tokens|num_latents|resampler_n_latents|resampler_num_latents|latent_query_num", 4),
    (r"mamba_n_heads|mamba_num_heads", 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"(mamba_d_state|ssm_state_size|state_size)", 8),
    (r"(mamba_)?chunk_size|mamba_chunk_size", lambda v, _: min(v, 4) if v > 0 else v),
    (r"(mamba_n_groups|n_groups|mamba_ngroups)", lambda v, _: min(v, 2)),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"pos_emb_(height|width)", 8),
    (r"num_position_embeddings", 16),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)
_TOKEN = re.compile(
    r"(?!num_).*(token_id|token_index|token_idx)$|.*_(bos|eos|pad)_id$|im_(start|end|newline)_id|image_patch_id"
)
_ABSENT = {"head_dim": HEAD, "num_experts_per_tok": TOP}  # required by some types without a default
_DERIVED = {"out_features", "out_indices", "stage_names"}  # derived from the others
_STAGES = ("depths", "hidden_sizes", "embed_dims", "stage_num_blocks", "num_block_repeats")


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration (`to_dict()`), small; token ids stay distinct from each other
    and from text.
    """
    tokens = _token_ids(values)
    return _shrunk(values, tokens)


def _shrunk(values: Mapping[str, Any], tokens: Mapping[int, int]) -> dict[str, Any]:
    if any(isinstance(values.get(name), (list, tuple)) for name in _STAGES):
        return _in_stages(values, tokens)
    small = {n: _field(n, v, values, tokens) for n, v in values.items() if n not in _DERIVED}
    small |= shallow({**small, **{name: values[name] for name in DEPTHS if name in values}})
    if small.get("per_layer_config"):
        small["per_layer_config"] = {i: _exception(v, small, values) for i, v in small["per_layer_config"].items()}
    return small


def _exception(fields: Mapping[str, Any], small: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The exceptions of one layer, scaled in proportion."""
    return {name: _in_proportion(value, small.get(name), values.get(name)) for name, value in fields.items()}


def _in_proportion(value: Any, small: Any, large: Any) -> Any:
    return small * value // large if all(_count(v) for v in (value, small, large)) else value


def _in_stages(values: Mapping[str, Any], tokens: Mapping[int, int]) -> dict[str, Any]:
    """Hierarchical models: channels are divided, not set, since each stage has its own; image and
    patch sizes fit the strides.
    """
    small = {name: value for name, value in values.items() if name not in _DERIVED}
    for name, value in small.items():
        if name in ("depths", "stage_num_blocks", "num_block_repeats"):
            small[name] = [min(2, n) for n in value]
        elif name == "image_size":
            small[name] = [64, 64] if isinstance(value, (list, tuple)) else 64
        elif name == "window_size":
            small[name] = 4
        elif "drop" in name:
            small[name] = _zero(value)
        elif isinstance(value, dict) and "model_type" in value:
            small[name] = _shrunk(value, tokens)
        elif isinstance(value, int) and _TOKEN.fullmatch(name):
            small[name] = tokens.get(value, value)
        elif name == "vocab_size":
            small[name] = VOCAB
    return small


def _field(name: str, value: Any, values: Mapping[str, Any], tokens: Mapping[int, int]) -> Any:
    if isinstance(value, Mapping):
        return _inner(name, value, tokens)
    if value is None:
        return _ABSENT.get(name)
    if isinstance(value, (bool, str)):
        return value
    if "drop" in name:
        return _zero(value)
    if _TOKEN.fullmatch(name):
        return _mapped(value, tokens)
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(name)), None)
    if rule is None:
        return _strided(name, value)
    if isinstance(value, (list, tuple)):
        return [_ruled(rule, v, values) if _count(v) else v for v in value]
    return _ruled(rule, value, values) if _count(value) else value


def _inner(name: str, value: Mapping[str, Any], tokens: Mapping[int, int]) -> Any:
    if "model_type" in value:
        return _shrunk(value, tokens)
    if name in ("per_layer_config", "id2label", "label2id"):
        return dict(value)
    if name.startswith("rope") or "rope_type" in value:
        return {k: _rope(k, v) for k, v in value.items()}
    if any(isinstance(v, Mapping) for v in value.values()):
        return {k: _inner(k, v, tokens) if isinstance(v, Mapping) else v for k, v in value.items()}
    return dict(value)


def _rope(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _rope(k, v) for k, v in value.items()}
    if name == "mrope_section":
        return [2, 1, 1]
    if name == "original_max_position_embeddings":
        return POSITIONS
    if name in ("long_factor", "short_factor") and value:
        return value[: HEAD // 2]
    return value


def _strided(name: str, value: Any) -> Any:
    if name in ("conv_dim", "tdnn_dim"):
        return [HIDDEN for _ in value]
    return value


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ruled(rule: Rule, value: int, values: Mapping[str, Any]) -> Any:
    return rule(value, values) if callable(rule) else rule


def _zero(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_zero(v) for v in value]
    return 0.0 if isinstance(value, float) else value


def _mapped(value: Any, tokens: Mapping[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(v, tokens) for v in value]
    return tokens.get(value, value) if isinstance(value, int) else value


def _token_ids(values: Mapping[str, Any]) -> dict[int, int]:
    """Special tokens: small ids stay, the others become the last ids of the vocabulary,
    in order.
    """
    large = sorted(i for i in set(_tokens_in(values)) if i >= FIRST_FREE)
    return {token: VOCAB - 1 - place for place, token in enumerate(large)}


def _tokens_in(values: Mapping[str, Any]) -> list[int]:
    tokens = list[int]()
    for name, value in values.items():
        if isinstance(value, Mapping):
            tokens += _tokens_in(value)
        elif isinstance(name, str) and _TOKEN.fullmatch(name):  # (`id2label` has numbers for names)
            items = value if isinstance(value, (list, tuple)) else [value]
            tokens += [i for i in items if isinstance(i, int) and not isinstance(i, bool)]
    return tokens
