"""The values of a configuration that the function of a model depends on."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

Value = bool | int | float | str | None

# Keys that cannot change what a model computes from its inputs when it does not train: each group with the reason.
_NAMES = {  # what a model and its labels are called, who wrote it, and with which versions
    "architectures",
    "auto_map",
    "finetuning_task",
    "id2label",
    "label2id",
    "name_or_path",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "transformers_version",
}
_STORAGE = {  # how weights are stored: they may be cast or quantised; what is tied is compared itself
    "dtype",
    "quantization_config",
    "tie_encoder_decoder",
    "tie_word_embeddings",
    "torch_dtype",
    "use_bfloat16",
}
_OUTPUTS = {  # what is returned beside the result, and how the same result is computed
    "attn_implementation",
    "chunk_size_feed_forward",
    "experts_implementation",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "return_dict",
    "torchscript",
    "use_cache",
    "use_return_dict",
}
_TOKENS = {  # which ids stand for what: a matter of the tokenizer and the batch, and set by users after loading
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "mask_token_id",
    "pad_token_id",
    "sep_token_id",
}
_GENERATION = {  # defaults of `generate`
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
WITHOUT_EFFECT = _NAMES | _STORAGE | _OUTPUTS | _TOKENS | _GENERATION
# Rates of what is dropped, first values (the weights have replaced them) and terms of losses act in training alone.
_TRAINING = re.compile(r"drop|loss|jitter|apply_spec_augment|mask_(time|feature)_|label_smoothing|^init_|^initializer_")
_PRIVATE = "_"  # keys of transformers' own, such as where the file was


def settings(model: nn.Module) -> dict[str, Value]:
    """What the configuration says, by dotted key, less what has no effect; nothing where a model has no configuration."""
    return dict(_flat(getattr(model, "config", None)))


def defaults(model: nn.Module) -> dict[str, Value]:
    """What the classes of the configuration say of these keys where nobody says otherwise, as far as they can be asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(_flat(getattr(model, "config", None), of_class=True))


def differences(
    there: Mapping[str, Value], own: frozenset[str], here: Mapping[str, Value], usual: Mapping[str, Value]
) -> Iterator[tuple[str, str, str]]:
    """Keys whose values differ, with both values as text.

    A key that one side alone has is one that its version of transformers has added (or that the other has dropped): it differs
    where its value is not the default of its class.

    Args: `there`: of another time, `own` being the keys of it that were not at their defaults. `usual`: the defaults of `here`.
    """
    for key in sorted({*there, *here}):
        if key in there and key in here:
            if there[key] != here[key]:
                yield key, str(there[key]), str(here[key])
        elif key in there and key in own:
            yield key, str(there[key]), "not set"
        elif key in here and not _is_default(key, here, usual):
            yield key, "not set", str(here[key])


def not_default(found: Mapping[str, Value], usual: Mapping[str, Value]) -> frozenset[str]:
    """The keys whose values are not the defaults, as far as these are known."""
    return frozenset(key for key in found if not _is_default(key, found, usual))


def _is_default(key: str, found: Mapping[str, Value], usual: Mapping[str, Value]) -> bool:
    """Whether a value is that of its class. A key that the class does not have is somebody's own; if the class cannot be asked, none is."""
    return usual[key] == found[key] if key in usual else not _is_asked(key, found, usual)


def _is_asked(key: str, found: Mapping[str, Value], usual: Mapping[str, Value]) -> bool:
    """Whether the defaults of the configuration that a key stands in are known: each has a `model_type`."""
    while key:
        key = key.rpartition(".")[0]
        owner = f"{key}.model_type" if key else "model_type"
        if owner in found:
            return owner in usual
    return bool(usual)


def _flat(config: object, prefix: str = "", of_class: bool = False) -> Iterator[tuple[str, Value]]:
    for key, value in _values(config, of_class).items():
        if _has_effect(key):
            child = vars(config).get(key)  # some classes refuse to give what differs between layers
            if callable(getattr(child, "to_dict", None)):
                yield from _flat(child, f"{prefix}{key}.", of_class)
            else:
                yield from _leaves(f"{prefix}{key}", value)


def _values(config: object, of_class: bool) -> dict[str, Any]:
    """A configuration as a dictionary; nothing where it cannot be one."""
    if not callable(getattr(config, "to_dict", None)):
        return {}
    try:
        made: Any = type(config)() if of_class else config
        found = made.to_dict()
    except Exception:  # a class that cannot be made without arguments has no defaults
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _leaves(key: str, value: object) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping) and value:
        for name, part in cast(Mapping[object, object], value).items():
            if _has_effect(str(name)):
                yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, _plain(value)


def _has_effect(key: str) -> bool:
    return not (key.startswith(_PRIVATE) or key in WITHOUT_EFFECT or _TRAINING.search(key))


def _plain(value: object) -> Value:
    """A value as JSON keeps it: 10000.0 is 10000, lists are texts."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if value is None or isinstance(value, bool | int | str):
        return value
    return json.dumps(value, default=str, sort_keys=True)
