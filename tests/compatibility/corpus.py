"""Adapters that released versions of peftc have saved, and the models they were saved from.

`saved/<version>.tar.xz` has a folder for each case, as `peftc.save` wrote it. Its `cases.json`
names the model of each case, and `outputs.safetensors` has what the edited model computed.
`specs.json` has the recipes of that version as expanded texts, and their counts on `PLANNED`.
Nothing here depends on random numbers of a library's constructors: weights and inputs are functions
of names and positions, so that a later torch or transformers builds the same models.

`python -m tests.compatibility.corpus VERSION` writes the corpus of the version that is installed.
It is run once, before a change to what is saved, and never over an old corpus.
"""

from __future__ import annotations

import json
import sys
import tarfile
import zlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import peftc
from peftc.addressing.sites import SiteTable
from peftc.filesystem import resources
from peftc.planning.planner import make_plan
from peftc.semantics import expand, read_spec
from peftc.semantics.spec_argument import flat_spec
from peftc.syntax import ast, parse_text, print_spec
from tests.laws.harness import randomise
from tests.laws.test_specs import CASES, CHOSEN
from tests.verification.pairs import settings_of

FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4

SAVED = Path(__file__).parent / "saved"
VOCABULARY, TOKENS = 29, 7
PLANNED = ("facebook/bart-large", "meta-llama/Meta-Llama-3-8B")

# Specs for features that no recipe uses.
TEXTS: dict[str, tuple[str, str]] = {
    "text-everything": (
        "bart",
        "peft 1\n"
        "let s = shared(lora(r=2))\n"
        "edit enc.q at layer[*].attn.q { h += lora(x, r=2) }\n"
        "edit k at layer[*].attn.k { h += s(x) }\n"
        "edit f at layer[*].ffn { let g = gate(h)  h += g * adapter(h, r=2, act=gelu) }\n"
        "train n = [w, b] at layer[*].norm\n",
    ),
    "text-tasks": (
        "bert",
        (
            "peft 1\nedit own at layer[*].ffn per task { h += adapter(h, r=2) }\n"
            "edit all at layer[*].attn.v { h += lora(x, r=2) }\n"
        ),
    ),
    "text-prefix": ("llama", "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3, reparam=mlp(5)), kv) }\n"),
    "text-prompt": ("gpt2", "peft 1\nedit p at embed { h = concat(prompt(len=3), h) }\n"),
    "text-weights": ("gpt2", "peft 1\nedit w at layer[*].attn.q { w = magnitude(w + lowrank(r=2, alpha=4)) }\n"),
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 32,
        },
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 32},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
            "tie_word_embeddings": False,
        },
    ),
}
DEPTHS = {"s4": 12}  # has four groups of layers
DEPTH_KEYS = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer")


def versions() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in SAVED.glob("*.tar.xz"))


@cache
def _unpacked() -> TemporaryDirectory[str]:
    """Of this process, until it ends."""
    return TemporaryDirectory(prefix="corpus-", ignore_cleanup_errors=True)


@cache
def folder(version: str) -> Path:
    """The unpacked corpus of a version."""
    where = Path(_unpacked().name)
    with tarfile.open(SAVED / f"{version}.tar.xz") as archive:
        archive.extractall(where, **FILTER)
    return where / version


def description(model: str, depth: int | None = None) -> dict[str, Any]:
    """What `build` needs: two class names and the values of the configuration."""
    cls, config, values = MODELS[model]
    depths = {key: depth for key in DEPTH_KEYS if depth and key in values}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    return {"class": cls, "config": config, "values": {**tokens, **values, **depths}}


def build(described: dict[str, Any]) -> nn.Module:
    """The base model in float64; each parameter is a function of its name and shape."""
    config = getattr(transformers, described["config"])(**described["values"])
    model = getattr(transformers, described["class"])(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            center, scale = (0.0, 0.25) if parameter.ndim > 1 else (float("norm" in name or "ln_" in name), 0.1)
            parameter.copy_(center + scale * noise)
    return model


def inputs() -> dict[str, Tensor]:
    """Two rows of tokens, without padding."""
    row, token = torch.arange(2)[:, None], torch.arange(TOKENS)[None]
    return {"input_ids": 3 + (7 * row + 5 * token) % (VOCABULARY - 3)}


@torch.no_grad()
def output(model: nn.Module, tasks: list[str]) -> Tensor:
    """The logits of `inputs`; with two tasks, one task for each row."""
    batch = inputs()
    if isinstance(model, transformers.PreTrainedModel) and model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    if tasks:
        with peftc.task(model, task_ids=tasks):
            return model(**batch).logits
    return model(**batch).logits


def totals(text: str, table: SiteTable) -> dict[str, int] | str:
    """The counts of an expanded spec on a model, or the code of its diagnostic."""
    try:
        return make_plan(expand(parse_text(text)), table).plan.totals.model_dump()
    except peftc.PeftcError as error:
        return error.diagnostics[0].code


def write_specs(path: Path) -> None:
    tables = {model: peftc.sites(model) for model in PLANNED}
    texts = {name: print_spec(expand(read_spec(source))) for name, source in resources.recipes().items()}
    entries = {n: {"text": t, "totals": {m: totals(t, table) for m, table in tables.items()}} for n, t in texts.items()}
    path.write_text(json.dumps(entries, indent=1) + "\n")


def main(version: str) -> None:
    archive = SAVED / f"{version}.tar.xz"
    if archive.exists():
        raise SystemExit(f"{archive} is there already: a corpus is written once")
    with TemporaryDirectory() as scratch:
        write(Path(scratch))
        with tarfile.open(archive, "w:xz") as file:
            file.add(scratch, version)


def write(folder: Path) -> None:
    write_specs(folder / "specs.json")
    cases: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    recipes = {f"recipe-{recipe}": (model, recipe) for recipe, model in CASES if recipe != "adapterfusion"}
    for case, (name, text) in {**recipes, **TEXTS}.items():
        recipe = text if case.startswith("recipe-") else None
        described = description(name, DEPTHS.get(recipe or ""))
        model = build(described)
        settings = {} if recipe is None else settings_of(recipe)
        source = text if recipe is None else resources.recipes()[recipe]
        tasks = (
            ["a", "b"]
            if any(s.per_task for s in flat_spec(source, settings).statements if isinstance(s, ast.Edit))
            else []
        )
        peftc.compile(source, model, seed=0, settings=settings, tasks=tasks or None)
        if recipe in CHOSEN:
            peftc.calibrate(model, [inputs() | {"labels": inputs()["input_ids"]}])
        randomise(peftc.parameters(model))
        if recipe == "diff_pruning":
            peftc.calibrate(model)
        model.eval()
        peftc.save(model, folder / case)
        cases[case] = {"model": described, "tasks": tasks}
        outputs[case] = output(model, tasks)
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
