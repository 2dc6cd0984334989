"""Names that someone may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

# What other libraries and other papers call the things that this language names.
ALIASES: Mapping[str, str] = {
    "q_proj": "q",
    "query": "q",
    "wq": "q",
    "k_proj": "k",
    "key": "k",
    "wk": "k",
    "v_proj": "v",
    "value": "v",
    "wv": "v",
    "o_proj": "o",
    "out_proj": "o",
    "out": "o",
    "c_proj": "o",
    "mlp": "ffn",
    "feed_forward": "ffn",
    "feedforward": "ffn",
    "ff": "ffn",
    "fc": "ffn",
    "fc1": "up",
    "up_proj": "up",
    "wi": "up",
    "intermediate": "up",
    "fc2": "down",
    "down_proj": "down",
    "wo": "down",
    "gate_proj": "gate",
    "attention": "attn",
    "self_attn": "attn",
    "self_attention": "self",
    "encoder_attn": "cross",
    "cross_attn": "cross",
    "cross_attention": "cross",
    "crossattention": "cross",
    "layers": "layer",
    "block": "layer",
    "blocks": "layer",
    "head_mask": "heads",
    "lm_head": "head",
    "classifier": "head",
    "embedding": "embed",
    "embeddings": "embed",
    "embed_tokens": "embed",
    "layer_norm": "norm",
    "layernorm": "norm",
    "ln": "norm",
    "final_norm": "norm",
    "residual": "res",
    "weight": "w",
    "bias": "b",
    "rank": "r",
    "dim": "r",
    "bottleneck_dim": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "activation": "act",
    "non_linearity": "act",
    "nonlinearity": "act",
    "length": "len",
    "prefix_length": "len",
    "num_virtual_tokens": "len",
    "use_rslora": "rslora",
    "init_weights": "init",
    "bottleneck_size": "r",
    "ia3": "vector",
    "scale": "scalar",
    "cat": "concat",
    "dora": "magnitude",
}

_LONGEST = 80  # characters of a name that someone may have meant to type
_MOST = 200  # names


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name of `known` that `name` most likely stands for: an alias, another spelling, or a typing error.

    Of very many names, only the first are looked at: the time that this takes grows with them.
    """
    if not isinstance(name, str) or len(name) > _LONGEST:  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        return None
    return _nearest(name, tuple(islice(known, _MOST)))


@lru_cache(maxsize=1024)
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    folded = {candidate.lower().replace("_", ""): candidate for candidate in reversed(names)}
    alias = ALIASES.get(name.lower().replace("-", "_"))
    if alias in names:
        return alias
    plain = name.lower().replace("_", "").replace("-", "")
    if plain in folded:
        return folded[plain]
    close = get_close_matches(plain, folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A `help:` text, or None where no name is near."""
    found = nearest(name, known)
    return f"did you mean `{found}`?" if found else None


def join_names(names: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`; of very many names, the first and how many more."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > _MOST:
        quoted = [*quoted[:_MOST], f"{len(quoted) - _MOST:,} more"]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}" if quoted else "none"
