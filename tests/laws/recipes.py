"""The recipes of the papers, and the list of all recipes."""

from __future__ import annotations

from collections.abc import Callable

from tests import zoo
from tests.laws.literature import LITERATURE
from tests.laws.more_recipes import ELSEWHERE, MIXED, ORDERS
from tests.laws.recipe import ENCODER_DECODER, GATED, WITH_BIAS, Recipe, at, shipped
from tests.matrix import FULL
from tests.reference import methods as by_hand
from tests.reference import other_sites
from tests.reference.methods import Method, together
from tests.reference.reference import Reference


def _only(edit: str, which: str, s: float, keep: Callable[[int], bool]) -> Method:
    def equation(at, w):
        return at.h + s * by_hand.forms.adapter(w("adapter"), at.x, "relu")

    return by_hand.at_sublayers(edit, which, equation, keep)


def _head(ref: Reference, weights: by_hand.Weights) -> None:
    name = next(n for n, m in ref.model.named_modules() if m is ref.model.get_output_embeddings())
    w = by_hand.part(weights, "e", "head", "lora")
    ref.linear(by_hand.Rows(name), lambda h, x: h + by_hand.forms.lora(w, x, 4.0))


LINEAR = (
    Recipe(
        "lora",
        "edit e at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=4, alpha=8) }",
        by_hand.lora("e", "q v", 8.0),
        identity=True,
        folds=True,
    ),
    Recipe(
        "rslora-everywhere",
        "edit e at layer[*].attn.k | layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down\n"
        "  { h += lora(x, r=4, alpha=6, rslora=true, dropout=0.1) }",
        by_hand.lora("e", "k o up down", 6.0, rslora=True),
        identity=True,
        folds=True,
    ),
    Recipe(
        "lora-gate",
        at("layer[*].ffn.gate", "lora(x, r=4)"),
        by_hand.lora("e", "gate", 4.0),
        identity=True,
        folds=True,
        on=GATED,
    ),
    Recipe(
        "lowrank",
        "edit e at layer[*].attn.q | layer[*].ffn.down { w = w + lowrank(r=4, alpha=8) }",
        by_hand.lowrank("e", "q down", 8.0),
        identity=True,
        folds=True,
    ),
    Recipe(
        "dora",
        "edit e at layer[*].attn.q | layer[*].attn.v | layer[*].ffn.up { w = magnitude(w + lowrank(r=4, alpha=8)) }",
        by_hand.dora("e", "q v up", 8.0),
        identity=True,
        folds=True,
    ),
    Recipe(
        "ia3",
        "edit kv at layer[*].attn.k | layer[*].attn.v { h *= vector(init=1) }\n"
        "edit ff at layer[*].ffn.hidden { h *= vector(init=1) }",
        together(by_hand.scaled("kv", "k v"), by_hand.scaled_hidden("ff")),
        identity=True,
        folds=True,
        edits=("kv", "ff"),
    ),
    Recipe(
        "bias",
        "edit e at layer[*].attn.q | layer[*].ffn.down { b += vector(init=0) }",
        other_sites.biased("e", "q down"),
        identity=True,
        folds=True,
        on=WITH_BIAS,
    ),
    Recipe(
        "gated-lora",
        "edit e at layer[*].attn.q | layer[*].attn.v { let g = gate(x)  h += g * lora(x, r=4, alpha=8) }",
        by_hand.gated_lora("e", "q v", 8.0),
        identity=True,
        folds=False,
    ),
    Recipe("head", at("head", "lora(x, r=4)"), _head, identity=True, folds=True),
)

