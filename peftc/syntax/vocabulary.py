"""Names that are not in the grammar: states, sites, facts and built-in functions."""

from collections.abc import Mapping

STATES: Mapping[str, str] = {
    "h": "the hidden state that a site computes",
    "x": "the direct input of a site",
    "res": "the residual stream that a site is added to",
    "c": "the context of an attention, the source of its keys and values",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "kv": "keys and values",
    "z": "the hidden activation of an ffn",
    "w": "the weight of a Linear, norm or embedding",
    "b": "the bias of a Linear, norm or embedding",
    "wb": "the weight and the bias of a module, separately, as far as they exist",
}


def state_name(name: str) -> str:
    """What is wrong with a state as the name of something else."""
    return f"`{name}` is a state ({STATES[name]})"


PARAMETERS = ("w", "b")  # the states that `train` takes
WEIGHT_AND_BIAS = "wb"

DECODER = "decoder"
STACKS = ("encoder", DECODER)
TOWERS = ("vision", "text", "audio")  # of multimodal models, which may have towers of other names, too

# Qualifiers that select a stack by its role, with the step that must follow.
STACK_CHOICES: Mapping[str, str] = {"input": "embed", "output": "layer"}
STACK_CHOICE_HELP: Mapping[str, str] = {
    "input": "write `input.embed`: the embedding of the input, in an encoder-decoder that of the encoder",
    "output": "write `output.layer[*]`: the stack that computes the output, in an encoder-decoder the decoder",
}

# Site name -> the names that may follow it, directly or with an omitted qualifier.
_LINEARS = ("q", "k", "v", "o")
_ATTENTION = (*_LINEARS, "heads", "norm", "add")
_FFN = ("up", "gate", "down", "hidden", "router", "experts", "shared", "norm", "add")
_LAYER = ("attn", "self", "cross", "ffn", "mixer", "norm", "add", *_ATTENTION, *_FFN)
_TOP = ("embed", "layer", "norm", "head")
BELOW: Mapping[str, tuple[str, ...]] = {
    "": (*STACKS, *TOWERS, *_TOP, *_LAYER),
    **dict.fromkeys(TOWERS, (*STACKS, *_TOP, *_LAYER)),
    **dict.fromkeys(STACKS, (*_TOP, *_LAYER)),
    "layer": _LAYER,
    "attn": ("self", "cross", *_ATTENTION),
    **dict.fromkeys(("self", "cross"), _ATTENTION),
    "mixer": ("norm", "add"),
    **dict.fromkeys(("ffn", "experts", "shared"), _FFN),
    **dict.fromkeys(("q", "k"), ("norm",)),
}
SITES: tuple[str, ...] = tuple(dict.fromkeys(BELOW[""]))
# Sites whose Linears without a role are named as in the model.
PARTS = ("attn", "self", "cross", "ffn", "mixer", "experts", "shared")

EVERY_MODULE, LINEAR = "**", "linear"  # `layer[*].**`: all modules below; `layer[*].**.linear`: the Linears

# Site name -> its states. A site that is not listed may have any state.
_OF_LINEAR = ("h", "x", "w", "b", "wb")
STATES_AT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v", "o", "up", "gate", "down", "router", "head", "embed", "norm"), _OF_LINEAR),
    **dict.fromkeys(("attn", "self", "cross"), ("h", "x", "res", "c", "q", "k", "v", "kv")),
    "heads": ("h", "x", "q", "k", "v", "kv", "res", "c"),
    "ffn": ("h", "x", "res", "z"),
    "mixer": ("h", "x", "res"),
    "hidden": ("h", "x", "z", "res"),
}

FROZEN_MODULES = ("norm", "head")  # frozen modules of a site that equations can call
CONCAT = "concat"
WEIGHT = "weight"  # of Linears of the same sub-layer, by their names: `weight(k, v)`
SHARED = "shared"
LAYER = "layer"  # as a number: that of the layer of a site

PLAN_COUNTS = ("trained", "stored", "changed", "served")  # facts of `expect` about the whole plan
PREDICATES = ("foldable", "identity")  # facts about one edit that are true or false
EDIT_FACTS = ("sites", *PREDICATES)  # facts about one edit
