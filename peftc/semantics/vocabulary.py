"""The words of the language that are not grammar: states, sites, facts, and the functions that are no forms."""

from __future__ import annotations

from collections.abc import Mapping

STATES: Mapping[str, str] = {
    "h": "the hidden state that a site computes",
    "x": "the direct input of a site",
    "res": "the residual stream that a site is added to",
    "c": "the context of an attention: what its keys and values are made of",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "kv": "keys and values",
    "z": "the hidden activation of an ffn",
    "w": "the weight of a Linear, norm or embedding",
    "b": "the bias of a Linear, norm or embedding",
    "wb": "the weight and the bias of a module, each by itself and where there is one",
}

PARAMETERS = ("w", "b")  # what `train` can name
WEIGHT_AND_BIAS = "wb"

STACKS = ("encoder", "decoder")
TOWERS = ("vision", "text", "audio")  # of models of several media; what else a model may call one, only it can say

# Words that choose among the stacks of a model, before the name that they may stand before. They are part of no site's path.
STACK_CHOICES: Mapping[str, str] = {"input": "embed", "output": "layer"}
STACK_CHOICE_HELP: Mapping[str, str] = {
    "input": "write `input.embed`: the embedding that reads the input, of an encoder-decoder the encoder's",
    "output": "write `output.layer[*]`: the layers of the stack that gives the output, of an encoder-decoder the decoder's",
}

# Site name -> the names that may follow it, directly or with a qualifier left out.
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
    "self": _ATTENTION,
    "cross": _ATTENTION,
    "ffn": _FFN,
    "mixer": ("norm", "add"),
    "experts": _FFN,
    "shared": _FFN,
    "q": ("norm",),
    "k": ("norm",),
}
SITES: tuple[str, ...] = tuple(dict.fromkeys(BELOW[""]))
PARTS = (
    "attn",
    "self",
    "cross",
    "ffn",
    "mixer",
    "experts",
    "shared",
)  # have Linears without a role, by their own names

# Site name -> its states, for the sites whose states no model can change. Others may have any.
_OF_LINEAR = ("h", "x", "w", "b", "wb")
STATES_AT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v", "o", "up", "gate", "down", "router", "head", "embed", "norm"), _OF_LINEAR),
    **dict.fromkeys(("attn", "self", "cross"), ("h", "x", "res", "c", "q", "k", "v", "kv")),
    "heads": ("h", "x", "q", "k", "v", "kv", "res", "c"),
    "ffn": ("h", "x", "res", "z"),
    "mixer": ("h", "x", "res"),
    "hidden": ("h", "x", "z", "res"),
}

FROZEN_MODULES = ("norm", "head")  # frozen sub-modules of a site, called as functions
CONCAT = "concat"
SHARED = "shared"

PLAN_COUNTS = ("trained", "stored", "changed", "served")  # facts of the whole plan
OF_EDIT = ("sites",)  # numbers about one edit
TRUTHS = ("foldable", "identity")  # facts about one edit that hold or do not
