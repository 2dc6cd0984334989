"""What it costs to find the right variant of a generated forward.

    python -m benchmarks.dispatch [--repeats 31]

Prefixes on every attention and an adapter beside every ffn enter attentions and layers, so both
have variants. Each edited module is called as the model has called it, with all its variants
replaced by a function that does nothing; what such a call takes longer than that function alone is
the dispatch: the generated `forward`, the conditions in their order, and the call. Summed over the
modules of a layer. `identity` is what is left of it in a whole call: a layer with a generated
forward without edits against the layer as it is.

CPU time, medians; contenders take turns. Exits with 1 where a layer's dispatch takes 5 µs or more.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

import peftc
from benchmarks.common import machine, save, table
from peftc.installation.record import installation_of
from peftc.specialization.generated_class import GeneratedClass

SPEC = """peft 1
edit prefix at layer[*].attn { kv = concat(prefix(len=4), kv) }
edit beside at layer[*].ffn { h += adapter(x, r=4, act=relu) }
"""
GOAL = 5.0  # µs a layer
CALLS = 2000  # of nothing but a dispatch, in one measurement
DEPTH = 3
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": DEPTH}
KV = {**WIDE, "num_key_value_heads": 2}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": DEPTH, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LLaMA": ("LlamaForCausalLM", "LlamaConfig", KV),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**KV, "num_local_experts": 4}),
    "BERT": ("BertForMaskedLM", "BertConfig", WIDE),
    "BART": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
}
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model, config, values = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(vocab_size=64, **values)).eval()


def patterns(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The call patterns of a model, by name."""
    ids = torch.arange(16).reshape(2, 8)
    both = model.config.is_encoder_decoder
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids[:, :3]} if both else {})}
    yield "training", lambda: model.train()(**inputs)
    yield "evaluation", lambda: model.eval()(**inputs)
    if not (both or hasattr(model.config, "num_key_value_heads")):
        return

    def decode() -> Any:
        out = model.eval()(**inputs, use_cache=True)
        encoded = {"encoder_outputs": (out.encoder_last_hidden_state,)} if both else {}
        token = "decoder_input_ids" if both else "input_ids"
        return model(**encoded, **{token: ids[:, :1]}, past_key_values=out.past_key_values)

    yield "decoding", decode


def calls_in_last_layer(model: Any, ask: Callable[[], Any]) -> list[Call]:
    """The last call of each edited module in the last layer."""
    regions = [name for name, kind in installation_of(model).regions if kind.inline]
    layer = regions[-1].partition(f".{DEPTH - 1}")[0] + f".{DEPTH - 1}"
    calls: dict[str, Call] = {}

    def watching(name: str) -> Callable[..., None]:
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name] = (module, args, kwargs)

        return watch

    names = [name for name in regions if name == layer or name.startswith(layer + ".")]
    hooks = [model.get_submodule(n).register_forward_pre_hook(watching(n), with_kwargs=True) for n in names]
    with torch.no_grad():
        ask()
    for hook in hooks:
        hook.remove()
    return list(calls.values())


def nothing(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces a variant."""


def emptied(kind: GeneratedClass) -> Callable[..., Any]:
    """A class's dispatch with variants that do nothing."""
    names = {**kind.functions, "unseen": nothing, **{v.name: nothing for v in kind.variants}}
    exec(compile(kind.dispatch_source(), f"<dispatch of {kind.name}>", "exec"), names)
    return names["dispatch"]


def dispatch(call: Call, repeats: int) -> float:
    """µs from a module's generated forward to its variant."""
    module = call[0]
    own: Any = type(module)
    kind: GeneratedClass = own._peftc_kind
    forward, before = inspect.unwrap(own.forward), kind.dispatch
    kind.dispatch = emptied(kind)
    try:
        differences = []
        for _ in range(repeats):
            differences.append(timed(forward, call) - timed(nothing, call))
    finally:
        kind.dispatch = before
    return 1e6 * median(differences)


def timed(function: Callable[..., Any], call: Call, calls: int = CALLS) -> float:
    """Seconds of CPU time a call."""
    module, args, kwargs = call
    start = time.process_time()
    for _ in range(calls):
        function(module, *args, **kwargs)
    return (time.process_time() - start) / calls


def identity(name: str, repeats: int) -> tuple[float, float]:
    """µs of a whole call of a layer without a cache, and the overhead of a generated forward
    without edits.
    """
    model = model_of(name)
    layer = next(m for n, m in model.named_modules() if n.endswith(f".{DEPTH - 1}") and next(m.children(), None))
    calls: list[Call] = []
    hook = layer.register_forward_pre_hook(lambda m, a, k: calls.append((m, a, k)), with_kwargs=True)
    with torch.no_grad():
        ids = torch.arange(16).reshape(2, 8)
        both = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        model(input_ids=ids, **both, **({"use_cache": False} if name != "BERT" else {}))
        hook.remove()
        base, call = inspect.unwrap(type(layer).forward), calls[-1]
        kind = GeneratedClass(type(layer), frozenset({""}), (), name)
        layer.__class__ = kind.cls
        generated = inspect.unwrap(kind.cls.forward)
        generated(layer, *call[1], **call[2])
        pairs = [(timed(base, call, 20), timed(generated, call, 20)) for _ in range(4 * repeats)]
    return 1e6 * median(a for a, _ in pairs), 1e6 * median(b - a for a, b in pairs)


def measured(name: str, repeats: int) -> dict[str, Any]:
    model = peftc.compile(SPEC, model_of(name), seed=0)
    result: dict[str, Any] = {"µs": {}}
    for pattern, ask in patterns(model):
        calls = calls_in_last_layer(model, ask)
        result["modules"] = len(calls)
        result["µs"][pattern] = sum(dispatch(call, repeats) for call in calls)
    result["variants"] = sum(
        len(kind.variants) for kind in {id(k): k for _, k in installation_of(model).regions}.values()
    )
    result["layer"], result["identity"] = identity(name, repeats)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = {name: measured(name, options.repeats) for name in options.models}
    names = ("training", "evaluation", "decoding")
    rows = [
        [
            *(name, str(r["modules"]), str(r["variants"])),
            *(f"{r['µs'][p]:.2f} µs" if p in r["µs"] else "-" for p in names),
            *(f"{r['layer']:.0f} µs", f"{r['identity']:+.1f} µs"),
        ]
        for name, r in results.items()
    ]
    head = ["a layer of", "edited modules", "variants", *names, "base's call", "identity"]
    worst = max(us for r in results.values() for us in r["µs"].values())
    text = f"{table(head, rows)}\n\nMost a layer {worst:.2f} µs; the goal is less than {GOAL:.0f} µs."
    print(text)
    if not options.no_save:
        save("dispatch", {"repeats": options.repeats, "models": results}, text, machine())
    return int(worst >= GOAL)


if __name__ == "__main__":
    sys.exit(main())
