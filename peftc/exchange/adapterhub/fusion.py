"""AdapterFusion of AdapterHub: a folder with a setup, the adapters that it mixes, and how."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.bottlenecks import bottlenecks
from peftc.exchange.adapterhub.folder import HubAdapter, hub_tensors, read_hub_adapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import CONFIG, damaged, read_config, read_tensors
from peftc.exchange.peft_format.types import shown

SETUP, FUSION = "adapter_setup.json", "adapter_fusion_config.json"
TENSORS, PICKLED = "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"
HOLDER, KIND = "adapter_fusion_layer", "fusion"
_NAMES = {"query.weight": "query", "query.bias": "query_bias", "key.weight": "key", "value.weight": "value"}
_KEY_BIAS = "key.bias"  # the same in all scores
_FIXED = ("down", "up", "down_bias", "up_bias")  # of the adapters that are mixed
# The options for which there is an equation.
_OPTIONS = {"query": True, "key": True, "residual_before": False, "temperature": False, "query_before_ln": False}
_IGNORED = ("regularization", "value_initialized", "value_before_softmax", "value", *_OPTIONS)


def is_setup(folder: Path) -> bool:
    return (folder / SETUP).exists() and not (folder / CONFIG).exists()


def read_setup(folder: Path) -> HubAdapter:
    """Raises: P026, P027, P802, P803."""
    names = _names(read_config(folder / SETUP).get("adapter_setup"))
    name = ",".join(names)
    if any(Path(one).name != one for one in names):
        raise damaged(f"{folder / SETUP} has a name that is none of a folder")
    values = read_config(folder / name / FUSION)
    config = values.get("config")
    if not isinstance(config, dict):
        raise refusal("config", config, "peftc reads the configuration itself, not the name of one")
    children = tuple(read_hub_adapter(folder / one, read_config(folder / one / CONFIG)) for one in names)
    tensors = hub_tensors(name, read_tensors(folder / name, TENSORS, PICKLED))
    fusion = PeftConfig(cast(dict[str, Any], config))
    return HubAdapter(name, children[0].base, [], tensors, children[0].heads, fused=children, fusion=fusion)


def _names(setup: object) -> list[str]:
    """The adapters of a `Fuse`. Raises: P802."""
    own = cast(dict[str, Any], setup) if isinstance(setup, dict) else {}
    children = own.get("children")
    if own.get("type") != "Fuse" or not isinstance(children, list):
        raise refusal("adapter_setup", own.get("type"), "peftc reads `Fuse` of adapters")
    names = list[str]()
    for child in cast(list[Any], children):
        match child:
            case {"type": "single", "children": [str(name)]}:
                names.append(name)
            case _:
                raise refusal("adapter_setup", child, "peftc reads `Fuse` of adapters alone")
    return names


def fusions(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    if adapter.fusion is None:
        return
    config = adapter.fusion
    for key, value in _OPTIONS.items():
        if config.flag(key) != value:
            raise refusal(key, config.values.get(key), "there is no equation for it")
    if dropout := config.number("dropout_prob", 0.0):
        adapter.notes[f"left out: dropout_prob={shown(dropout)}, which acts while training alone"] = None
    config.finish(_IGNORED)
    own = defaultdict[str, dict[str, Tensor]](dict)
    for one in adapter.of(HOLDER):
        own[places.sublayer(one.owner).path][one.end] = one.value
    each = [_plain(child, places) for child in adapter.fused]
    if any(set(parts) != set(own) for parts in each):
        raise damaged("the fusion is not at the sub-layers at which its adapters are")
    for path in own:
        yield _part(config, [parts[path] for parts in each], own[path])
    for child in adapter.fused:
        adapter.notes |= child.notes


def _plain(child: HubAdapter, places: HubPlaces) -> dict[str, SitePart]:
    """The bottlenecks of an adapter that a fusion mixes. Raises: P802 for others."""
    if len(child.configs) != 1 or any(one.holder != "adapters" for one in child.tensors):
        raise PeftcError(Diagnostic("P802", f"the fusion mixes `{child.name}`, which has more than bottlenecks"))
    child.configs[0].seen.add("architecture")
    return {part.site.path: part for part in bottlenecks(child, places)}


def _part(config: PeftConfig, parts: Sequence[SitePart], own: Mapping[str, Tensor]) -> SitePart:
    site, equations = parts[0].site, parts[0].equations
    names = {f"adapter.{name}" for name in _FIXED}
    head = "h += adapter("
    for part in parts:
        if part.equations != equations or not equations[0].startswith(head) or set(part.tensors) != names:
            texts = "`, `".join(part.equations[-1])
            raise PeftcError(Diagnostic("P802", f"`{site.path}`: there is no equation for a fusion of `{texts}`"))
    has_value = config.flag("value")
    if set(own) != {*_NAMES, _KEY_BIAS} - (set() if has_value else {"value.weight"}):
        raise damaged(f"the configuration has `value: {has_value}`, and `{site.path}` disagrees")
    value, options = _arguments(equations[0].removeprefix(head).removesuffix(")"))
    texts = [value, f"n={len(parts)}", options, *([] if has_value else ["value=false"])]
    tensors = {f"{KIND}.{ours}": own[theirs] for theirs, ours in _NAMES.items() if theirs in own}
    for name in _FIXED:
        tensors[f"{KIND}.{name}"] = _stacked([part.tensors[f"adapter.{name}"] for part in parts], site)
    return SitePart(KIND, site, (f"h += {KIND}({', '.join(texts)})",), tensors)


def _arguments(text: str) -> tuple[str, str]:
    """What a bottleneck reads, and its options: of `norm(h + res), r=4, act=relu`."""
    value, _, options = text.partition(", ")
    return value, options


def _stacked(tensors: Sequence[Tensor], site: Site) -> Tensor:
    if any(one.shape != two.shape for one, two in pairwise(tensors)):
        raise damaged(f"the adapters of `{site.path}` have other widths")
    return torch.stack(list(tensors))
