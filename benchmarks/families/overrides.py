"""Overrides for configurations that field names alone do not shrink, each with its reason.

A dotted name is a field of a nested configuration; `...` as a value deletes the field, so that its
default applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Override:
    reason: str
    fields: Mapping[str, Any]


_SECTIONS = "three rotary sections add up to half of a head; their default is not among the configuration's fields"
_HYBRID = "without attention layers by default, which transformers' own cache refuses; one of each kind is kept"
_MAMBA = "heads times their size must be the inner width"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_M_ROPE = {**_ROPE, "mrope_section": [2, 1, 1]}

_NO_DEFAULT = "a field that the model needs has no default"
_SHARED = "layers that take the keys of earlier ones need such earlier ones, of each kind"
_OTHER_NAMES = "sizes that go by names of their own, or that are sums of others"
_CHANNELS = "channels per stage that must divide into groups"
_LAYERS = "names layers of another configuration"
_KV_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_GEMMA3N = {**_KV_SHARED, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}
_MOE = {"n_routed_experts": 4, "num_local_experts": 4, "n_shared_experts": 1}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "split_ngram_parts": 4,
    "ngram_vocab_size_base": 64,
}
_VQ = {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 16}
_SAM = {"output_channels": 32, "downsample_channels": [32, 32]}
_SOUND = {"num_filters": 4, "depths": [1] * 7}


def _in(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in fields.items()}


OVERRIDES: Mapping[str, Override] = {
    "bamba": Override(_HYBRID, {"attn_layer_indices": [1]}),
    "granitemoehybrid": Override(_HYBRID, {"layer_types": ["linear_attention", "full_attention"]}),
    "jamba": Override(_HYBRID, {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4}),
    "recurrent_gemma": Override(_HYBRID, {"num_hidden_layers": 3}),
    "falcon_h1": Override(_MAMBA, {"mamba_d_ssm": 64}),
    "mamba2": Override(_MAMBA, {"num_heads": 4, "head_dim": 16, "n_groups": 2}),
    "zamba2": Override(
        "two hybrid layers, so that they share; " + _MAMBA,
        {
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
        },
    ),
    "zamba": Override(
        "two hybrid layers, so that they share; heads as wide as twice the hidden size",
        {
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
    ),
    "xlstm": Override(
        "heads of a multiple of 16 features",
        {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 16, "num_blocks": 2},
    ),
    "dots1": Override(_NO_DEFAULT, _MOE),
    "nemotron": Override(_NO_DEFAULT, {"num_key_value_heads": 2}),
    "esm": Override(_NO_DEFAULT, {"vocab_size": 100, "pad_token_id": 1}),
    "lfm2_moe": Override(_NO_DEFAULT, {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "qwen4_exp_text": Override(_NO_DEFAULT, _INDEXER),
    "qwen4_exp": Override(_NO_DEFAULT, _in("text_config", _INDEXER)),
    "xmod": Override(_NO_DEFAULT, {"default_language": "en_XX"}),
    "dbrx": Override(
        _NO_DEFAULT, {"attn_config.rope_theta": 10000.0, "attn_config.kv_n_heads": 2, "attn_config.clip_qkv": 8.0}
    ),
    "diffusion_gemma": Override(
        _NO_DEFAULT, _in("text_config", {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48})
    ),
    "deepseek_ocr2": Override(
        _NO_DEFAULT + "; " + _OTHER_NAMES,
        _in("vision_config.sam_config", _SAM) | {"text_config.mlp_layer_types": ["dense", "sparse"]},
    ),
    "granite4_vision": Override(
        _NO_DEFAULT,
        {
            "deepstack_layer_map": [[0, 0]],
            "spatial_target_layers": [1],
            "downsample_rate": "1/2",
            "text_config.hidden_size": 64,
            "vision_config.hidden_size": 64,
        },
    ),
    "chameleon": Override(_NO_DEFAULT, {"vocabulary_map": {"<image>": 70, "IMGIMGA": 71}, **_in("vq_config", _VQ)}),
    "emu3": Override(
        _NO_DEFAULT,
        {
            "vocabulary_map": {"<image>": 70, "<|extra_200|>": 71, "<|visual token 000000|>": 72},
            **_in("vq_config", {**_VQ, "channel_multiplier": [1, 1, 1, 1]}),
        },
    ),
    "cohere_compass_text": Override(_NO_DEFAULT, {"rope_parameters": {"full_attention": _M_ROPE}}),
    "cohere_compass": Override(_NO_DEFAULT, {"text_config.rope_parameters": {"full_attention": _M_ROPE}}),
    "gemma3n_text": Override(_SHARED, _GEMMA3N),
    "gemma3n": Override(_SHARED, _in("text_config", _GEMMA3N)),
    "hrm_text": Override("its depth is counted in cycles", {"num_hidden_layers": 2, "num_layers_per_stack": ...}),
    "musicgen": Override("two codebooks for two rows of ids", {"decoder.num_codebooks": 2}),
    "musicgen_melody": Override("two codebooks for two rows of ids", {"decoder.num_codebooks": 2}),
    "reformer": Override(
        "positions factorise; both kinds of attention",
        {
            "axial_pos_embds_dim": [16, 16],
            "axial_pos_shape": [4, 16],
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
            "num_hidden_layers": 2,
            "attn_layers": ["local", "lsh"],
            "feed_forward_size": 48,
        },
    ),
    "neomme": Override("a quarter of a head holds two axes of rotary positions", {"head_dim": 16}),
    "mistral4": Override("heads are rotary parts and others", {"head_dim": 16}),
    "dots3_note_text": Override("heads of sliding layers are rotary parts and others", {"head_dim": 20}),
    "dots3_note": Override("heads of sliding layers are rotary parts and others", {"text_config.head_dim": 20}),
    "mobilebert": Override(_OTHER_NAMES, {"true_hidden_size": 32, "intra_bottleneck_size": 32}),
    "blt": Override(
        _OTHER_NAMES,
        {
            "encoder_hash_byte_group_vocab": 50,
            "encoder_config.hidden_size_global": 32,
            "decoder_config.hidden_size_global": 32,
        },
    ),
    "perceiver": Override(
        _OTHER_NAMES,
        {
            "d_latents": 32,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 1,
            "output_num_channels": 32,
            "_label_trainable_num_channels": 32,
        },
    ),
    "siglip2": Override("an image is a sequence of patches", {"vision_config.num_patches": 16}),
    "vibevoice_asr": Override(
        _OTHER_NAMES,
        _in("acoustic_tokenizer_encoder_config", _SOUND) | _in("semantic_tokenizer_encoder_config", _SOUND),
    ),
    "janus": Override(_CHANNELS, _in("vq_config", {**_VQ, "channel_multiplier": [1, 1]})),
    "efficientnet": Override(
        "its width and depth are multiplied", {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}
    ),
    "swin": Override("windows no larger than the last stage", {"image_size": 128}),
    "donut-swin": Override("windows no larger than the last stage", {"image_size": 128}),
    "mobilevitv2": Override("the last stage holds a patch", {"image_size": 128}),
    "florence2": Override(
        _CHANNELS,
        _in(
            "vision_config",
            {
                "embed_dim": [8, 16, 32, 32],
                "num_heads": [2, 2, 4, 4],
                "num_groups": [2, 2, 4, 4],
                "depths": [1, 1, 1, 1],
                "window_size": 4,
                "projection_dim": 32,
            },
        ),
    ),
    "shieldgemma2": Override("two answers that the vocabulary holds", {"yes_token_index": 20, "no_token_index": 21}),
    **{name: Override(_NO_DEFAULT, {"image_token_index": 70}) for name in ("blip-2", "instructblip")},
    "instructblipvideo": Override(_NO_DEFAULT, {"video_token_index": 70}),
    "mllama": Override("its vision returns two layers side by side", {"vision_config.vision_output_dim": 64}),
    "unlimited_ocr": Override(_OTHER_NAMES, _in("vision_config.sam_config", _SAM)),
    "molmo2": Override(_LAYERS, {"adapter_config.vision_feature_layer": [1, 0]}),
    "step3p7": Override(
        "one layer of each kind",
        _in(
            "text_config",
            {"sliding_window": 6, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
        ),
    ),
    "muse_spark": Override(
        "a pyramid that ends in the text's width; four patches in a row are one",
        _in("audio_config", {"out_hidden_size": 32, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4})
        | {"out_hidden_size": 128},
    ),
    "ernie4_5_vl_moe": Override(_SECTIONS, {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}),
    **{
        name: Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE})
        for name in (
            "glm_ocr",
            "glmga",
            "glm46v",
            "glm4v",
            "paddleocr_vl",
            "qwen2_5_omni_thinker",
            "qwen2_5_vl",
            "qwen2_vl",
            "hunyuan_vl",
        )
    },
    "glm4v_moe": Override(_SECTIONS, {"text_config.rope_parameters": {**_M_ROPE, "mrope_section": [1, 1, 0]}}),
}

# Configurations whose defaults contradict each other, and the values to use instead.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {}


def defaults_of(model_type: str, config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The default fields of a type's configuration."""
    return config_class(**DEFAULTS.get(model_type, {})).to_dict()


def overridden(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a shrunken configuration with those of its type's override."""
    override = OVERRIDES.get(model_type)
    for name, value in override.fields.items() if override else ():
        *path, last = name.split(".")
        inner = values
        for step in path:
            inner = inner.setdefault(step, {})
        if value is ...:
            inner.pop(last, None)
        else:
            inner[last] = value
    return values
