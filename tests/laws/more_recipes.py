"""Recipes without a paper: edits in every order, at other sites, and several at one Linear."""

from __future__ import annotations

from tests.laws.recipe import Recipe, at
from tests.reference import methods as by_hand
from tests.reference import other_sites
from tests.reference.methods import Method, together

ORDERED = {  # edits that read different states of one sub-layer, hence live in different modules
    "x": "adapter(x, r=2, act=tanh)",
    "h": "adapter(h, r=2, act=tanh)",
    "r": "adapter(res, r=2, act=tanh)",
    "n": "adapter(norm(h + res), r=2, act=tanh)",
}

ORDERS = (
    *(
        Recipe(
            f"order-{site}-{order}",
            "\n".join(f"edit {e} at layer[*].{site} {{ h += {ORDERED[e]} }}" for e in order),
            together(*(other_sites.ordered(e, site) for e in order)),
            identity=False,
            on=("bart", "t5", "gpt2", "llama", "opt"),
            edits=tuple(order),
        )
        for site, orders in {"ffn": ("xhr", "rhx", "nxh"), "attn": ("hrx", "nxh")}.items()
        for order in orders
    ),
    Recipe(
        "order-linear",
        "edit e at layer[*].attn.v { h += lora(x, r=3) }\n"
        "edit f at layer[*].attn.v { h *= vector(init=1) }\n"
        "edit g at layer[*].attn.v { h += adapter(h, r=2) }",
        together(by_hand.lora("e", "v", 3.0), by_hand.scaled("f", "v"), other_sites.linear_act("g", "v")),
        identity=False,
        folds=frozenset({"e", "f"}),
        edits=("e", "f", "g"),
    ),
)

ELSEWHERE = (  # sites and states that no published recipe uses
    Recipe("layer", at("layer[*]", "adapter(x, r=3, act=tanh)"), other_sites.whole_layers("e"), identity=False),
    Recipe(
        "add",
        at("layer[*].attn.add | layer[*].ffn.add", "adapter(h, r=3, act=tanh)"),
        other_sites.after_sum("e", "attn ffn"),
        identity=False,
    ),
    Recipe("hidden", at("layer[*].ffn.hidden", "adapter(h, r=3, act=tanh)"), other_sites.hidden_adapter("e"), False),
    Recipe("up", at("layer[*].ffn.up", "adapter(h, r=3, act=tanh)"), other_sites.linear_act("e", "up", "tanh"), False),
    Recipe(
        "norm-weight",
        "edit e at layer[*].ffn.norm { w += vector(init=0) }",
        other_sites.norm_weight("e"),
        True,
        folds=True,
    ),
    Recipe("heads", at("layer[*].attn.heads", "vector(init=1)", "*="), other_sites.scaled_heads("e"), True, folds=None),
    Recipe("queries", "edit e at layer[*].attn { q += bottleneck(q, r=3) }", other_sites.query_bottleneck("e"), False),
    Recipe(
        "arithmetic",
        "edit e at layer[*].ffn { h = 0.5 * h - adapter(x, r=3) / 3 }",
        other_sites.arithmetic("e", "ffn"),
        identity=False,
    ),
    Recipe(
        "head-of",
        (
            "edit e at head { h = 0.5 * h + 0.5 * head(x + adapter(x, r=3, act=tanh)) }\n"
            "edit s at head { h *= scalar(init=1) }"
        ),
        other_sites.head_of_changed("e"),
        identity=False,
        folds=None,
        on=("bart", "gpt2", "llama"),
        edits=("e", "s"),
    ),
    Recipe(
        "embeddings",
        at("embed", "vector(init=1)", "*="),
        other_sites.embeddings("e"),
        identity=True,
        folds=None,
        on=("bart", "bert", "gpt2", "llama"),
    ),
)


def _pair(name: str, one: str, two: str, methods: tuple[Method, Method], folds: frozenset[str] | bool | None) -> Recipe:
    return Recipe(name, f"edit e at {one}\nedit f at {two}", together(*methods), False, folds, edits=("e", "f"))


