"""The shipped recipes on real configurations: each has a plan whose promises hold, or a
diagnostic.
"""

from functools import cache
from math import prod

import pytest
import torch

import peftc
from peftc.addressing.sites import SiteTable
from peftc.filesystem import resources
from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.planning.planner import PlanResult, make_plan
from peftc.semantics import expand, read_spec
from tests.matrix import checkerboard

RECIPES = resources.recipes()
MODELS = ("facebook/bart-large", "bert-base-uncased", "t5-large", "meta-llama/Meta-Llama-3-8B")
NEED_BIASES = ("bitfit", "difffit", "glora", "glora_kinds", "far")
NEED_A_CONTEXT = ("cross_attention",)
WITH_A_GATE = ("qlora", "adalora")  # if there is one
PAIRS = sorted({*checkerboard(list(RECIPES), MODELS), *((name, MODELS[3]) for name in WITH_A_GATE)})


@cache
def table(model: str) -> SiteTable:
    return peftc.sites(model)


def planned(name: str, model: str) -> PlanResult:
    return make_plan(expand(read_spec(RECIPES[name])), table(model))


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_a_recipe_plans(name: str, model: str) -> None:
    if name in NEED_BIASES and model in MODELS[2:]:
        with pytest.raises(peftc.PeftcError) as excinfo:
            planned(name, model)
        assert {d.code for d in excinfo.value.diagnostics} == {"P205"}
        return
    if name in NEED_A_CONTEXT and model in (MODELS[1], MODELS[3]):
        with pytest.raises(peftc.PeftcError, match="P201"):
            planned(name, model)
        return
    result = planned(name, model)
    assert not result.failed_expectations
    assert all(expectation.holds for expectation in result.plan.expectations)
    assert result.plan.totals.trained == entries(result, model) > 0


def entries(result: PlanResult, model: str) -> int:
    """The number of trained entries: of forms, and of the base."""
    base = {f"{m.name}.{a}": prod(size) for m in table(model).modules for a, size in m.parameters.items()}
    forms: dict[object, FormModule] = {}
    for site_edit in result.site_edits:
        for one in site_edit.instances:
            for owner in one.owners():
                if owner not in forms:
                    make = build_of_all if owner == one.all_tasks_owner else build_owner
                    forms[owner] = make(one, dtype=torch.float32, device="meta")
            if one.has_site_parameters:
                forms[site_edit.edit, site_edit.site.path, one.key] = build(one, dtype=torch.float32, device="meta")
    own = sum(p.numel() for form in forms.values() for p in form.parameters())
    return own + sum(base[name] for name in set(result.trained_parameters.values()))


# What each recipe trains on BART-large: d = 1024, 4096 in the ffn, 12 attentions and ffns in the
# encoder, 24 and 12 in the decoder.
D, F, ATTN, FFN = 1024, 4096, 36, 24
QV, QKVO = 2 * ATTN, 4 * ATTN
ADAPTER = 2 * D * 8 + 8 + D  # r = 8
GLORA = {"attn": 2 * 4 * D + 4 * 2 * D, "up": 2 * 4 * D + 4 * (D + F), "down": 2 * 4 * F + 4 * (D + F)}
GLORA_BIAS = QKVO * 3 * D + FFN * (2 * F + D) + FFN * (2 * D + F)
ATTN_OF, FFN_OF = (lambda layers: 3 * layers), (lambda layers: 2 * layers)  # the same number of layers in each stack
EVERYTHING = 406_291_456
NORMS = 5 * 12 * 2 * D  # their weights and biases
BIASES = QKVO * D + FFN * (F + D)
HYPER = (1 + 24 + 3) * 64 + 4 * 64 * 128 + 128 + 3 * 64  # embeddings of 64 and a projector of 128

