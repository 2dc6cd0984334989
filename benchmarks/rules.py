"""What each rule of role inference is for: the sites of all model types without one rule.

    python -m benchmarks.rules [--rules "parallel sub-layers,…"] [--enough 8] [--jobs 2]
                               [--journal rules.jsonl]

A first run records for which model types a rule decides anything. A second one disables each rule
on these types alone, until the sites of enough types have changed. The journal is written line by
line; what it holds is not run again. Writes results/rules.json and .md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import peftc
from benchmarks.common import provenance, save, table
from benchmarks.families import pairs
from benchmarks.families.build import build


class Rule(NamedTuple):
    """A function that is one rule, and what stands in its place where the rule is disabled."""

    module: str
    function: str
    without: Callable[..., Any]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return None


def never(*args: Any, **kwargs: Any) -> bool:
    return False


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def no_items(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def first(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


RULES = {
    "stream replaced by an attention": Rule("recognition.roles", "_Finder.stream_replacement", nothing),
    "last mixer of neighbours is an ffn": Rule("recognition.roles", "_relabel_local_mixer", nothing),
    "sub-layers in a bottleneck": Rule("recognition.roles", "_Finder.bottleneck_sublayers", no_items),
    "sums that carry the stream on": Rule("recognition.roles", "_Finder.continues_stream", never),
    "hyper-connections mix streams": Rule("recognition.roles", "_Finder.mixes_streams", never),
    "parallel sub-layers": Rule("recognition.roles", "_Finder.parallel_parts", no_items),
    "attention and ffn in one sum": Rule("recognition.roles", "_Finder.serial_attention_output", nothing),
    "last Linear of a chain": Rule("recognition.roles", "_first_of_final_linears", first),
    "entangled q, k, v": Rule("recognition.roles", "_roles_with_equal_linears", lambda nearest: set()),
    "confused rows": Rule("recognition.roles", "_roles_with_overlapping_rows", no_items),
    "Linears before Linears": Rule("recognition.roles", "_nodes_up_to_linears", lambda linear, layer: set()),
    "input of an attention": Rule("recognition.roles", "_input_of", lambda projection, entry, stream: entry),
    "Linears that mix tokens": Rule("recognition.roles", "mixes_numbers", never),
    "mixing of neighbours": Rule("recognition.roles", "mixes_neighbours", never),
    "factor of each stream": Rule("recognition.roles", "sublayer_output", first),
    "self-attention beside global tokens": Rule("recognition.attention.patterns", "_is_self_attention", never),
    "Linears that mix heads": Rule("recognition.attention.patterns", "_mixes_heads", never),
    "axis of the softmax": Rule("recognition.attention.patterns", "softmax_dim", nothing),
    "stream in variadic arguments": Rule("recognition.residual_stream", "_is_variadic", never),
    "selected tokens or copies": Rule("recognition.residual_stream", "_selected", nothing),
    "norms, scales and terms on the stream": Rule("recognition.residual_stream", "Stream._affine", nothing),
    "mixtures of streams": Rule("recognition.residual_stream", "mixed_streams", no_items),
    "stream changed in place": Rule("recognition.residual_stream", "_overwritten", nothing),
    "a leaf seen to mix tokens": Rule("recognition.token_mixing", "_last_token_reaches_first", never),
    "features by the consumer": Rule("dataflow.features", "_dim_of_consumer", nothing),
    "gate by the activation behind limits": Rule("recognition.ffn", "is_affine", never),
    "features that cannot be in a dimension": Rule("recognition.site_builder", "separates", always),
    "a softmax without an attention": Rule("recognition.roles", "has_softmax_mixture", never),
    "operands of leaves": Rule("recognition.layer_types", "mark_operands", nothing),
    "experts in a list": Rule("recognition.moe.experts", "expert_modules", nothing),
    "experts in one parameter": Rule("recognition.moe.experts", "stacked_experts", nothing),
    "products with slices of parameters": Rule("recognition.moe.experts", "multiplies_slices", never),
    "router in a leaf": Rule("recognition.moe.experts", "_router_in_leaf", nothing),
    "Linears of experts in modules of their own": Rule("recognition.moe.experts", "_merge_linears", first),
    "networks beside experts": Rule("recognition.moe.experts", "_find_shared", nothing),
    "leaves that route": Rule("recognition.layer_types", "_routing_leaves", lambda traced, layer: set()),
    "leaves that alone make a sub-layer": Rule("recognition.layer_types", "_sole_leaves", no_items),
    "weighted sums in a leaf": Rule("recognition.layer_types", "is_weighted_sum", never),
    "stages": Rule("recognition.layer_candidates", "are_stages", never),
    "blocks of convolutions": Rule("recognition.layers", "convolutional_blocks", no_items),
    "contents of untraced modules": Rule("recognition.untraced", "_hidden_kinds", lambda *_: frozenset()),
    "ambiguous attentions": Rule("recognition.untraced", "_ambiguous_attentions", no_items),
    "attentions that are not added": Rule("recognition.untraced", "_attentions_not_added", no_items),
    "stacks of token embeddings": Rule(
        "recognition.non_layer_sites", "embedded_stacks", lambda names, own, structure: dict.fromkeys(names)
    ),
    "nearest stack": Rule("recognition.non_layer_sites", "nearest_stack", nothing),
    "lists of one stack": Rule("recognition.non_layer_sites", "is_in_lists_of", never),
    "rows joined to several attentions": Rule("recognition.site_builder", "LayerSites.shared_pair", nothing),
    "sub-layers on flattened tokens": Rule(
        "recognition.site_builder", "LayerSites.in_batches", lambda self, node, like: node
    ),
    "position tables cut from their end": Rule("recognition.attention.manual_attention", "_counts_from_the_end", never),
    "heads beside blocks of tokens": Rule("recognition.attention.manual_attention", "_heads_dim", nothing),
    "mask beside the scores": Rule("recognition.attention.manual_attention", "visible_value", nothing),
    "features that cannot be joined": Rule("recognition.attention.manual_attention", "separates", always),
    "einsum with the second factor first": Rule("recognition.attention.patterns", "_is_transposed", never),
    "opaque modules on the stream": Rule("recognition.residual_stream", "Stream.hides", never),
    "routers choose": Rule("recognition.moe.matrices", "_is_chosen_from", always),
    "biases of stacked experts": Rule("recognition.moe.matrices", "_bias_of", nothing),
}
PROCEDURES = ("_relabel_local_mixer", "mark_operands", "_find_shared")  # these change their arguments

Key = tuple[str, str]  # mapping and model type


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES), help="only these")
    parser.add_argument("--types", type=lambda text: set(text.split(",")), help="only these model types")
    parser.add_argument("--enough", type=int, default=8, help="model types with other sites, then a rule is done")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--journal", type=Path, help="file of results, which a later run goes on from")
    options = parser.parse_args()
    journal = Journal(options.journal)
    keys = distinct_types_first((p.mapping, p.type) for p in pairs() if not options.types or p.type in options.types)
    with Pool(options.jobs, maxtasksperchild=40) as pool:
        for row in pool.imap_unordered(observed, [key for key in keys if key not in journal.sites]):
            journal.add(row)
        print(f"{len(keys)} pairs", flush=True)
        while todo := next_runs(options.rules, keys, journal, options.enough):
            print(f"{sum(map(len, todo.values()))} runs on {len(todo)} pairs", flush=True)
            for rows in pool.imap_unordered(disabled, todo.items()):
                for row in rows:
                    journal.add(row)
    write(options.rules, keys, journal)
    return 0


def distinct_types_first(keys: Iterable[Key]) -> list[Key]:
    """The pairs in random order, but each type once before any a second time."""
    shuffled, seen = sorted(keys), defaultdict[str, int](int)
    random.Random(0).shuffle(shuffled)
    ranks: dict[Key, int] = {}
    for key in shuffled:
        ranks[key] = seen[key[1]]
        seen[key[1]] += 1
    return sorted(shuffled, key=lambda key: ranks[key])


class Journal:
    """The results so far.

    Attributes:
        sites: the digest of the sites of each pair, with all rules.
        fired: the rules that decide anything there.
        runs: by rule and pair, whether the sites are others without it.
        errors: the same, the error where the analysis then fails.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.sites: dict[Key, str] = {}
        self.fired: dict[Key, set[str]] = {}
        self.runs: dict[str, dict[Key, bool]] = defaultdict(dict)
        self.errors: dict[str, dict[Key, str]] = defaultdict(dict)
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            self._read(json.loads(line))

    def add(self, row: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self._read(row)

    def _read(self, row: dict[str, Any]) -> None:
        key = (row["mapping"], row["type"])
        if "rule" not in row:
            self.sites[key], self.fired[key] = row["sites"], set(row["fired"])
        else:
            self.runs[row["rule"]][key] = row["sites"] != self.sites[key]
            if row["error"] and self.runs[row["rule"]][key]:
                self.errors[row["rule"]][key] = row["error"]

    def changed(self, rule: str) -> list[Key]:
        return [key for key, changed in self.runs[rule].items() if changed]

    def deciding(self, rule: str) -> list[Key]:
        return [key for key, fired in self.fired.items() if rule in fired]


def next_runs(rules: list[str], keys: list[Key], journal: Journal, enough: int) -> dict[Key, list[str]]:
    """For each pair the rules to disable next: of each rule as many as it lacks types."""
    todo: dict[Key, list[str]] = defaultdict(list)
    for rule in rules:
        lacking = enough - len(types(journal.changed(rule)))
        left = [key for key in keys if rule in journal.fired[key] and key not in journal.runs[rule]]
        for key in left[: max(lacking, 0)]:
            todo[key].append(rule)
    return todo


def write(rules: list[str], keys: list[Key], journal: Journal) -> None:
    order = sorted(rules, key=lambda rule: len(types(journal.changed(rule))))
    lines: list[list[str]] = []
    for rule in order:
        changed_types, fired, runs = types(journal.changed(rule)), journal.deciding(rule), journal.runs[rule]
        lines.append([rule, str(len(fired)), str(len(runs)), str(len(changed_types)), ", ".join(changed_types[:8])])
        print(*lines[-1], sep=" | ")
    for rule, errors in journal.errors.items():
        print(f"{rule}: fails on {len(errors)}: {next(iter(errors.values()))}")
    head = [
        "rule",
        "pairs in which it decides",
        "of them run",
        "types whose sites change without it",
        "the first of these",
    ]
    results = {
        rule: {
            "decides": len(journal.deciding(rule)),
            "run": len(journal.runs[rule]),
            "changed": ["/".join(key) for key in journal.changed(rule)],
            "fails": {"/".join(key): error for key, error in journal.errors[rule].items()},
        }
        for rule in order
    }
    about = (
        f"Each rule of role inference disabled, on the model types (of {len(keys)} pairs) in which it decides\n"
        "anything, until the sites of enough types are others.\n\n"
    )
    versions = {name: version(name) for name in ("torch", "transformers")}
    save("rules", {"rules": results}, about + table(head, lines), provenance() | versions)


def types(keys: Iterable[Key]) -> list[str]:
    return list(dict.fromkeys(type_ for _, type_ in keys))


def observed(key: Key) -> dict[str, Any]:
    """The sites of a model type, and the rules that decide anything there."""
    fired: set[str] = set()
    with recorded(fired):
        sites, error = digest_of(key)
    return {"mapping": key[0], "type": key[1], "sites": sites, "fired": sorted(fired), "error": error}


def disabled(task: tuple[Key, list[str]]) -> list[dict[str, Any]]:
    """The sites of a model type without one rule after the other."""
    key, rules = task
    rows: list[dict[str, Any]] = []
    for rule in rules:
        with replaced({rule: RULES[rule].without}):
            sites, error = digest_of(key)
        rows.append({"rule": rule, "mapping": key[0], "type": key[1], "sites": sites, "error": error})
    return rows


def digest_of(key: Key) -> tuple[str, str]:
    """A digest of the sites of a model type; and the error where there are none."""
    text = sites_of(*key)
    return hashlib.sha256(text.encode()).hexdigest()[:16], "" if text.startswith("[") else text


def sites_of(mapping: str, type_: str) -> str:
    """All that the analysis says of a model type, as text; the error where it fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model, _ = build(mapping, type_, 0)
        sites = peftc.sites(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    rows = [
        (
            s.path,
            s.module,
            sorted(s.states.items()),
            sorted(s.frozen_modules.items()),
            s.group,
            s.layer_input,
            s.runs,
            s.calls,
        )
        for s in sites.sites
    ]
    untraced = [(m.module, m.reason, m.steps, sorted(m.roles)) for m in sites.untraced]
    return f"{rows} {untraced} {sites.warnings}"


@contextmanager
def recorded(fired: set[str]) -> Iterator[None]:
    """Inside the block each rule is added whose result is not that of the disabled one."""

    def watching(name: str, original: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            result = list(result) if isinstance(result, Iterator) else result
            if RULES[name].function in PROCEDURES or (result is not None and result != without(*args, **kwargs)):
                fired.add(name)
            return result

        return watched

    originals = {name: lookup(rule)[2] for name, rule in RULES.items()}
    with replaced({name: watching(name, originals[name], rule.without) for name, rule in RULES.items()}):
        yield


@contextmanager
def replaced(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: lookup(RULES[name]) for name in functions}
    try:
        for name, function in functions.items():
            owner, attribute, _ = originals[name]
            setattr(owner, attribute, function)
        yield
    finally:
        for owner, attribute, function in originals.values():
            setattr(owner, attribute, function)


def lookup(rule: Rule) -> tuple[Any, str, Callable[..., Any]]:
    owner: Any = import_module(f"peftc.{rule.module}")
    *classes, attribute = rule.function.split(".")
    for name in classes:
        owner = getattr(owner, name)
    return owner, attribute, vars(owner)[attribute]


if __name__ == "__main__":
    raise SystemExit(main())
