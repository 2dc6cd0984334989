"""Recipes of the literature on weights, Linears and whole layers."""

from __future__ import annotations

from tests.laws.recipe import GATED, WITH_BIAS, Recipe, at, shipped
from tests.reference import literature as by_hand
from tests.reference import methods, other_sites
from tests.reference.methods import together

WITHOUT_BIAS = ("t5", "llama", "qwen3")
ALL_LINEARS = (
    "layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down"
)
QV, QV_DOWN = "layer[*].attn.q | layer[*].attn.v", "layer[*].attn.q | layer[*].attn.v | layer[*].ffn.down"
GLORA = "w = w + product(w, r=3) + lowrank(r=2)"

WEIGHTS = (
    Recipe("krona", at(QV, "kron(x)"), by_hand.krona("e", "q v"), identity=True, folds=True),
    Recipe(
        "lokr",
        at("layer[*].attn.k | layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down", "kron(x, r=2, alpha=6)"),
        by_hand.krona("e", "k o up down", 3.0),
        identity=True,
        folds=True,
        on=("bart", "gpt2", "qwen3"),
    ),
    Recipe("krona-res", at("layer[*].ffn", "kron(x) + scalar(init=1) * x"), by_hand.krona_res("e"), identity=False),
    Recipe(
        "krona-res-linear",
        at("layer[*].attn.q", "kron(x, rows=2, columns=16) + scalar(init=1) * x"),
        by_hand.krona_res_linear("e", "q"),
        identity=False,
        folds=True,
        on=("t5", "gpt2", "llama"),
    ),
    Recipe(
        "loha",
        f"edit e at {QV_DOWN} {{ w += hadamard(r=2, alpha=4) }}",
        by_hand.loha("e", "q v down", 4.0),
        identity=True,
        folds=True,
    ),
    Recipe(
        "glora",
        f"edit e at {QV_DOWN} {{ b = b + b * vector(init=0) + vector(init=0) + image(w)  {GLORA} }}",
        by_hand.glora("e", "q v down"),
        identity=True,
        folds=True,
        on=WITH_BIAS,
    ),
    Recipe(
        "bias-after-weight",
        "edit e at layer[*].attn.q { w += lowrank(r=2)  b += image(w) }",
        by_hand.bias_after_weight("e", "q"),
        identity=True,
        folds=True,
        on=("bart", "gpt2"),
    ),
    Recipe(
        "glora-without-bias",
        f"edit e at {QV_DOWN} {{ {GLORA} }}",
        by_hand.glora("e", "q v down", bias=False),
        identity=True,
        folds=True,
        on=WITHOUT_BIAS,
    ),
    Recipe(
        "oft",
        f"edit e at {QV_DOWN} {{ w = orthogonal(w, block=8) }}",
        by_hand.oft("e", "q v down", 8),
        identity=True,
        folds=True,
    ),
    Recipe(
        "oft-neumann",
        f"edit e at {QV_DOWN} {{ w = orthogonal(w, block=4, neumann=5) }}",
        by_hand.oft("e", "q v down", 4, 5),
        identity=True,
        folds=True,
        on=("gpt2", "llama"),
    ),
    Recipe("vera", at(QV_DOWN, "vera(x, r=70)"), by_hand.vera("e", "q v down"), identity=True, folds=True),
    Recipe(
        "said",
        f"edit e at {ALL_LINEARS} {{ w += fastfood(d=9) }}",
        by_hand.intrinsic_said("e", "q k v o up down"),
        identity=True,
        folds=True,
        on=("bart", "llama"),
    ),
    Recipe(
        "said-scaled",
        f"edit e at {ALL_LINEARS} {{ w += scalar(init=1) * fastfood(d=9, seed=1) }}",
        by_hand.intrinsic_said("e", "q k v o up down", scaled=True),
        identity=True,
        folds=True,
    ),
    Recipe("adalora", at(QV_DOWN, "svd(x, r=3, alpha=6)"), by_hand.adalora("e", "q v down", 6.0), True, folds=True),
)

