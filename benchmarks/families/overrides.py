"""What cannot be made small by the names of fields alone, with the reason of each.

A dotted name is a field of a configuration inside; `...` as a value takes the field away, so that its default is used.
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

OVERRIDES: Mapping[str, Override] = {
    "bamba": Override(_HYBRID, {"layer_types": ["linear_attention", "full_attention"]}),
    "granitemoehybrid": Override(_HYBRID, {"layer_types": ["linear_attention", "full_attention"]}),
    "jamba": Override(_HYBRID, {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4}),
    "recurrent_gemma": Override(_HYBRID, {"num_hidden_layers": 3}),
    "falcon_h1": Override(_MAMBA, {"mamba_d_ssm": 64}),
    "mamba2": Override(_MAMBA, {"num_heads": 4, "head_dim": 16, "n_groups": 2}),
    "zamba2": Override(
        _MAMBA,
        {"n_mamba_heads": 4, "mamba_headdim": 16, "attention_hidden_size": 64, "attention_head_dim": 16},
    ),
    "zamba": Override(
        "heads are as wide as twice the hidden size", {"attention_hidden_size": 64, "attention_head_dim": 16}
    ),
    "nemotron": Override("no default of a field that the model divides by", {"num_key_value_heads": 2}),
    "esm": Override("no default of a field that the embedding needs", {"vocab_size": 33, "pad_token_id": 1}),
    "reformer": Override(
        "positions factorise; the attention's default is causal only where it decodes",
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
    "mobilebert": Override("a bottleneck of its own width", {"true_hidden_size": 32, "intra_bottleneck_size": 32}),
    "siglip2": Override("an image is a sequence of patches", {"vision_config.num_patches": 16}),
    "glm46v": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "glm4v": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "glm4v_moe": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "glm_ocr": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "glmga": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "paddleocr_vl": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "qwen2_5_omni_thinker": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "qwen2_5_vl": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
    "qwen2_vl": Override(_SECTIONS, {"text_config.rope_parameters": _M_ROPE}),
}


# Configurations whose defaults contradict each other, and what they are made with instead.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {"gemma4_assistant": {"hidden_size_per_layer_input": 0}}


def defaults_of(model_type: str, config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The fields of a type's configuration as it is when nothing is said."""
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
