"""The methods of PEFT beside those of peftc: which spec each is, which test compares the two, and
how many parameters each trains on a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from peft import PeftConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

import peftc
from peftc.exchange.peft_format.rows.attention.cached import PREFIX_FORM, SINK_FORM
from peftc.exchange.peft_format.table import TYPES, WITHOUT_EQUATION
from peftc.planning.report.plan import Plan
from peftc.semantics.recipes import recipes

QV = "layer[*].attn.{q, v}"
Settings = Mapping[str, Any]
Values = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """A method of a peer.

    Attributes:
        recipe: the file of `specs/` that is this method.
        values: the peer's configuration with the settings of the recipe.
        equation: of one that is no recipe, with its settings in braces, and the place; its form is
            that which adapters of the peer come with.
        settings: those of the equation, or others of the recipe than its defaults.
        small: those for small models.
        targets: the peer's modules by the type of the model, where they are not those of the sites.
        note: why the two counts differ, or why there are none.
        paper: where the recipe names none.
        causal: whether the peer has it for language models alone.
    """

    recipe: str = ""
    values: Values | None = None
    equation: tuple[str, str] = ("", "")
    settings: Settings = field(default_factory=dict[str, Any])
    small: Settings = field(default_factory=dict[str, Any])
    targets: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: str = ""
    paper: str = ""
    causal: bool = False


def _lengths(s: Any) -> dict[str, Any]:
    return {"num_virtual_tokens": s["len"]}


_SMALL_BLOCKS = {"block": 8}
PEFT: Mapping[str, Method] = {
    "ADALORA": Method("adalora", lambda s: {"init_r": s["r"], "total_step": 10}, small={"r": 4}),
    "ADAMSS": Method(
        equation=("h += adamss(x, …)", QV),
        note="its matrices are as large as the clusters of rows that scikit-learn finds in the weights",
    ),
    "ADAPTION_PROMPT": Method(
        equation=("h += adaption_prompt(q, weight(k, v), len={len})", "layer[-2..].attn.heads"),
        values=lambda s: {"adapter_len": s["len"], "adapter_layers": 2},
        settings={"len": 10},
        targets={"llama": "self_attn"},
        note="the softmax of PEFT is in float32, and the test gives it float64",
        paper="2303.16199",
        causal=True,
    ),
    "BEFT": Method("beft", lambda s: {}),
    "BOFT": Method("boft", lambda s: {"boft_block_size": s["block"]}),
    "C3A": Method("c3a", lambda s: {"block_size": s["block"]}, small=_SMALL_BLOCKS),
    "CARTRIDGE": Method(
        equation=("kv = concat(cached_sink(len=1), cached_prefix(len={n}), kv)", "layer[*].attn"),
        values=lambda s: {"num_virtual_tokens": s["n"] + 1, "num_frozen_tokens": 1},
        settings={"n": 15},
        paper="2506.06266",
    ),
    "CPT": Method(
        "prompt_tuning",
        lambda s: {"cpt_token_ids": [0] * s["len"], "cpt_mask": [1] * s["len"], "cpt_tokens_type_mask": [1] * s["len"]},
        small={"len": 5},
        note="the tokens of the examples move within bounds, which the loss has",
        paper="2410.17222",
        causal=True,
    ),
    "DEFT": Method("deft", lambda s: {"r": s["r"]}, small={"r": 4}),
    "DELORA": Method("delora", lambda s: {"r": s["r"]}, small={"r": 4}),
    "FOURIERFT": Method("fourierft", lambda s: {"n_frequency": s["n"]}, small={"n": 40}),
    "FROD": Method(
        "frod",
        small={"n": 20},
        note="PEFT trains a part of the entries of S outside of its diagonal, in places that all layers have in common",
    ),
    "GLORA": Method("glora_kinds", lambda s: {"r": s["r"]}, small={"r": 4}),
    "GRALORA": Method("gralora", lambda s: {"r": s["r"], "gralora_k": s["n"]}, small={"r": 4}),
    "HIRA": Method("hira", lambda s: {"r": s["r"]}, small={"r": 4}),
    "HRA": Method("hra", lambda s: {"r": s["r"]}, small={"r": 4}),
    "IA3": Method(
        "ia3",
        lambda s: {},
        targets={
            "bert": [r".*(key|value|layer\.\d+\.output\.dense)", r".*layer\.\d+\.output\.dense"],
            "llama": [r".*(k_proj|v_proj|down_proj)", r".*down_proj"],
        },
    ),
    "LILY": Method(
        "lily",
        values=lambda s: {"r": s["r"], "num_B": s["n"]},
        small={"r": 4},
        # The modules of a name have matrices in common.
        targets={"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]},
    ),
    "LN_TUNING": Method("layernorm", lambda s: {}),
    "LOHA": Method("loha", lambda s: {"r": s["r"]}, small={"r": 4}),
    "LOKR": Method("lokr", lambda s: {"r": s["r"]}, small={"r": 2}),
    "LORA": Method("lora", lambda s: {"r": s["r"]}, small={"r": 4}),
    "MISS": Method("miss", lambda s: {"r": s["r"]}, small={"r": 4}),
    "MULTITASK_PROMPT_TUNING": Method(
        "multitask_prompt",
        values=lambda s: {**_lengths(s), "num_ranks": s["r"], "num_tasks": 1},
        small={"len": 5},
    ),
    "OFT": Method("oft", lambda s: {"oft_block_size": s["block"]}, small=_SMALL_BLOCKS),
    "OSF": Method(
        "osf",
        values=lambda s: {"effective_rank": s["r"]},
        small={"r": 4},
    ),
    "P_TUNING": Method("p_tuning", lambda s: {**_lengths(s), "encoder_hidden_size": s["m"]}, small={"len": 5, "m": 8}),
    "PEANUT": Method("peanut", lambda s: {"r": s["r"], "depth": 0}, small={"r": 4}),
    "POLY": Method(
        "poly",
        values=lambda s: {"r": s["r"], "n_skills": s["skills"], "n_tasks": 1},
        small={"r": 4},
    ),
    "PREFIX_TUNING": Method("prefix", lambda s: {"num_virtual_tokens": s["l"]}, small={"l": 3}),
    "PROMPT_TUNING": Method("prompt_tuning", _lengths, small={"len": 5}),
    "PSOFT": Method(
        "psoft",
        values=lambda s: {"r": s["r"]},
        small={"r": 4},
    ),
    "PVERA": Method(
        "pvera",
        values=lambda s: {"r": s["r"]},
        small={"r": 4},
    ),
    "RANDLORA": Method("randlora", lambda s: {"r": s["r"]}, small={"r": 4}),
    "ROAD": Method("road", lambda s: {"group_size": s["group"]}, small={"group": 8}),
    "SHADOW": Method(note=WITHOUT_EQUATION["SHADOW"]),
    "SHIRA": Method("shira", lambda s: {"r": s["r"]}, small={"r": 2}),
    "SUPERTUNING": Method("supertuning", lambda s: {"sparsity": 1 - s["density"]}),
    "TINYLORA": Method(
        "tinylora",
        values=lambda s: {"r": s["r"], "u": s["u"]},
    ),
    "TRAINABLE_TOKENS": Method(
        equation=("w = trainable_tokens(w, n={n})", "input.embed"),
        values=lambda s: {"token_indices": [*range(s["n"])]},
        settings={"n": 4},
        targets={"bert": ["word_embeddings"], "llama": ["embed_tokens"]},
    ),
    "UNILORA": Method(
        "unilora",
        values=lambda s: {"r": s["r"], "theta_d_length": s["n"]},
    ),
    "VBLORA": Method(
        "vblora",
        lambda s: {"r": s["r"], "num_vectors": s["vectors"], "vector_length": s["length"]},
        small={"vectors": 9, "length": 8},
    ),
    "VERA": Method("vera", lambda s: {"r": s["r"]}, small={"r": 4}),
    "WAVEFT": Method(
        "waveft",
        values=lambda s: {"n_frequency": s["n"]},
        small={"n": 40},
    ),
    "XLORA": Method(note=WITHOUT_EQUATION["XLORA"], paper="2402.07148"),
}


# What peftc plans, and what PEFT counts


def settings_of(method: Method, *, small: bool = False) -> dict[str, Any]:
    """All settings of a method: defaults of the recipe, and others."""
    defaults = {} if not method.recipe else {k: _value(v) for k, v in recipes()[method.recipe].parameters.items()}
    return {**defaults, **method.settings, **(method.small if small else {})}


def _value(text: str) -> Any:
    """A default as Python has it: `8`, `1%`, `none`, a word."""
    if not text[0].isdigit():
        return {"none": None, "true": True, "false": False}.get(text, text)
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return int(number) if number.is_integer() else number


def spec_of(name: str, method: Method, *, small: bool = False) -> str:
    """The spec of a method that is no recipe."""
    equation, place = method.equation
    called = [f"form {call.split()[-1]}(" for call in equation.split("(")[:-1]]
    texts = dict.fromkeys([*(row.form for row in TYPES[name].rows), SINK_FORM, PREFIX_FORM])
    forms = [text for text in texts if any(call in text for call in called)]
    own = equation.format(**settings_of(method, small=small))
    return "\n".join(["peft 2", *forms, f"edit e at {place} {{ {own} }}"])


def plan_of(name: str, method: Method, model: Any, *, small: bool = False) -> Plan:
    """The plan of peftc for a model."""
    if not method.recipe:
        return peftc.plan(spec_of(name, method, small=small), model)
    return peftc.plan(recipes()[method.recipe].path, model, settings=dict(method.small) if small else {})


def config_of(name: str, method: Method, plan: Plan, model: Any, *, small: bool = False) -> PeftConfig:
    """PEFT's configuration with the same numbers, at the modules of a plan."""
    cls = next(cls for key, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if key.value == name)
    known = {one.name for one in fields(cls)}
    assert method.values is not None
    values = method.values(settings_of(method, small=small))
    kind = model.config.model_type
    if "target_modules" in known:
        modules = sorted({site.module for edit in plan.edits for site in edit.sites})
        values |= {"target_modules": method.targets.get(kind, modules)}
    if name == "IA3":
        values |= dict(zip(("target_modules", "feedforward_modules"), method.targets[kind], strict=True))
    return cls(**values, task_type="CAUSAL_LM" if hasattr(model, "lm_head") else "FEATURE_EXTRACTION")


def count_in_peft(config: PeftConfig, model: nn.Module) -> int:
    """The parameters that PEFT trains, as `print_trainable_parameters` says."""
    adapted: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]  # any module
    return int(adapted.get_nb_trainable_parameters()[0])
