"""What each rule of role inference is for: the sites of all model types, with one rule disabled after the other.

    python -m benchmarks.rules [--rules serial_attention,…] [--jobs 2]

A first run records for which model types a rule decides anything. A second one disables each rule on these types alone, and
counts those whose sites are then others. Writes results/rules.json and .md.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import Pool
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
    "sums that carry the stream on": Rule("recognition.roles", "_Finder.carries_on", never),
    "hyper-connections mix streams": Rule("recognition.roles", "_Finder.mixes_streams", never),
    "parallel sub-layers": Rule("recognition.roles", "_Finder.parallel_parts", no_items),
    "attention and ffn in one sum": Rule("recognition.roles", "_Finder.serial_attention_output", nothing),
    "last Linear of a chain": Rule("recognition.roles", "_last_of_chain", first),
    "entangled q, k, v": Rule("recognition.roles", "_entangled", lambda nearest: set()),
    "confused rows": Rule("recognition.roles", "_confused", no_items),
    "Linears before Linears": Rule("recognition.roles", "_linears_before", lambda linear, layer: set()),
    "input of an attention": Rule("recognition.roles", "_input_of", lambda projection, entry, stream: entry),
    "Linears that mix tokens": Rule("recognition.roles", "mixed_by_linears", never),
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
    "parameters alone are coefficients": Rule("recognition.roles", "is_of_weights", never),
    "features by the consumer": Rule("dataflow.dimensions", "_dim_of_consumer", nothing),
    "gate by the activation behind limits": Rule("recognition.ffn", "is_affine", never),
    "features that cannot be in a dimension": Rule("recognition.site_builder", "separates", always),
    "a softmax without an attention": Rule("recognition.roles", "has_softmax_mixture", never),
    "operands of leaves": Rule("recognition.layers", "mark_operands", nothing),
    "experts in a list": Rule("recognition.moe.experts", "expert_modules", nothing),
    "experts in one parameter": Rule("recognition.moe.experts", "stacked_experts", nothing),
    "products with slices of parameters": Rule("recognition.moe.experts", "multiplies_slices", never),
    "router in a leaf": Rule("recognition.moe.experts", "_router_in_leaf", nothing),
    "Linears of experts in modules of their own": Rule("recognition.moe.experts", "_merge_linears", first),
    "networks beside experts": Rule("recognition.moe.experts", "_find_shared", nothing),
    "leaves that route": Rule("recognition.layers", "_routing_leaves", lambda traced, layer: set()),
    "leaves that alone make a sub-layer": Rule("recognition.layers", "_sole_leaves", no_items),
    "weighted sums in a leaf": Rule("recognition.layers", "is_weighted_sum", never),
    "stages": Rule("recognition.stages", "are_stages", never),
    "blocks of convolutions": Rule("recognition.layers", "convolutional_blocks", no_items),
    "contents of untraced modules": Rule("recognition.untraced", "_hidden_kinds", lambda *_: frozenset()),
    "ambiguous attentions": Rule("recognition.untraced", "_ambiguous_attentions", no_items),
    "attentions that are not added": Rule("recognition.untraced", "_attentions_not_added", no_items),
    "stacks of token embeddings": Rule(
        "non_layer_sites", "embedded_stacks", lambda names, own, _: dict.fromkeys(names)
    ),
    "nearest stack": Rule("recognition.non_layer_sites", "nearest_stack", nothing),
    "lists of one stack": Rule("recognition.non_layer_sites", "is_in_lists_of", never),
    "rows joined to several attentions": Rule("recognition.site_builder", "LayerSites.shared_pair", nothing),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES), help="only these")
    parser.add_argument("--types", type=lambda text: set(text.split(",")), help="only these model types")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    options = parser.parse_args()
    keys = [(p.mapping, p.type) for p in pairs() if not options.types or p.type in options.types]
    with Pool(options.jobs, maxtasksperchild=40) as pool:
        rows = dict(pool.imap_unordered(observed, keys, chunksize=4))
        todo = [(key, rule) for rule in options.rules for key in keys if rule in rows[key][1]]
        print(f"{len(rows)} pairs, {len(todo)} to run with a rule disabled", flush=True)
        changed: dict[str, list[str]] = {rule: [] for rule in options.rules}
        for key, rule, sites in pool.imap_unordered(disabled, todo, chunksize=2):
            if sites != rows[key][0]:
                changed[rule].append("/".join(key))
    write(changed, {rule: sum(rule in fired for _, fired in rows.values()) for rule in options.rules})
    return 0


def write(changed: dict[str, list[str]], fired: dict[str, int]) -> None:
    order = sorted(changed, key=lambda rule: len(types(changed[rule])))
    lines = [
        [rule, str(fired[rule]), str(len(types(changed[rule]))), ", ".join(sorted(types(changed[rule]))[:8])]
        for rule in order
    ]
    for line in lines:
        print(*line, sep=" | ")
    text = table(
        ["rule", "pairs in which it decides", "types whose sites change without it", "the first of these"], lines
    )
    about = "Each rule of role inference disabled, on every model type in which it decides anything.\n\n"
    save("rules", {"changed": changed, "fired": fired}, about + text, provenance())


def types(keys: list[str]) -> set[str]:
    return {key.partition("/")[2] for key in keys}


def observed(key: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, set[str]]]:
    """The sites of a model type, and the rules that decide anything there."""
    fired: set[str] = set()
    with recorded(fired):
        return key, (sites_of(*key), fired)


def disabled(task: tuple[tuple[str, str], str]) -> tuple[tuple[str, str], str, str]:
    key, rule = task
    with replaced({rule: RULES[rule].without}):
        return key, rule, sites_of(*key)


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
        (s.path, s.module, sorted(s.states.items()), sorted(s.frozen_modules.items()), s.group) for s in sites.sites
    ]
    return f"{rows} {sites.untraced} {sites.warnings}"


@contextmanager
def recorded(fired: set[str]) -> Iterator[None]:
    """Inside the block the name of each rule is added whose result is not that of the disabled one."""

    def watching(name: str, original: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            result = list(result) if isinstance(result, Iterator) else result
            if is_procedure(name) or (result is not None and result != without(*args, **kwargs)):
                fired.add(name)
            return result

        return watched

    originals = {name: lookup(rule)[2] for name, rule in RULES.items()}
    with replaced({name: watching(name, originals[name], rule.without) for name, rule in RULES.items()}):
        yield


def is_procedure(name: str) -> bool:
    """Whether a rule changes its arguments instead of returning something."""
    return RULES[name].function in ("_relabel_local_mixer", "mark_operands", "_find_shared")


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