COUNTS = {
    "trainable_tokens": 5 * D,
    "krona": QV * 2 * D,  # 32 × 32 and 32 × 32
    "krona_res": FFN * (2 * D + 1),
    "lokr": QKVO * (D + 8 * (32 + 32)),
    "loha": QKVO * 2 * 8 * 2 * D,
    "vera": QV * (256 + D),
    "glora_weight": QKVO * GLORA["attn"] + FFN * (GLORA["up"] + GLORA["down"]),
    "glora": QKVO * GLORA["attn"] + FFN * (GLORA["up"] + GLORA["down"]) + GLORA_BIAS,
    "oft": QKVO * (D // 32) * (32 * 31 // 2),
    "said": 200,
    "adalora": QKVO * 12 * (2 * D + 1) + 2 * FFN * 12 * (D + F + 1),
    "compacter": NORMS + 4**3 + 48 * (2 * (D + 32) + 32 + D),
    "compacter_pp": NORMS + 4**3 + FFN * (2 * (D + 32) + 32 + D),
    "phm_adapter": NORMS + 48 * (2 * 4**3 + 2 * 32 * D // 4 + 32 + D),
    "difffit": (ATTN + FFN) * (1 + 2 * D) + BIASES,
    "loreft": FFN * 8 * (2 * D + 1),
    "direft": FFN * 8 * (2 * D + 1),
    "rslora": QV * 64 * 2 * D,
    "s4": sum(
        (
            (ATTN_OF(2 + 4 + 4) + FFN_OF(2 + 4 + 4)) * ADAPTER,
            ATTN_OF(4 + 4 + 2) * 2 * 4 * D,
            ATTN_OF(4 + 2) * 4 * D + FFN_OF(4 + 2) * (F + D),
            ATTN_OF(2 + 2) * 2 * 8 * 2 * D,
        )
    ),
    "lora_adapter": 3 * ATTN * 128 * 2 * D + ATTN * (2 * D * 128 + 128 + D) + FFN * (2 * F * 128 + 128 + F),
    "lora_adapter_narrow": 3 * ATTN * 128 * 2 * D + (ATTN + FFN) * (2 * D * 128 + 128 + D),
    "multi_head_parallel": ATTN * 2 * 30 * D,
    "learned_scale": FFN * (2 * D * 512 + 512 + D + 1),
    "parallel_res": FFN * (2 * D * 512 + 512 + D),
    "prefix_ungated": ATTN * 2 * 30 * D,
    "prompt_tuning": 100 * D,  # of the encoder
    "p_tuning": 20 * D + 2 * D * 128 + D + 128 * 128 + 2 * 128,
    "ipt": 5 + 5 * 512 + 512 + (512 + 1) * 100 * D,
    "adamix": FFN * (4 * (D * 16 + 16) + D * 16 + D),
    "cross_attention": 12 * (4 * (D * D + D) + 2 * D),  # with the norm after it
    "fishmask": round(0.005 * EVERYTHING),
    "lt_sft": round(0.08 * EVERYTHING),
    "far": FFN * (round(0.1 * F) * (D + 1) + round(0.1 * D) * (F + 1)),
    "sparse_adapter": round(0.6 * (ATTN + FFN) * 2 * 64 * D) + (ATTN + FFN) * (64 + D),
    "qlora": QKVO * 64 * 2 * D + 2 * FFN * 64 * (D + F),
    "spot": 100 * D,
    "ladder": 12 * (D * 128 + 1 + 2 * 128 + 8 * 128**2 + 6 * 128) + (2 * 128 * D + D + 3 * 128),
    "adaptive_prefix": 3 * (20 * D + D * 512 + 512 + 24 * D * 513) + ATTN * (1 + 20 * (D + 1)),
    "hypernetwork": (1 + 24 + 2 * 2) * 64 + 2 * (4 * 64 * 128 + 128 + 3 * 64 + 65 * (2 * D * 32 + 32 + 3 * D)),
    "hypernetwork_adaptbert": HYPER + 65 * (2 * (2 * D * 16 + 16 + 3 * D) + 2 * F * 16 + 16 + 3 * F),
    "hypernetwork_adaptbert_narrow": HYPER + 3 * 64 * (2 * D * 16 + 2 * D),
    "diff_pruning": 2 * EVERYTHING + 2 * (QKVO + 2 * FFN + 5 * 12) + 1 + 2 + 2 * 2,
    "adapterfusion": FFN * (3 * D * D + D),
    "attention_fusion": 2 * D,
    "beft": ATTN * D,
    "boft": QV * (D // 4 * 4 * 4 + D),
    "c3a": QV * D * D // 256,
    "deft": QV * 8 * 2 * D,
    "delora": QV * (8 * 2 * D + 1),
    "fourierft": QV * 1000,
    "glora_kinds": QV * (2 * 8 * 2 * D + 8 * (D + 1) + 2),
    "gralora": QV * 32 * 2 * D,
    "hira": QV * 32 * 2 * D,
    "hra": QV * 8 * D,
    "miss": QV * 64 * D,
    "peanut": QV * 32 * 2 * D,
    "randlora": QV * (D + D // 32 * D),
    "road": QV * D,
    "shira": QV * 32 * 2 * D,
    "supertuning": QV * (D * D // 100),
    "vblora": QV * 2 * 4 * (D // 256) * 256 + 256 * 256,
    "unilora": 256,
    "pvera": QV * (2 * 256 + D),
    "waveft": QV * 2592,
    "tinylora": QV * 64,
    "osf": QV * (D - 256) * (2 * D + 1),
    "psoft": QV * (32 * 31 // 2 + 2 * 32),
    "frod": QV * (D + 5000),
    "lily": 2 * (ATTN * (32 * D + 2 * 32) + 2 * 32 * D),
    "poly": QV * (4 * 8 * 2 * D + 4),
    "multitask_prompt": 100 * D + 100 + D,
    "unipelt": 43_914_372,  # measured in AdapterHub
}


# Of an ffn with a gate, LLaMA-3-8B's: 32 layers, d = 4096, 1024 of keys and values, 14336 in the
# ffn.
D_L, KV_L, F_L, LAYERS_L = 4096, 1024, 14336, 32
SIDES_L = 2 * (2 * D_L + D_L + KV_L) + 3 * (D_L + F_L)  # d_in + d_out of q, o, k, v and of up, gate, down

GATED_COUNTS = {
    "qlora": LAYERS_L * 64 * SIDES_L,
    "adalora": LAYERS_L * 12 * (SIDES_L + 7),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_by_hand(name: str) -> None:
    assert planned(name, "facebook/bart-large").plan.totals.trained == COUNTS[name]


@pytest.mark.parametrize("name", GATED_COUNTS)
def test_counts_by_hand_where_ffns_have_a_gate(name: str) -> None:
    assert planned(name, MODELS[3]).plan.totals.trained == GATED_COUNTS[name]