LAYERS = (
    Recipe(
        "compacter",
        shipped("compacter", "reduction=4"),
        together(by_hand.compacter("e", "self ffn", "gelu_tanh"), by_hand.unfrozen("norms")),
        identity=False,
        folds=frozenset({"norms"}),
        edits=("e", "norms"),
    ),
    Recipe(
        "compacter-pp",
        shipped("compacter_pp", "reduction=8, n=2, rank=2"),
        together(by_hand.compacter("e", "ffn", "gelu_tanh"), by_hand.unfrozen("norms")),
        identity=False,
        folds=frozenset({"norms"}),
        on=("bert", "llama"),
        edits=("e", "norms"),
    ),
    Recipe(
        "phm-adapter",
        shipped("phm_adapter", "reduction=8, n=2"),
        together(by_hand.compacter("e", "self ffn", "gelu_tanh"), by_hand.unfrozen("norms")),
        identity=False,
        folds=frozenset({"norms"}),
        on=("t5", "opt"),
        edits=("e", "norms"),
    ),
    Recipe("loreft", at("layer[*]", "reft(h, r=2)"), by_hand.reft("e"), identity=False),
    Recipe(
        "direft",
        at("layer[*]", "reft(h, r=2, orthogonal=false, subtract=false)"),
        by_hand.reft("e", orthogonal=False, subtract=False),
        identity=False,
        on=("bart", "gpt2"),
    ),
    Recipe(
        "ladder",
        at("layer[*]", "ladder(h, r=3, expand=2, act=tanh, init=lora)"),
        by_hand.ladder("e", "tanh"),
        identity=True,
        on=("bart", "bert", "t5", "llama"),
    ),
    Recipe(
        "ladder-from-the-embedding",
        at("layer[*]", "ladder(h, x, r=3, temperature=0.1, replace=true)", "="),
        by_hand.ladder("e", temperature=0.1, start=True, replace=True),
        identity=False,
        on=("bert", "gpt2", "llama", "qwen3"),
    ),
    Recipe(
        "ladder-recipe",
        shipped("ladder", "reduction=8, expand=2, act=gelu"),
        by_hand.ladder("side", "gelu", 0.1, start=True, replace=True, on="output"),
        identity=False,
        on=("bart", "bert", "t5", "llama"),
        edits=("side",),
    ),
    Recipe(
        "layer-attention",
        at("layer[*]", "layer_attention(h)", "="),
        by_hand.layer_attention("e"),
        identity=False,
        on=("bart", "bert", "t5", "llama"),
    ),
    Recipe(
        "hyper",
        at("layer[*].attn | layer[*].ffn", "hyper(h, r=4, t=5, m=6, act=gelu)"),
        by_hand.hyper("e", "attn ffn", "gelu"),
        identity=False,
        on=("bart", "gpt2"),
    ),
    Recipe(
        "hyper-positions",
        at("layer[*].attn | layer[*].ffn", "hyper(h, r=3, t=4, m=6, act=tanh, nets=positions, bias=false, norm=false)"),
        by_hand.hyper("e", "attn ffn", "tanh", nets="positions"),
        identity=False,
        on=("bert", "t5"),
    ),
    Recipe(
        "adaptive-prefix",
        "edit e at layer[*].attn { kv = concat(scalar(init=1) * gate(x, rows=3) * prefix(len=3), kv) }",
        by_hand.adaptive_prefix("e"),
        identity=False,
        on=("bart", "bert", "llama"),
    ),
    Recipe(
        "difffit",
        "edit g at layer[*].attn | layer[*].ffn { h *= scalar(init=1) }\n"
        "train b = [b] at layer[*].attn.** | layer[*].ffn.**\n"
        "train n = [w] at layer[*].norm",
        together(by_hand.gammas("g", "attn ffn"), by_hand.unfrozen("b", "n")),
        identity=True,
        folds=True,
        on=WITH_BIAS,
        edits=("g", "b", "n"),
    ),
    Recipe(
        "layernorm",
        "train n = [w] at layer[*].norm\nedit q at layer[*].attn.q { h += lora(x, r=3) }",
        together(methods.lora("q", "q", 3.0), by_hand.unfrozen("n")),
        identity=True,
        folds=True,
        on=("t5", "llama", "qwen3"),
        edits=("n", "q"),
    ),
)

ROUTES = (
    Recipe(
        "adamix",
        shipped("adamix", "n=3, r=4, keep=true"),
        by_hand.mixture("mixture", "gelu"),
        identity=False,
        on=("bert", "gpt2"),
        edits=("mixture",),
    ),
)

MULTITASK = (
    Recipe(
        "lora-adapter",
        shipped("lora_adapter", "r=3, a=4"),
        together(
            methods.lora("lora", "q k v", 3.0),
            methods.for_one_task(
                together(methods.sequential("adapter", "attn", "gelu"), other_sites.hidden_adapter("adapter", "gelu"))
            ),
        ),
        identity=False,
        folds=frozenset({"lora"}),
        on=("bert", "llama"),
        edits=("lora", "adapter"),
    ),
    Recipe(
        "hypernetwork-adaptbert",
        shipped("hypernetwork_adaptbert", "a=4, t=5, m=6"),
        by_hand.hyper("adapter", "attn hidden", "gelu", nets="positions"),
        identity=False,
        on=("bert", "opt"),
        edits=("adapter",),
    ),
)

HYPER = (
    Recipe(
        "hypernetwork",
        shipped("hypernetwork", "reduction=8, t=5, m=6"),
        by_hand.hyper("adapter", "self ffn", "gelu_tanh", nets="stacks"),
        identity=False,
        on=("bart", "t5", "gpt2"),
        edits=("adapter",),
    ),
)

GATES = (
    Recipe(
        "qlora-gated",
        shipped("qlora", "r=3, dropout=0"),
        together(methods.lora("attn", "q k v o", 16.0), methods.lora("ffn", "up gate down", 16.0)),
        identity=True,
        folds=True,
        on=GATED,
        edits=("attn", "ffn"),
    ),
    Recipe(
        "adalora-gated",
        shipped("adalora", "r=3, alpha=6"),
        by_hand.adalora("all", "q k v o up gate down", 6.0),
        identity=True,
        folds=True,
        on=GATED,
        edits=("all",),
    ),
)

LITERATURE = (*WEIGHTS, *LAYERS, *GATES, *ROUTES, *HYPER, *MULTITASK)
