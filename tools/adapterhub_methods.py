"""The section on AdapterHub's library of `docs/methods.md`: each of its configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import peftc
from peftc.exchange.adapterhub.folder import read_hub_adapter
from peftc.exchange.adapterhub.reading import read_parts
from peftc.exchange.adapterhub.site_parts import form_texts, site_edits_of
from peftc.exchange.peft_format.folder import CONFIG, read_config
from peftc.exchange.selector_text import Selectors
from peftc.installation.compiled_model import CompiledModel
from tests.exchange.adapterhub.models import COUNTS, FOLDER, base

VERSION = "1.3.0"
MODELS = ("bert", "gpt2")
NONE = "—"


@dataclass(frozen=True)
class HubMethod:
    """A configuration of the library.

    Attributes:
        cls: its class.
        names: what the library calls it, too.
        case: the recorded adapter, empty where it does not come in.
        note: why it does not, or what is left out.
    """

    cls: str
    names: tuple[str, ...]
    case: str = ""
    note: str = ""


_INVERTIBLE = (
    "`glow` does not run in the library; the inverse stands before the head where the library knows a model by an "
    "interface, as Qwen2, and in its own heads, which do not come in"
)
_PROMPT = (
    "its rows stand behind the positions and the norm of the embeddings, of the tokens alone; the layers get a longer "
    "mask than the model made, and results keep the rows: the pooler of BERT reads the first one in the place of "
    "`[CLS]`. A `prompt` stands where the model takes embedded tokens, before all that, and results have the tokens of "
    "the text"
)
_HALF = "with `suffix_positions=0` the library has as many parameters again, which nothing reads; they stay behind"
METHODS: tuple[HubMethod, ...] = (
    HubMethod("SeqBnConfig", ("seq_bn", "pfeiffer"), "seq_bn"),
    HubMethod("DoubleSeqBnConfig", ("double_seq_bn", "houlsby"), "double_seq_bn"),
    HubMethod("ParBnConfig", ("par_bn", "parallel"), "par_bn"),
    HubMethod("ParBnConfig", ("scaled_par_bn", "scaled_parallel"), "scaled_par_bn"),
    HubMethod("AdapterPlusConfig", (), "adapter_plus"),
    HubMethod("SeqBnInvConfig", ("seq_bn_inv", "pfeiffer+inv"), "seq_bn_inv", _INVERTIBLE),
    HubMethod("DoubleSeqBnInvConfig", ("double_seq_bn_inv", "houlsby+inv"), "double_seq_bn_inv", _INVERTIBLE),
    HubMethod("CompacterConfig", ("compacter",), "compacter"),
    HubMethod("CompacterPlusPlusConfig", ("compacter++",), "compacter++"),
    HubMethod("PrefixTuningConfig", ("prefix_tuning",), "prefix"),
    HubMethod("PrefixTuningConfig", ("prefix_tuning_flat",), "prefix_flat"),
    HubMethod("PromptTuningConfig", ("prompt_tuning",), note=_PROMPT),
    HubMethod("LoRAConfig", ("lora",), "lora"),
    HubMethod("IA3Config", ("ia3",), "ia3"),
    HubMethod("VeraConfig", ("vera",), "vera"),
    HubMethod("DoRAConfig", ("dora",), "dora"),
    HubMethod("DvoRAConfig", ("dvora",), "dvora"),
    HubMethod(
        "MTLLoRAConfig",
        ("mtl_lora",),
        "mtl_lora",
        'one task at a time; `task_specific_matrix_type="linear"` does not run in the library',
    ),
    HubMethod("LoReftConfig", ("loreft",), "loreft_pair", _HALF),
    HubMethod("NoReftConfig", ("noreft",), "noreft", _HALF),
    HubMethod("DiReftConfig", ("direft",), "direft", f"the library saves and loads it as NoReFT. {_HALF.capitalize()}"),
    HubMethod("MAMConfig", ("mam",), "mam"),
    HubMethod("UniPELTConfig", ("unipelt",), "unipelt"),
    HubMethod("ConfigUnion", (), "two"),
)


@cache
def counted() -> Mapping[str, int]:
    """How many parameters the library trains, by recorded adapter."""
    return json.loads((FOLDER / COUNTS).read_text(encoding="utf-8"))


@cache
def _base(name: str) -> Any:
    return base(name)


@cache
def spec_of(key: str) -> str:
    """The spec with which a recorded adapter comes in."""
    adapter, model = read_hub_adapter(FOLDER / key, read_config(FOLDER / key / CONFIG)), _base(key.partition("/")[0])
    analysis = CompiledModel.active(model).analysis
    edits = site_edits_of(read_parts(adapter, analysis, model).parts, Selectors(analysis.table))
    return "\n".join(["peft 2", *form_texts(edits), *(edit.text for edit in edits)])


@cache
def trained(key: str) -> int:
    """How many parameters that spec trains."""
    return peftc.plan(spec_of(key), _base(key.partition("/")[0])).totals.trained


def equations_of(method: HubMethod) -> str:
    key = next((f"{name}/{method.case}" for name in MODELS if f"{name}/{method.case}" in counted()), None)
    if not method.case or key is None:
        return NONE
    edits = spec_of(key).partition("\nedit ")[2].split("\nedit ")
    bodies = (edit[edit.index("{") + 1 : edit.rindex("}")] for edit in edits)
    lines = dict.fromkeys(line.strip() for body in bodies for line in body.strip().splitlines())
    return ", ".join(f"`{line}`" for line in lines)


def section() -> Iterator[str]:
    yield f"## AdapterHub\n\nThe configurations of the library `adapters` {VERSION}, with the numbers of the adapters"
    yield "recorded in `tests/exchange/adapterhub` on a BERT and a GPT-2 of two layers and 16 features.\n"
    yield f"| configuration | equations | {' | '.join(f'{model}: peftc | library' for model in MODELS)} |"
    yield "|---|---|--:|--:|--:|--:|"
    for method in METHODS:
        names = f" (`{'`, `'.join(method.names)}`)" if method.names else ""
        counts = (one for model in MODELS for one in _counts(f"{model}/{method.case}"))
        yield f"| `{method.cls}`{names} | {equations_of(method)} | {' | '.join(counts)} |"
    yield "\nOutputs and gradients are compared in float64 to 1e-10 by `test_adapterhub_gradients` and"
    yield "`test_adapterhub`, and `make adapterhub` runs all adapters in the library.\n"
    notes: dict[str, list[str]] = {}
    for method in METHODS:
        if method.note:
            notes.setdefault(method.note, []).append(f"`{method.cls}`")
    yield from (f"- {', '.join(owners)}: {note}." for note, owners in notes.items())
    yield "- AdapterFusion: folders of `save_adapter_setup` come in as `h += fusion(…)`, without the bias of the keys,"
    yield "  which is the same in all scores; [`peftc.fuse`](using.md) mixes other adapters."
    yield "- Stack, Fuse, Split, BatchSplit, Parallel and Average are set at run time and are in no folder."
    yield ""


def _counts(key: str) -> tuple[str, str]:
    return (f"{trained(key):,}", f"{counted()[key]:,}") if key in counted() else (NONE, NONE)
