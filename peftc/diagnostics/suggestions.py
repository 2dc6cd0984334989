"""Suggestions for misspelled names, lists of names, and other common parts of messages."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

from peftc.diagnostics.diagnostic import Applicability, Diagnostic, Suggestion

# For a spec and a model in each other's place.
SPEC_FIRST = "the spec comes first: `peftc.compile(spec, model)`, `peftc plan SPEC --model MODEL`"

# Names of this language, and their synonyms in papers, Hugging Face and other libraries.
_SYNONYMS = {
    "q": "q_proj query wq",
    "k": "k_proj key wk",
    "v": "v_proj value wv",
    "o": "o_proj out_proj out c_proj",
    "ffn": "mlp feed_forward feedforward ff fc",
    "up": "fc1 up_proj wi intermediate",
    "down": "fc2 down_proj wo",
    "gate": "gate_proj",
    "attn": "attention self_attn",
    "self": "self_attention",
    "cross": "encoder_attn cross_attn cross_attention crossattention",
    "layer": "layers block blocks",
    "heads": "head_mask",
    "head": "lm_head classifier",
    "embed": "embedding embeddings embed_tokens",
    "norm": "layer_norm layernorm ln final_norm",
    "res": "residual",
    "w": "weight",
    "b": "bias",
    "r": "rank dim bottleneck_dim bottleneck_size",
    "d": "dim size width hidden_size",
    "x": "input inputs hidden_state hidden_states",
    "h": "hidden output outputs hidden_state hidden_states",
    "silu": "swish",
    "true": "yes on",
    "false": "no off",
    "lora": "loraconfig loralayer",
    "adapter": "bottleneckadapter adapterconfig",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "act": "activation non_linearity nonlinearity",
    "len": "length prefix_length num_virtual_tokens",
    "rslora": "use_rslora",
    "init": "init_weights",
    "vector": "ia3",
    "scalar": "scale",
    "concat": "cat",
    "kaiming": "kaiming_uniform kaiming_uniform_ he",
    "normal": "gaussian normal_ randn",
    "magnitude": "dora",
}
_ALIASES: dict[str, list[str]] = {}
for _name, _aliases in _SYNONYMS.items():
    for _alias in _aliases.split():
        _ALIASES.setdefault(_alias, []).append(_name)

# A search takes longer for longer and for more names, which may be untrusted.
_MAX_LENGTH = 80
_MAX_NAMES = 200
FEW_NAMES = 4
SIMILAR = 0.6


def nearest(name: str, known: Iterable[str], similarity: float = SIMILAR) -> str | None:
    """The name in `known` that `name` most likely means: a synonym or a similar spelling.

    Args: `similarity`: the least ratio of `difflib` for a spelling.
    """
    if not isinstance(name, str) or len(name) > _MAX_LENGTH:  # pyright: ignore[reportUnnecessaryIsInstance]  # a caller from Python may pass anything
        return None
    return _nearest(name, tuple(islice(known, _MAX_NAMES)), similarity)


@lru_cache(maxsize=1024)
def _nearest(name: str, names: tuple[str, ...], similarity: float) -> str | None:
    aliases = _ALIASES.get(name.lower().replace("-", "_"), ())
    if (alias := next((each for each in aliases if each in names), None)) is not None:
        return alias
    folded = {candidate.lower().replace("_", ""): candidate for candidate in reversed(names)}
    word = name.lower().replace("_", "").replace("-", "")
    matches = [word] if word in folded else get_close_matches(word, folded, n=FEW_NAMES, cutoff=similarity)
    swapped = (match for match in matches if sorted(match) == sorted(word))  # the same letters: `lroa` is `lora`
    return folded[next(swapped, matches[0])] if matches else None


def did_you_mean(name: str, known: Iterable[str], applicability: Applicability = "safe") -> Suggestion | None:
    """A text for `Diagnostic.help`, or None if no name is similar."""
    suggestion = nearest(name, known)
    return instead_of(name, suggestion, applicability) if suggestion else None


def instead_of(old: str, new: str, applicability: Applicability = "safe") -> Suggestion:
    """A text for `Diagnostic.help`: `old` was meant to be `new`."""
    return Suggestion(f"did you mean `{new}`?", old, new, applicability)


def join_names(names: Iterable[str], last: str = "and") -> str:
    """The names in a sentence: `a`, `b` and `c`. Of more than 200 names, the others are counted."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > _MAX_NAMES:
        quoted = [*quoted[:_MAX_NAMES], f"{len(quoted) - _MAX_NAMES:,} more"]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}" if quoted else "none"


def plural(number: int, noun: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    if len(names) <= FEW_NAMES:
        return join_names(names)
    return f"{', '.join(f'`{name}`' for name in names[:FEW_NAMES])} and {len(names) - FEW_NAMES} more"


def for_sites(diagnostics: Iterable[Diagnostic], of: str = "") -> Diagnostic:
    """One message for what is wrong at many sites: the first, with how many more there are."""
    first, *others = diagnostics
    note = f"the same at {plural(len(others), 'more site')}{of}"
    return replace(first, notes=(*first.notes, note)) if others else first