_V, _DOWN, _FFN, _HIDDEN = "layer[*].attn.v", "layer[*].ffn.down", "layer[*].ffn", "layer[*].ffn.hidden"
_LORA, _VECTOR, _SEQUENTIAL = "{ h += lora(x, r=3) }", "{ h *= vector(init=2) }", "{ h += adapter(h, r=3, act=tanh) }"
_PARALLEL, _DORA = "{ h += adapter(x, r=3, act=tanh) }", "{ w = magnitude(w + lowrank(r=3)) }"

MIXED = (  # edits that fold although another edit, perhaps an unfoldable one, is at the same Linear
    _pair(
        "adapter-vector",
        f"{_V} {_SEQUENTIAL}",
        f"{_V} {_VECTOR}",
        (other_sites.linear_act("e", "v", "tanh"), by_hand.scaled("f", "v")),
        False,
    ),
    _pair(
        "adapter-lora",
        f"{_V} {_SEQUENTIAL}",
        f"{_V} {_LORA}",
        (other_sites.linear_act("e", "v", "tanh"), by_hand.lora("f", "v", 3.0)),
        False,
    ),
    _pair(
        "lora-adapter",
        f"{_V} {_LORA}",
        f"{_V} {_SEQUENTIAL}",
        (by_hand.lora("e", "v", 3.0), other_sites.linear_act("f", "v", "tanh")),
        frozenset("e"),
    ),
    _pair(
        "parallel-vector",
        f"{_V} {_PARALLEL}",
        f"{_V} {_VECTOR}",
        (other_sites.linear_parallel("e", "v", "tanh"), by_hand.scaled("f", "v")),
        False,
    ),
    _pair(
        "parallel-lora",
        f"{_V} {_PARALLEL}",
        f"{_V} {_LORA}",
        (other_sites.linear_parallel("e", "v", "tanh"), by_hand.lora("f", "v", 3.0)),
        None,
    ),
    _pair(
        "vector-lora",
        f"{_V} {_VECTOR}",
        f"{_V} {_LORA}",
        (by_hand.scaled("e", "v"), by_hand.lora("f", "v", 3.0)),
        True,
    ),
    _pair(
        "hidden-dora",
        f"{_HIDDEN} {_VECTOR}",
        f"{_DOWN} {_DORA}",
        (by_hand.scaled_hidden("e"), by_hand.dora("f", "down", 3.0)),
        None,
    ),
    _pair(
        "dora-hidden",
        f"{_DOWN} {_DORA}",
        f"{_HIDDEN} {_VECTOR}",
        (by_hand.dora("e", "down", 3.0), by_hand.scaled_hidden("f")),
        None,
    ),
    _pair(
        "hidden-lora",
        f"{_HIDDEN} {_VECTOR}",
        f"{_DOWN} {_LORA}",
        (by_hand.scaled_hidden("e"), by_hand.lora("f", "down", 3.0)),
        None,
    ),
    _pair(
        "hidden-adapter",
        f"{_HIDDEN} {_VECTOR}",
        f"{_DOWN} {_PARALLEL}",
        (by_hand.scaled_hidden("e"), other_sites.linear_parallel("f", "down", "tanh")),
        None,
    ),
    _pair(
        "down-then-gamma",
        f"{_DOWN} {_SEQUENTIAL}",
        f"{_FFN} {_VECTOR}",
        (other_sites.linear_act("e", "down", "tanh"), by_hand.gamma("f", "ffn")),
        False,
    ),
    _pair(
        "down-lora-then-gamma",
        f"{_DOWN} {_LORA}",
        f"{_FFN} {_VECTOR}",
        (by_hand.lora("e", "down", 3.0), by_hand.gamma("f", "ffn")),
        True,
    ),
    _pair(
        "gamma-then-down-lora",
        f"{_FFN} {_VECTOR}",
        f"{_DOWN} {_LORA}",
        (by_hand.gamma("e", "ffn"), by_hand.lora("f", "down", 3.0)),
        None,
    ),
    _pair(
        "parallel-then-gamma",
        f"{_FFN} {_PARALLEL}",
        f"{_FFN} {_VECTOR}",
        (by_hand.parallel("e", "ffn", "tanh"), by_hand.gamma("f", "ffn")),
        False,
    ),
    _pair(
        "gamma-then-parallel",
        f"{_FFN} {_VECTOR}",
        f"{_FFN} {_PARALLEL}",
        (by_hand.gamma("e", "ffn"), by_hand.parallel("f", "ffn", "tanh")),
        frozenset("e"),
    ),
)
