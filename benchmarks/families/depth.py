"""The layers of a configuration that a tiny model keeps: at least two, and one of each kind.

Some configurations list the kind of every layer (`layer_types`), some list layers by index
(`moe_layers`). Both are cut down to the same layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "layers",
    "conf_num_hidden_layers",
    "speech_encoder_layers",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
    "num_global_layers",
    "num_adapter_layers",
    "num_lstm_layers",
)
_PERIOD = re.compile(r"(_period|_interval|_step|_pattern|every_n_layers|_frequency|layer_group_size)$")
_INDICES = re.compile(r"(index|indices|idxs|indexes|_layers|layer_ids|global_attn)")
_NOT_LAYERS = {"stage_names", "out_features", "out_indices", "conv_dim", "conv_stride", "conv_kernel", "eos_token_id"}
MOST = 6


def shallow(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one configuration (not of nested ones) that depend on its depth, for a few of
    its layers.
    """
    fields = dict[str, Any]()
    for name in DEPTHS:
        if isinstance(values.get(name), int) and values[name] > 2:
            fields |= _stack(values, name)
    return fields


def _stack(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    deep = values[name]
    per_layer = {
        key: value
        for key, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == deep and key not in _NOT_LAYERS
    }
    index_lists = {
        key: value for key, value in values.items() if key not in per_layer and _is_index_list(key, value, deep)
    }
    exceptions = {int(i): v for i, v in (values.get("per_layer_config") or {}).items()}
    if not per_layer and not index_lists and not exceptions:
        return {name: 4 if _has_period(values) else 2}
    layers = _layers_of_each_kind(
        deep, {**per_layer, "per_layer_config": [exceptions.get(i) for i in range(deep)]}, index_lists
    )
    per_layer_config = (
        {"per_layer_config": {layers.index(i): v for i, v in exceptions.items() if i in layers}} if exceptions else {}
    )
    cut = {key: [value[i] for i in layers] for key, value in per_layer.items()}
    places = {key: [layers.index(i) for i in value if i in layers] for key, value in index_lists.items()}
    return {name: len(layers), **cut, **places, **per_layer_config}


def _layers_of_each_kind(deep: int, per_layer: Mapping[str, Any], index_lists: Mapping[str, Any]) -> list[int]:
    # One layer of each kind (its values in all lists); then the first ones
    # until there are two.
    kinds = dict[tuple[str, ...], int]()
    for i in range(deep):
        kind = tuple(str(value[i]) for value in per_layer.values()) + tuple(str(i in v) for v in index_lists.values())
        kinds.setdefault(kind, i)
    layers = set(list(kinds.values())[:MOST])
    for i in range(deep):
        if len(layers) >= 2:
            break
        layers.add(i)
    return sorted(layers)


def _is_index_list(key: str, value: Any, deep: int) -> bool:
    if key in _NOT_LAYERS or not isinstance(value, (list, tuple)) or not value or not _INDICES.search(key):
        return False
    return all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < deep for i in value)


def _has_period(values: Mapping[str, Any]) -> bool:
    return any(_PERIOD.search(key) and isinstance(v, int) and v > 1 for key, v in values.items())
