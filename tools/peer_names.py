"""What PEFT and AdapterHub call a recipe: the names of their own configurations, and what `export`
writes for it on a small model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peftc
from peftc.exchange.peft_format.table import TYPES, WITHOUT_EQUATION
from tests import zoo
from tests.exchange.adapterhub.models import FOLDER, NAMES

# More than the ranks and the prompts of recipes.
_WIDE = {"hidden_size": 768, "intermediate_size": 1024, "num_attention_heads": 12, "max_position_embeddings": 256}
# The small models of exports; the first that a recipe fits is taken.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "bart": {"d_model": 768, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_position_embeddings": 256},
    "bert": {**_WIDE, "num_hidden_layers": 2},
    "llama": {**_WIDE, "num_hidden_layers": 2, "num_key_value_heads": 12},
}
PEFT_MODELS, HUB_MODELS = ("bart", "llama"), ("bert",)
_NUMBERS = ("reduction_factor", "non_linearity", "leave_out")  # of a configuration: sizes, and no other equation
_IMPLIED = {"phm_layer": False, "inv_adapter": None}  # of a configuration that `export` writes


def peft_name(recipe: str, path: Path) -> str:
    """`LORA`, with what `export` writes."""
    name = same_name(recipe, [*TYPES, *WITHOUT_EQUATION])
    if name is not None and name in WITHOUT_EQUATION:
        return f"`{name}`, not exchanged: {WITHOUT_EQUATION[name]}"
    config = exported(path, "peft", PEFT_MODELS)
    if config is None:
        return f"`{name}`" if name else "none"
    flags = [key for key, value in config.items() if key.startswith("use_") and value is True]
    return _with_export(name, f"`{config['peft_type']}`" + "".join(f" with `{flag}`" for flag in flags))


def hub_name(recipe: str, path: Path) -> str:
    """`seq_bn`, with what `export` writes."""
    names = hub_configs()
    name = same_name(recipe, names)
    if name is not None:  # the last name for a configuration is the current one
        name = [other for other, config in names.items() if config == names[name]][-1]
    config = exported(path, "adapterhub", HUB_MODELS)
    if config is None:
        return f"`{name}`" if name else "none"
    own = _IMPLIED | {key: value for key, value in config["config"].items() if key not in _NUMBERS}
    exact = [other for other, values in names.items() if own.items() <= values.items()]
    return _with_export(name, f"`{exact[-1]}`" if exact else "a bottleneck without a name")


def _with_export(name: str | None, written: str) -> str:
    if name is None or written == f"`{name}`":
        return f"{written} (`export` writes it)"
    return f"`{name}` (`export` writes {written})"


def same_name(recipe: str, names: Iterable[str]) -> str | None:
    """The name of a peer for a recipe, in other letters: `PREFIX_TUNING` for `prefix`."""
    return next((name for name in names if _letters(name) == _letters(recipe)), None)


def _letters(name: str) -> str:
    return name.lower().replace("++", "_pp").removesuffix("_tuning").replace("_", "").replace("-", "")


@cache
def hub_configs() -> dict[str, dict[str, Any]]:
    """The configurations of AdapterHub's library by name, as they are recorded."""
    return json.loads((FOLDER / NAMES).read_text(encoding="utf-8"))


def exported(path: Path, to: Any, models: Iterable[str]) -> dict[str, Any] | None:
    """The configuration that `export` writes of a recipe on the first model that it fits; None
    where there is no form for it.
    """
    for name in models:
        try:
            model = peftc.compile(path, zoo.build(name, **SMALL[name]), seed=0)
        except peftc.PeftcError:
            continue
        with TemporaryDirectory() as folder:
            try:
                peftc.export(model, Path(folder) / "adapter", to=to)
            except peftc.PeftcError as error:
                if error.diagnostics[0].code != "P801":
                    raise
                return None
            return json.loads((Path(folder) / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    return None
