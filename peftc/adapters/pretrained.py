"""Base and adapter in one call: the adapter says which base it was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import AutoConfig

from peftc.adapters.checkpoints import CONFIGURATION, WEIGHTS, file_of_weights
from peftc.adapters.files import path_of, read_description
from peftc.adapters.hub import download
from peftc.adapters.loading import load
from peftc.adapters.metadata import METADATA, Adapter, Origin
from peftc.adapters.passes import Passes
from peftc.adapters.sentences import MODULES, load_sentence_model
from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.models.names import error_summary
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike

HUB = ("token", "cache_dir", "local_files_only", "force_download")  # options of both downloads


def from_pretrained(
    adapter: str | PathLike[str],
    base: str | PathLike[str] | nn.Module | None = None,
    *,
    revision: str | None = None,
    base_revision: str | None = None,
    model_class: Any = None,
    name: str | None = None,
    prefix: str | None = None,
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    other_weights: bool = False,
    strict: bool = False,
    spec: SpecLike | None = None,
    settings: Settings | None = None,
    include: Include = (),
    passes: Passes | None = None,
    **options: Any,
) -> nn.Module:
    """Loads a base, and a saved adapter onto it: `load` behind `from_pretrained` of its library.

    The adapter names its base: the hub id and commit, or the absolute path of a folder, and the
    class, which is one of transformers or diffusers. The configuration beside the adapter
    (`config.json`, which `save_pretrained` writes) is that of the model, with its number of labels
    and its quantisation. No code of a repository runs without `trust_remote_code=True`. The folder
    of a model of sentence-transformers gives this model, and its transformer is compiled.

    Args:
        adapter: a folder, or a hub id.
        base: another base than the adapter names: a folder, a hub id, or a model.
        revision: of an adapter on the hub: a branch, a tag or a commit.
        base_revision: of a base on the hub; by default the commit that the adapter names.
        model_class: the class that loads the base, in place of the one that the adapter names.
        name: as in `compile`; by default the name of the folder.
        prefix: as in `compile`.
        sample: as in `compile`.
        samples: as in `compile`.
        other_weights: as in `load`.
        strict: as in `load`.
        spec: as in `load`.
        settings: as in `load`.
        include: as in `load`.
        passes: as in `load`.
        options: for `from_pretrained` of the base: `dtype`, `device_map`, `quantization_config`,
            `attn_implementation`, `subfolder` and the like. `token`, `cache_dir`,
            `local_files_only` and `force_download` hold for both downloads.

    Returns:
        The compiled model, in evaluation mode.

    Raises:
        PeftcError: P582 (no such folder, and the hub does not return the adapter), P585 (the base
            is not known), P586 (the base cannot be loaded, or is another model); else as `load`.
    """
    folder = adapter_folder(adapter, revision, {key: options[key] for key in HUB if key in options})
    described = read_description(folder)
    if isinstance(base, nn.Module):
        model = transformer = base
    elif (folder / MODULES).is_file():
        model, transformer = _sentence_model(described, folder, base, base_revision, options)
    else:
        model = transformer = load_base(described, folder, base, base_revision, model_class, options)
    name = name or prefix or (Path(adapter).name if not os.path.isdir(adapter) else None)
    load(
        folder,
        transformer,
        name=name,
        prefix=prefix,
        sample=sample,
        samples=samples,
        other_weights=other_weights,
        strict=strict,
        spec=spec,
        settings=settings,
        include=include,
        passes=passes,
    )
    return model


def _sentence_model(
    described: Adapter, folder: Path, base: str | PathLike[str] | None, revision: str | None, options: Mapping[str, Any]
) -> tuple[nn.Module, nn.Module]:
    """A model of sentence-transformers, and the transformer in it. Raises: P585, P586."""
    origin = described.base.origin
    place = base_name(origin, base)
    revision = revision or (origin.revision if base is None and origin is not None else None)
    try:
        return load_sentence_model(folder, place, revision, options)
    except PeftcError:
        raise
    except Exception as error:  # each library raises its own
        message = f"the base of the adapter cannot be loaded from `{place}`"
        raise PeftcError(Diagnostic("P586", message, notes=(error_summary(error),), help=_OTHER)) from error


def adapter_folder(adapter: str | PathLike[str], revision: str | None, options: Mapping[str, Any]) -> Path:
    """The folder of an adapter, after a download from the hub. Raises: P545, P582."""
    path = path_of(adapter)
    return path if path.is_dir() else download(os.fspath(adapter), revision, **options)


def load_base(
    described: Adapter,
    folder: Path,
    base: str | PathLike[str] | None,
    revision: str | None,
    model_class: Any,
    options: Mapping[str, Any],
) -> nn.Module:
    """The base of an adapter, with its weights. Raises: P585, P586."""
    origin = described.base.origin
    place = base_name(origin, base)
    if base is None and revision is None and origin is not None:
        revision = origin.revision
    cls = model_class or _class_of(origin)
    arguments = {**options, **({"revision": revision} if revision else {})}
    try:
        if (folder / CONFIGURATION).is_file() and "config" not in options and _is_of_transformers(cls):
            arguments["config"] = _configuration(folder, bool(options.get("trust_remote_code")))
        with paused_gc(promote=True):
            model, info = cls.from_pretrained(place, output_loading_info=True, **arguments)
    except Exception as error:  # each library raises its own
        message = f"the base of the adapter cannot be loaded from `{place}`"
        raise PeftcError(Diagnostic("P586", message, notes=(error_summary(error),), help=_OTHER)) from error
    _check_loaded(described, place, info)
    return cast(nn.Module, model.eval())


_OTHER = "`base=` names another folder or hub id, or is a model"


def base_name(origin: Origin | None, base: str | PathLike[str] | None) -> str:
    """The folder or hub id of the base.

    Raises: P585 if nobody says it, or the folder is gone, P586 if it has an adapter alone.
    """
    if base is not None:
        return _without_adapter(os.fspath(base))
    if origin is None or origin.name is None:
        message = "the adapter does not say where its base is: the model was not loaded by its library"
        raise PeftcError(Diagnostic("P585", message, help=_OTHER))
    if os.path.isabs(origin.name) and not os.path.isdir(origin.name):
        message = f"the adapter names a folder as its base that is not here: {origin.name}"
        raise PeftcError(Diagnostic("P585", message, help=_OTHER))
    return _without_adapter(origin.name)


def _without_adapter(place: str) -> str:
    folder = Path(place)
    if (folder / METADATA).is_file() and file_of_weights(folder) is None:
        message = f"`{place}` is the folder of an adapter, and has no weights of a base"
        raise PeftcError(Diagnostic("P586", message, help=_OTHER))
    return place


def _class_of(origin: Origin | None) -> Any:
    """The class of the base. Raises: P585 for none, or one that the library does not have."""
    cls: Any = None if origin is None else getattr(import_module(origin.library), origin.architecture, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "from_pretrained")):
        named = "" if origin is None else f"{origin.library}.{origin.architecture}, which is none"
        reason = f"names {named}" if named else "does not name one"
        help_ = "`model_class=` is the class that loads it, such as `AutoModelForCausalLM`"
        raise PeftcError(Diagnostic("P585", f"a base has a class that loads it, and the adapter {reason}", help=help_))
    return cls


def _is_of_transformers(cls: Any) -> bool:
    return str(getattr(cls, "__module__", "")).startswith("transformers.")


def _configuration(folder: Path, trust_remote_code: bool) -> Any:
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if hasattr(config, WEIGHTS):
        delattr(config, WEIGHTS)
    return config


def _check_loaded(described: Adapter, place: str, info: Mapping[str, Any]) -> None:
    """Raises: P586 where the base has no weights for parameters that the adapter does not train."""
    sampled = {name for name, tensor in described.base.tensors.items() if tensor.sample}
    lost = {*info.get("missing_keys", ()), *(key[0] for key in info.get("mismatched_keys", ()))}
    if missing := sorted(lost & sampled):
        message = f"`{place}` is not the base of the adapter: it has no weights for {len(missing)} of its parameters"
        raise PeftcError(Diagnostic("P586", message, notes=(f"such as `{missing[0]}`",), help=_OTHER))
