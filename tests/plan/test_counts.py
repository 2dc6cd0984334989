"""Parameter counts that papers print or code gives (tests/data/counts.json), each from a spec, on
the real configurations.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import peftc
from peftc.addressing.sites import SiteTable
from peftc.planning.planner import PlanResult, make_plan
from peftc.planning.report.plan import percent
from peftc.semantics.expand import expand
from peftc.syntax import parse_text

DATA = json.loads((Path(__file__).parent.parent / "data" / "counts.json").read_text(encoding="utf-8"))

PREFIX = "edit prefix at layer[*].attn { kv = concat(prefix(len=%s), kv) }"
FFN = "edit ffn at layer[*].ffn { h += adapter(x, %s) }"
QV = "edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, %s) }"
LORA_FFN = "edit ffn at layer[*].ffn.up | layer[*].ffn.down { h += lora(x, %s) }"
IA3 = """
edit kv at layer[*].attn.k | layer[*].attn.v { h *= vector(init=1) }
edit ff at layer[*].ffn.hidden { h *= vector(init=1) }
"""

SHIPPED = "use %s from std\napply %s(%s)\n%s"  # a recipe of `specs/`, and further statements
ADAPTBERT = "edit adapter at layer[*].attn | layer[*].ffn.hidden { h += adapter(h, r=%d, act=gelu) }"
COMPACTER = "edit e at %s { h += phm(h, %s) }"

# A method's spec; `{d}` is d_model, `{d/16}` a part of it. Several specs: all of them count alike.
SPECS: dict[str, tuple[str, ...]] = {
    "prefix, direct, l=200, every attention": (PREFIX % "200",),
    "prefix, direct, l=512, every attention": (PREFIX % "512",),
    "prefix, direct, l=30, every attention": (PREFIX % "30",),
    "adapter without biases r=200, every attention (sequential, parallel and multi-head count alike)": (
        "edit a at layer[*].attn { h += adapter(h, r=200, bias=false) }",
        "edit a at layer[*].attn { h += adapter(x, r=200, bias=false) }",
        "edit a at layer[*].attn.heads { h += bottleneck(q, r=200) }",
    ),
    "adapter without biases r=512, every attention": (
        "edit a at layer[*].attn { h += adapter(x, r=512, bias=false) }",
    ),
    "adapter without biases r=200, every ffn": (FFN % "r=200, bias=false",),
    "adapter without biases r=512, every ffn": (FFN % "r=512, bias=false",),
    "adapter without biases r=600, every ffn": (FFN % "r=600, bias=false",),
    "adapter without biases r=1024, every ffn": (FFN % "r=1024, bias=false",),
    "lora r=200 on q and v of every attention": (QV % "r=200",),
    "lora r=102 on both ffn weights": (LORA_FFN % "r=102",),
    "parallel adapter r=30 without biases on attention + r=512 on ffn": (
        "edit a at layer[*].attn { h += adapter(x, r=30, bias=false) }\n" + FFN % "r=512, bias=false",
    ),
    "prefix l=30 + lora ffn r=102": (PREFIX % "30" + "\n" + LORA_FFN % "r=102",),
    "MAM l=30 r=512 without biases": (PREFIX % "30" + "\n" + FFN % "r=512, bias=false",),
    "MAM l=30 r=512, adapter biases, prefix direct": (PREFIX % "30" + "\n" + FFN % "r=512",),
    "MAM l=30 r=512, adapter biases, prefix reparametrised by an MLP of width 800": (
        PREFIX % "30, reparam=mlp(800)" + "\n" + FFN % "r=512",
    ),
    "scaled parallel adapter r=512 with biases, every ffn": (
        "edit ffn at layer[*].ffn { h += 4 * adapter(x, r=512) }",
    ),
    "BitFit: every bias": ("train bias = [b] at **",),
    "adapters:seq_bn": ("edit ffn at layer[*].ffn { h += adapter(h, r={d/16}) }",),
    "adapters:double_seq_bn": ("edit both at layer[*].attn.self | layer[*].ffn { h += adapter(h, r={d/16}) }",),
    "adapters:double_seq_bn[cross_adapter=True]": ((
"edit both at layer[*].attn | "
"layer[*].ffn { h += adapter(h, r={d/16}) }"
),),
    "adapters:par_bn": (FFN % "r={d/2}",),
    "adapters:scaled_par_bn": ("edit ffn at layer[*].ffn { h += scalar(init=1) * adapter(x, r={d/2}) }",),
    "adapters:prefix_tuning": (PREFIX % "30, reparam=mlp(512), keep=true",),
    "adapters:prefix_tuning_flat": (PREFIX % "30",),
    "adapters:lora": (QV % "r=8",),
    "adapters:lora, FFN only (intermediate + output)": (LORA_FFN % "r=8",),
    "adapters:lora q,k,v + FFN": (
        "edit qkv at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v { h += lora(x, r=8) }\n" + LORA_FFN % "r=8",
    ),
    "adapters:ia3": (IA3,),
    "adapters:dora": (
        "edit qv at layer[*].attn.q | layer[*].attn.v { w = magnitude(w + lowrank(r=8)) }",
    ),
    "adapters:mam": (PREFIX % "30, reparam=mlp(800), keep=true" + "\n" + FFN % "r={d/2}",),
    "adapters:unipelt": (
        """
        edit qv at layer[*].attn.q | layer[*].attn.v { h += gate(x) * lora(x, r=8) }
        edit prefix at layer[*].attn { kv = concat(gate(x) * prefix(len=10, reparam=mlp(512), keep=true), kv) }
        edit ffn at layer[*].ffn { let g = gate(h)  h += g * adapter(h, r={d/16}) }
        """,
    ),
    "Houlsby adapters r=64, biases, after attention and ffn (no cross-attention)": (
        "edit both at layer[*].attn.self | layer[*].ffn { h += adapter(h, r=64) }",
        "edit both at layer[*].attn - layer[*].attn.cross | layer[*].ffn { h += adapter(h, r=64) }",
    ),
    "Pfeiffer adapters r=64, biases, after ffn": ("edit ffn at layer[*].ffn { h += adapter(h, r=64) }",),
    "scaled parallel adapters r=512 (d/2), biases, ffn": ("edit ffn at layer[*].ffn { h += 4 * adapter(x, r={d/2}) }",),
    "(IA)3: k, v (cross-attention too) and the ffn hidden state": (IA3,),
    "prefix l=30, MLP of width 512, three groups (encoder, decoder self, decoder cross)": (
        PREFIX % "30, reparam=mlp(512), keep=true",
    ),
    "adapters:compacter": (COMPACTER % ("layer[*].attn.self | layer[*].ffn", "reduction=32"),),
    "adapters:compacter++": (COMPACTER % ("layer[*].ffn", "reduction=32"),),
    "compacter n=4 r=32": (COMPACTER % ("layer[*].attn.self | layer[*].ffn", "r=32"),),
    "compacter++ n=4 r=32": (COMPACTER % ("layer[*].ffn", "r=32"),),
    "compacter n=4 r=32 with the layer norms of T5 trained": (
        SHIPPED % ("compacter", "compacter", "", "train final = [w, b] at norm"),
    ),
    "compacter++ n=4 r=32 with the layer norms of T5 trained": (
        SHIPPED % ("compacter_pp", "compacter_pp", "", "train final = [w, b] at norm"),
    ),
    "PHM adapters n=12 r=32 with the layer norms of T5 trained": (
        SHIPPED % ("phm_adapter", "phm_adapter", "n=12", "train final = [w, b] at norm"),
    ),
    (
"LoRA r=64 on every Linear of "
"attention and ffn, gate included"
): (SHIPPED % ("qlora", "qlora", "", ""),),
    "AdaMix n=4 r=16": (SHIPPED % ("adamix", "adamix", "", ""),),
    "AdaMix n=4 r=48": (SHIPPED % ("adamix", "adamix", "r=48", ""),),
    "HyperFormer++ reduction=32, eight tasks": (SHIPPED % ("hypernetwork", "hypernetwork", "", ""),),
    **{
        f"AdaptBert adapter a={a}, biases, after attention (768) and on the ffn activation (3072), one task": (
            ADAPTBERT % a,
        )
        for a in (8, 16, 32, 64, 128, 256)
    },
    **{
        f"AdaptBert LoRA r=128 + adapter a=128, {tasks}": (SHIPPED % ("lora_adapter", "lora_adapter", "", ""),)
        for tasks in ("one task", "three tasks")
    },
    **{
        f"AdaptBert hypernetwork a={a}, three tasks": (
            SHIPPED % ("hypernetwork_adaptbert", "hypernetwork_adaptbert", f"a={a}", ""),
        )
        for a in (8, 16, 32, 64, 128)
    },
    "VeRA r=1024 on q and v": (SHIPPED % ("vera", "vera", "r=1024", ""),),
    "prompt tuning l=100, before the input of the encoder": (
        SHIPPED % ("prompt_tuning", "prompt_tuning", "", ""),
        SHIPPED % ("spot", "spot", "", ""),
    ),
    "Intrinsic SAID d=20000, all parameters": (SHIPPED % ("said", "said", "d=20000", ""),),
    "adapters:loreft": (  # one for the first tokens, one for the last
        "edit first at layer[*] { h += reft(h, r=1) }\nedit last at layer[*] { h += reft(h, r=1) }",
    ),
    "layer-norm tuning: every layer norm": ("train norms = [w] at layer[*].norm | norm",),
    "lora r=8 on q and v of every attention": (QV % "r=8",),
    "lora r=8 on every linear except the head (q,k,v,o and ffn)": (
        """
        edit qkvo at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o { h += lora(x, r=8) }
        """
        + LORA_FFN % "r=8",
        'edit all at ("encoder.block.*.**.q" | "decoder.block.*.**.q") | layer[*].attn.k | layer[*].attn.v'
        " | layer[*].attn.o | layer[*].ffn.up | layer[*].ffn.down { h += lora(x, r=8) }",
    ),
}  # fmt: skip

TASKS = {  # where edits are `per task`
    "HyperFormer++ reduction=32, eight tasks": 8,
    **{method: 3 for method in SPECS if method.startswith("AdaptBert") and method.endswith("three tasks")},
}

ROWS = [
    pytest.param(row, text, id=f"{row['model']}-{row['method']}-{i}")
    for row in DATA["rows"]
    for i, text in enumerate(SPECS.get(row["method"], ()))
]


@cache
def table(model: str) -> SiteTable:
    return peftc.sites(model)


def planned(text: str, model: str, tasks: int = 1) -> PlanResult:
    sites = table(model)
    filled = re.sub(r"\{d(?:/(\d+))?\}", lambda part: str(sites.d_model // int(part[1] or 1)), text)
    return make_plan(expand(parse_text("peft 1\n" + filled)), sites, tasks=tuple(f"task{i}" for i in range(tasks)))


def test_every_row_is_there():
    assert {row["method"] for row in DATA["rows"]} == SPECS.keys()
    assert len(ROWS) >= 108


@pytest.mark.parametrize("model", DATA["base"])
def test_the_base(model):
    assert table(model).parameters == DATA["base"][model]


@pytest.mark.parametrize(("row", "text"), ROWS)
def test_counts(row, text):
    totals = planned(text, row["model"], TASKS.get(row["method"], 1)).plan.totals
    assert (totals.trained, totals.stored) == (row["trained"], row["stored"])
    assert totals.base == DATA["base"][row["model"]]


@pytest.mark.parametrize(
    ("value", "base", "text"),
    [(2, 3, "66.666 %"), (3, 2, "150.000 %"), (1, 10**6, "0.000 %"), (5, 1000, "0.500 %"), (0, 0, "0.000 %")],
)
def test_a_share_of_the_base_is_cut(value, base, text):
    """Percentages are truncated; a model without parameters has none."""
    assert percent(value, base) == text


def test_the_cost_of_a_task_of_hyperformer_is_the_papers():
    row = next(row for row in DATA["rows"] if row["method"].startswith("HyperFormer++"))
    assert f"{row['trained'] / 8 / DATA['base'][row['model']]:.3%}" == row["printed"]


def test_the_cost_of_adaptberts_adapters_is_the_papers():
    """Its base includes the tasks' heads, 0.2 % more than BERT's parameters."""
    rows = [row for row in DATA["rows"] if row["method"].startswith(("AdaptBert adapter", "AdaptBert LoRA"))]
    assert len(rows) == 8
    for row in rows:
        printed, base = float(row["printed"].rstrip("%")), 1.002 * DATA["base"][row["model"]]
        assert 100 * row["trained"] / base == pytest.approx(printed, abs=0.01)


def test_the_hypernetwork_of_adaptbert_grows_as_its_table_prints():
    """As a share of its base, which has hidden layers of 768 in two of three heads. Its projector
    is wider, so all counts differ by one constant.
    """
    rows = [row for row in DATA["rows"] if row["method"].startswith("AdaptBert hypernetwork")]
    base = DATA["base"]["bert-base-uncased"] + 2 * (768 * 768 + 768) + (5 + 1 + 1) * 769
    remainders = [float(row["printed"].rstrip("%")) - 100 * row["trained"] / base for row in rows]
    assert len(remainders) == 5
    assert max(remainders) - min(remainders) < 0.01  # as printed: two digits
    assert sum(remainders) / 5 == pytest.approx(0.173, abs=0.002)


def test_the_public_function_counts_the_same():
    text = "peft 1\n" + PREFIX % "30, reparam=mlp(800)" + "\n" + FFN % "r=512"
    plan = peftc.plan(text, "facebook/bart-large")
    assert (plan.totals.trained, plan.totals.stored) == (86_810_976, 27_414_528)
    assert [len(edit.sites) for edit in plan.edits] == [36, 24]