SUB_LAYER = (
    Recipe(
        "houlsby",
        at("layer[*].attn | layer[*].ffn", "adapter(h, r=5, act=gelu)"),
        by_hand.sequential("e", "attn ffn", "gelu"),
        identity=False,
    ),
    Recipe(
        "double-seq-bn",
        at("layer[*].attn.self | layer[*].ffn", "adapter(h, reduction=16, act=silu)"),
        by_hand.sequential("e", "self ffn", "silu"),
        identity=False,
    ),
    Recipe(
        "seq-bn",
        at("layer[*].ffn", "adapter(norm(h + res), reduction=16, act=relu)"),
        by_hand.seq_bn("e", "ffn"),
        identity=False,
    ),
    Recipe(
        "seq-bn-attention",
        at("layer[*].attn", "adapter(norm(h + res), r=3, act=tanh)"),
        by_hand.seq_bn("e", "attn", "tanh"),
        identity=False,
    ),
    Recipe(
        "after-norm",
        at("layer[*].ffn.norm", "adapter(h, r=3)"),
        by_hand.after_norm("e"),
        identity=False,
    ),
    Recipe(
        "par-bn",
        at("layer[*].ffn", "4 * adapter(x, reduction=2, act=relu, init=lora)"),
        by_hand.parallel("e", "ffn", s=4.0),
        identity=True,
    ),
    Recipe(
        "par-bn-residual",
        at("layer[*].ffn", "4 * adapter(res, r=6, act=relu, init=lora)"),
        by_hand.parallel_residual("e", "ffn", s=4.0),
        identity=True,
    ),
    Recipe(
        "pa-pa",
        "edit e at layer[*].attn { h += adapter(x, r=3, act=leaky_relu, bias=false) }\n"
        "edit f at layer[*].ffn { h += adapter(x, r=4, act=sigmoid, norm_in=true, norm_out=true) }",
        together(by_hand.parallel("e", "attn", "leaky_relu"), by_hand.parallel("f", "ffn", "sigmoid")),
        identity=False,
        edits=("e", "f"),
    ),
    Recipe(
        "learned-scale",
        at("layer[*].ffn", "scalar(init=4) * adapter(x, r=4, init=lora)"),
        by_hand.learned_scale("e", "ffn"),
        identity=True,
    ),
    Recipe(
        "gated",
        "edit e at layer[*].attn | layer[*].ffn { let g = gate(h)  h += g * adapter(h, r=4, act=relu) }",
        by_hand.gated("e", "attn ffn"),
        identity=False,
    ),
    Recipe(
        "interpolated",
        "edit e at layer[*].ffn { let g = gate(x)  h = (1 - g) * h + g * adapter(h, r=4, act=tanh) }",
        by_hand.interpolated("e", "ffn", "tanh"),
        identity=False,
    ),
    Recipe(
        "gamma",
        at("layer[*].attn | layer[*].ffn", "vector(init=1)", "*="),
        by_hand.gamma("e", "attn ffn"),
        identity=True,
        folds=True,
    ),
    Recipe(
        "linear-adapter",
        at("layer[*].attn.o | layer[*].ffn.down", "2 * adapter(h, r=4, act=none)"),
        other_sites.linear_adapter("e", "o down", 2.0),
        identity=False,
        folds=True,
    ),
    Recipe(
        "in-order",
        "edit e at layer[*].ffn { h += adapter(x, r=4)  h += adapter(h, r=3, act=tanh) }\n"
        "edit f at layer[*].ffn { h += adapter(h, r=2, act=gelu) }",
        together(by_hand.twice("e", "ffn"), by_hand.sequential("f", "ffn", "gelu")),
        identity=False,
        edits=("e", "f"),
    ),
    Recipe(
        "by-layer",
        "edit e at layer[0].ffn { h += adapter(x, r=2) }\nedit f at layer[1..].ffn { h += 2 * adapter(x, r=4) }",
        together(_only("e", "ffn", 1.0, lambda i: i == 0), _only("f", "ffn", 2.0, lambda i: i >= 1)),
        identity=False,
        edits=("e", "f"),
    ),
    Recipe(
        "cross-only",
        at("decoder.layer[*].attn.cross", "adapter(x, r=4, act=tanh)"),
        by_hand.parallel("e", "cross", "tanh"),
        identity=False,
        on=ENCODER_DECODER,
    ),
)

