"""What AdapterHub `adapters` 1.3.0 computes on the zoo: the numbers are kept in `adapterhub.json`.

The library needs transformers 4.57, so it cannot run beside the rest. To make the numbers again, in an environment of its
own with `adapters==1.3.0` (which brings `transformers==4.57.6`):

    python -m tests.reference.adapterhub > tests/reference/adapterhub.json

Attention is eager: under sdpa, with a causal mask, its prefixes are wrong. Of T5 there is no prefix: it gives the prefix's
columns a position bias, where ours is zero.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests import zoo

ADAPTER = {
    "down": "adapter_down.0.weight",
    "down_bias": "adapter_down.0.bias",
    "up": "adapter_up.weight",
    "up_bias": "adapter_up.bias",
}
GROUP = {
    "embedding": "wte.weight",
    "down": "control_trans.0.weight",
    "down_bias": "control_trans.0.bias",
    "up": "control_trans.2.weight",
    "up_bias": "control_trans.2.bias",
}
METHODS: dict[str, tuple[str, ...]] = {  # method: the zoo models it is run on
    "seq_bn": ("bert-base", "bart", "t5", "gpt2"),
    "double_seq_bn": ("bert-base", "bart", "t5", "gpt2"),
    "par_bn": ("bert-base", "bart", "t5", "gpt2"),
    "prefix": ("bert-base", "bart", "gpt2"),
    "mam": ("bert-base", "bart", "gpt2"),
}
LENGTH, WIDTH, REDUCTION = 3, 5, 8  # of the prefix and its MLP; of mam's adapter


def adapter_module(name: str, stack: str, index: int, slot: str) -> str:
    """Where it keeps the adapter of a sub-layer (`self`, `ffn`)."""
    if name == "bert-base":
        return f"encoder.layer.{index}.{'attention.' if slot == 'self' else ''}output"
    if name == "t5":
        return f"{stack}.block.{index}.layer.{0 if slot == 'self' else {'encoder': 1, 'decoder': 2}[stack]}"
    layer = f"model.{stack}.layers.{index}" if name == "bart" else f"transformer.h.{index}"
    return f"{layer}.{'attention' if slot == 'self' else 'output'}_adapters"


def group_module(name: str, group: str) -> str:
    """Its name of our attention group (`encoder.self`)."""
    if name != "bart":
        return "self_prefix"
    return {"encoder.self": "encoder_prefix", "decoder.self": "self_prefix", "decoder.cross": "cross_prefix"}[group]


def draw(label: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor, from its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def numbers(model: nn.Module, name: str) -> list[float]:
    """Eight projections of the outputs on unpadded tokens: for inputs without and with a mask."""
    found: list[float] = []
    for padding in (None, "right"):
        given = zoo.inputs(name, model, padding=padding)
        with torch.no_grad():
            out = model(**given)[0]
        if "attention_mask" in given and not model.config.is_encoder_decoder:
            out = out[given["attention_mask"].bool()]
        flat = out.flatten()
        found += [float(flat @ draw(f"{name}{i}", tuple(flat.shape))) for i in range(4)]
    return found


def main() -> None:
    import adapters

    prefix = adapters.PrefixTuningConfig(prefix_length=LENGTH, flat=False, bottleneck_size=WIDTH)
    configs: dict[str, Any] = {
        "seq_bn": "seq_bn",
        "double_seq_bn": "double_seq_bn",
        "par_bn": "par_bn",
        "prefix": prefix,
        "mam": adapters.ConfigUnion(prefix, adapters.ParBnConfig(reduction_factor=REDUCTION)),
    }
    made: dict[str, dict[str, list[float]]] = {"base": {}}
    for method, names in METHODS.items():
        for name in names:
            model = zoo.build(name, torch.float64, attn_implementation="eager")
            made["base"][name] = numbers(model, name)
            own = set(model.state_dict())
            adapters.init(model)
            model.add_adapter("a", config=configs[method])
            model.set_active_adapters("a")
            model.double().eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if key not in own and parameter.ndim and (label := _label(key)):
                        parameter.copy_(draw(label, tuple(parameter.shape)))
            made.setdefault(method, {})[name] = numbers(model, name)
    json.dump(made, sys.stdout, indent=1)


def _label(key: str) -> str:
    """The name that the values are drawn from; prefix pools hang on every layer, but are one."""
    if "prefix_tunings.a." in key:
        return key.partition("prefix_tunings.a.")[2]
    return key if ".adapters.a." in key else ""


def labels(name: str, groups: Iterator[str], sites: Iterator[tuple[str, str, int, str]]) -> dict[str, str]:
    """Our tensor names (without the edit's) -> the names their values are drawn from.

    `sites`: (path, stack, index, slot) of the adapters; `groups`: the names of the attention groups.
    """
    found = {
        f"{path}/adapter.{ours}": f"{adapter_module(name, stack, index, slot)}.adapters.a.{theirs}"
        for path, stack, index, slot in sites
        for ours, theirs in ADAPTER.items()
    }
    found |= {
        f"prefix.{group}/prefix.{ours}": f"{group_module(name, group)}.{theirs}"
        for group in groups
        for ours, theirs in GROUP.items()
    }
    return found


if __name__ == "__main__":
    main()
