"""A quantised checkpoint as a dense one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.merging.checkpoint import DTYPES, NAMES, Checkpoint, Entry, placeholder, sample_places
from peftc.merging.dequantization import (
    bitsandbytes_format,
    compressed_format,
    fp8_format,
    torchao_format,
)
from peftc.merging.dequantization.configuration import KEY, dense_dtype, quantization_of, without_quantization
from peftc.merging.dequantization.weights import Quantization, QuantizedWeight, not_dense
from peftc.merging.keys import key_groups, meta
from peftc.merging.layout import Changes, NewTensor
from peftc.models.skeleton import meta_model
from peftc.models.sources import ModelSource

Format = Callable[[Checkpoint, dict[str, Any], torch.dtype], Quantization]
FORMATS: dict[str, Format] = {
    "bitsandbytes": bitsandbytes_format.quantization,
    "torchao": torchao_format.quantization,
    "fp8": fp8_format.quantization,
    "compressed-tensors": compressed_format.quantization,
}
TRANSPOSED = ("bitsandbytes",)  # a Conv1D becomes a Linear before it is quantised


class DenseCheckpoint(Checkpoint):
    """The tensors of a folder, by key, of which some are dequantised when they are read.

    `stored`: the files as they are. An entry of a dequantised weight has the dtype and shape of the
    dense tensor, and the place of its codes.
    """

    def __init__(self, stored: Checkpoint, quantization: Quantization) -> None:
        super().__init__(stored.folder, stored.shards.values(), stored.index)
        self.stored = stored
        self.weights = {weight.key: weight for weight in quantization.weights}
        self.unused = quantization.unused
        for key in (*self.unused, *(part for weight in quantization.weights for part in weight.parts.values())):
            self.entries.pop(key, None)
        self.entries |= {weight.key: _entry(stored, weight) for weight in quantization.weights}

    def computed(self) -> Collection[str]:
        return self.weights.keys()

    def add_alias(self, key: str, of: str) -> None:
        super().add_alias(key, of)
        if of in self.weights:
            self.weights[key] = replace(self.weights[of], key=key)

    def view(self, key: str) -> Tensor:
        if key not in self.weights:
            return super().view(key)
        return placeholder(self.entries[key].shape, self.weights[key].dtype)

    def read(self, key: str) -> Tensor:
        return self.weights[key].dense(self.stored) if key in self.weights else super().read(key)

    def sample(self, key: str) -> Tensor:
        if key not in self.weights:
            return super().sample(key)
        tensor, value = self.view(key), self.read(key)
        places = sample_places(tensor.numel())
        tensor.view(-1)[places] = value.view(-1)[places]
        return tensor

    def close(self) -> None:
        super().close()
        self.stored.close()

    def changes(self) -> Changes:
        """What the dense files have else than the quantised ones."""
        parts: dict[str, tuple[str, NewTensor] | None] = dict.fromkeys(self.unused)
        for weight in self.weights.values():
            parts |= dict.fromkeys(weight.parts.values())
        for weight in self.weights.values():
            parts[weight.main] = weight.key, (NAMES[weight.dtype], weight.shape)
        return Changes(replaced=parts, metadata={"format": "pt"}, dropped=(KEY,))


def _entry(stored: Checkpoint, weight: QuantizedWeight) -> Entry:
    main, size = stored.entries[weight.main], weight.dtype.itemsize
    for length in weight.shape:
        size *= length
    return replace(main, key=weight.key, dtype=NAMES[weight.dtype], shape=weight.shape, stop=main.start + size)


def open_dense(source: ModelSource, stored: Checkpoint) -> DenseCheckpoint:
    """Raises: P545 (not quantised), P708 (cannot be written out)."""
    options = quantization_of(source)
    method = "fp8" if options is None else str(options.get("quant_method"))
    if method not in FORMATS:
        message = f"peftc reads weights of {', '.join(FORMATS)}, not of {method}"
        raise not_dense(message, "merge into the checkpoint that was quantised, and quantise the result")
    quantization = FORMATS[method](stored, options or {}, dense_dtype(source) or _most_frequent(stored))
    if not quantization.weights:
        message = f"the weights of {source.id} are not quantised"
        raise PeftcError(Diagnostic("P545", message, help="leave out `dequantize`"))
    if method in TRANSPOSED:
        quantization = replace(quantization, weights=_as_stored(source, quantization.weights))
    return DenseCheckpoint(stored, quantization)


def _most_frequent(stored: Checkpoint) -> torch.dtype:
    """The dtype of most floating entries, which are not quantised."""
    counts = Counter[torch.dtype]()
    for entry in stored.entries.values():
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            counts[dtype] += entry.size
    return counts.most_common(1)[0][0] if counts else torch.bfloat16


def _as_stored(source: ModelSource, weights: Iterable[QuantizedWeight]) -> list[QuantizedWeight]:
    """Weights (out, in) as (in, out), where the class of the model has them so."""
    model: Any = meta_model(without_quantization(source))
    modules = {name for name, module in cast(nn.Module, model).named_modules() if isinstance(module, Conv1D)}
    if not modules:
        return list(weights)
    groups, _ = key_groups(model, {weight.key: meta(weight.shape, weight.dtype) for weight in weights})
    turned = {g.keys[0] for g in groups if g.converter is None and g.names[0].rpartition(".")[0] in modules}
    return [_transposed(weight) if weight.key in turned else weight for weight in weights]


def _transposed(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, shape=weight.shape[::-1], make=lambda parts: weight.make(parts).t())