ATTENTION = (
    Recipe(
        "prefix",
        "edit e at layer[*].attn { kv = concat(prefix(len=3), kv) }",
        by_hand.prefix("e"),
        identity=False,
    ),
    Recipe(
        "prefix-last",
        "edit e at layer[*].attn { kv = concat(kv, prefix(len=3)) }",
        by_hand.prefix("e"),
        identity=False,
    ),
    Recipe(
        "prefix-gated-form",
        "edit e at layer[*].attn { kv = concat(prefix(len=4), kv) }",
        by_hand.prefix("e", form="gated"),
        identity=False,
    ),
    Recipe(
        "prefix-mlp",
        "edit e at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }",
        by_hand.prefix_mlp("e"),
        identity=False,
    ),
    Recipe(
        "multi-head",
        at("layer[*].attn.heads", "2 * bottleneck(q, r=3, act=relu)"),
        by_hand.multi_head("e", s=2.0),
        identity=False,
    ),
    Recipe(
        "scaled-states",
        "edit e at layer[*].attn { q *= vector(init=1)  k *= vector(init=1)  v *= vector(init=1) }",
        by_hand.scaled_states("e", "q k v"),
        identity=True,
    ),
    Recipe(
        "mam",
        "edit prefix at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"
        "edit ffn at layer[*].ffn { h += 4 * adapter(x, r=5, act=relu, init=lora) }",
        by_hand.mam,
        identity=False,
        edits=("prefix", "ffn"),
    ),
    Recipe(
        "unipelt",
        shipped("unipelt", "l=3, r=4, reduction=8, reparam=mlp(5)"),
        together(
            by_hand.gated_lora("qv", "q v", 4.0),
            by_hand.prefix_mlp("prefix", gated=True),
            by_hand.gated("ffn", "ffn"),
        ),
        identity=False,
        on=("bart", "bert"),
        edits=("qv", "prefix", "ffn"),
    ),
    Recipe(
        "everything",
        "edit q at layer[*].attn.q { h += lora(x, r=2) }\n"
        "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"
        "edit m at layer[*].attn.heads { h += bottleneck(q, r=2) }\n"
        "edit a at layer[*].attn { h += adapter(x, r=2) }\n"
        "edit z at layer[*].ffn.hidden { h *= vector(init=1) }\n"
        "edit f at layer[*].ffn { let g = gate(x)  h += g * adapter(h, r=2) }",
        together(
            by_hand.lora("q", "q", 2.0),
            by_hand.prefix("p"),
            by_hand.multi_head("m"),
            by_hand.parallel("a", "attn"),
            by_hand.scaled_hidden("z"),
            by_hand.gate_x_adapter_h("f", "ffn"),
        ),
        identity=False,
        folds=frozenset({"q", "z"}),
        edits=("q", "p", "m", "a", "z", "f"),
    ),
)

RECIPES = (*LINEAR, *SUB_LAYER, *ATTENTION, *ORDERS, *ELSEWHERE, *MIXED, *LITERATURE)
NAMED = {recipe.name: recipe for recipe in RECIPES}
# Every recipe runs on BART or LLaMA, in turn (in the full run on both), and on one or two others,
# which resemble one of these.
STRIDES = {"bart": 2, "llama": 2, "t5": 4, "gpt2": 4, "bert": 6, "opt": 6, "roberta": 8, "qwen3": 8}
if FULL:
    STRIDES = {name: stride // 2 for name, stride in STRIDES.items()}


def meets(number: int, recipe: Recipe, name: str) -> bool:
    if recipe in MIXED:
        return name in ("bart" if recipe.name < "h" else "gpt2", "llama")
    narrow = len(recipe.on) < len(zoo.ARCHITECTURES)
    return name in recipe.on and (narrow or (number + list(STRIDES).index(name)) % STRIDES[name] == 0)


CASES = [(r, name) for name in zoo.ARCHITECTURES for i, r in enumerate(RECIPES) if meets(i, r, name)]
