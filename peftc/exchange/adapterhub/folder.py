"""The files of an adapter of AdapterHub: its configuration, its tensors, and those of a head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from peftc.adapters.loading import check_tensors
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import CONFIG, damaged, read_config, read_tensors, write_files

TENSORS, PICKLED = "adapter.safetensors", "pytorch_adapter.bin"
HEAD_CONFIG, HEAD, PICKLED_HEAD = "head_config.json", "model_head.safetensors", "pytorch_model_head.bin"
INTERFACE = "adapter_interface.json"  # of a model whose modules the library knows by their names alone
FILES = (CONFIG, TENSORS, PICKLED, HEAD_CONFIG, HEAD, PICKLED_HEAD, INTERFACE)
# The names in which older releases stored the same tensors.
_OLDER = re.compile(r"\b(?:attention|layer)_text_(?:task|lang)_adapters\b")
_HOLDERS = "|".join(
    (
        *("adapters", "loras", "prefix_tunings", "prefix_gates", "shared_parameters", "invertible_adapters"),
        *("refts", "prompt_tunings", "adapter_fusion_layer"),
    )
)
_FAULTY = (1, 1)  # before this release of `adapters` LoRA was computed with the scale 1


@dataclass(frozen=True, eq=False)
class HubTensor:
    """A tensor by its place: `owner` has a dictionary `holder`, with what belongs to the adapter.

    Of `encoder.layer.0.output.adapters.NAME.adapter_up.bias` these are `encoder.layer.0.output`,
    `adapters` and `adapter_up.bias`.
    """

    key: str
    owner: str
    holder: str
    end: str
    value: Tensor


@dataclass(eq=False)
class HubAdapter:
    """What a folder has. `heads`: the tensors of a prediction head; `notes`: what does not come.

    `fused`: the adapters that it mixes; `fusion`: how.
    `embeddings`: their name in the base where the folder has an interface, else "".
    """

    name: str
    base: str | None
    configs: list[PeftConfig]
    tensors: list[HubTensor]
    heads: Mapping[str, Tensor]
    notes: dict[str, None] = field(default_factory=dict[str, None])
    embeddings: str = ""
    fused: tuple[HubAdapter, ...] = ()
    fusion: PeftConfig | None = None

    def is_own(self, key: str) -> bool:
        """Whether a tensor of a head is the adapter's own, which is among them in some models."""
        return _named(self.name).search(key) is not None

    def of(self, *holders: str) -> Iterator[HubTensor]:
        return (one for one in self.tensors if one.holder in holders)


def is_of_adapterhub(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of AdapterHub, and not of PEFT."""
    return "peft_type" not in values and "config" in values


def read_hub_adapter(folder: Path, values: Mapping[str, Any]) -> HubAdapter:
    """Raises: P026, P027, P802, P803."""
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise damaged(f"{folder / CONFIG} has no name of an adapter")
    tensors = read_tensors(folder, TENSORS, PICKLED)
    has_head = any((folder / file).exists() for file in (HEAD_CONFIG, HEAD, PICKLED_HEAD))
    adapter = hub_adapter(values, tensors, read_tensors(folder, HEAD, PICKLED_HEAD) if has_head else {})
    if (folder / INTERFACE).exists():
        adapter.embeddings = _embeddings(folder)
    return adapter


def _embeddings(folder: Path) -> str:
    """Raises: P803."""
    interface = read_config(folder / INTERFACE).get("interface")
    name = cast(dict[str, Any], interface).get("model_embeddings") if isinstance(interface, dict) else None
    if not isinstance(name, str) or not name:
        raise damaged(f"{folder / INTERFACE} does not name the embeddings")
    return name


def hub_adapter(values: Mapping[str, Any], tensors: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> HubAdapter:
    """Raises: P802, P803."""
    base, own = values.get("model_name"), hub_tensors(values["name"], tensors)
    name = base if isinstance(base, str) and base else None
    return HubAdapter(values["name"], name, _configs(values), own, heads)


def hub_tensors(name: str, tensors: Mapping[str, Tensor]) -> list[HubTensor]:
    """Those of the adapter of that name, by their places. Raises: P802, P803."""
    named = _named(name)
    return [_split(key, value, named) for key, value in tensors.items()]


def write(target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> None:
    """A new folder, complete or not at all. Raises: P561 (infinite or NaN values), P703, P704."""
    check_tensors(tensors, tensors)
    check_tensors(heads, heads)
    configs, own = {CONFIG: config}, {TENSORS: tensors}
    if heads:
        configs[HEAD_CONFIG] = {**config, "config": None, "name": None}
        own[HEAD] = heads
    write_files(target, configs, own)


def _named(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.)(?P<holder>{_HOLDERS})\.{re.escape(name)}\.")


def _split(key: str, value: Tensor, named: re.Pattern[str]) -> HubTensor:
    match = named.search(_OLDER.sub("adapters", key))
    if match is None:
        raise PeftcError(Diagnostic("P802", f"the adapter has a tensor `{key}`, for which there is no equation"))
    if not value.is_floating_point():
        raise damaged(f"`{key}` has the dtype {str(value.dtype).removeprefix('torch.')}")
    text = match.string
    return HubTensor(key, text[: match.start()], match["holder"], text[match.end() :], value)


def _configs(values: Mapping[str, Any]) -> list[PeftConfig]:
    """The configuration, or the parts of a union."""
    config = values["config"]
    if not isinstance(config, dict):
        raise refusal("config", config, "peftc reads the configuration itself, not the name of one")
    own = cast(dict[str, Any], config)
    parts = own.get("configs") if own.get("architecture") == "union" else [own]
    if not isinstance(parts, list) or not parts or not all(isinstance(one, dict) for one in cast(list[Any], parts)):
        raise refusal("configs", parts, "a union has an array of configurations")
    return [PeftConfig(_corrected(one, values.get("version"))) for one in cast(list[dict[str, Any]], parts)]


def _corrected(config: dict[str, Any], version: object) -> dict[str, Any]:
    """With the scale that an earlier release of `adapters` computed with, whatever it wrote."""
    release = re.match(r"adapters\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    is_faulty = release is not None and tuple(map(int, release.groups())) < _FAULTY
    return {**config, "alpha": config.get("r")} if is_faulty and config.get("architecture") == "lora" else config
