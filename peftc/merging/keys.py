"""From the keys of a checkpoint to the parameters of a model, and back.

transformers renames keys while it loads, and converts some tensors: experts are stacked, qkv is
split. A group of keys that are converted together makes a group of parameters. Both directions are
transformers' own, and run here on one group at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, eq=False)
class KeyGroup:
    """Tensors of a checkpoint and the parameters (or buffers) that they make.

    Without a converter it is one key and one name. `patterns`: of the converter, one for each key.
    `inner`: the keys after renaming, before they are converted.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    model: Any
    converter: WeightConverter | None = None
    patterns: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, by name, from tensors by key."""
        if self.converter is None:
            return {self.names[0]: tensors[self.keys[0]]}
        return converted(self.converter, self.model, self.names[0], self.keys, self.patterns, tensors)

    def tensors(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by key, from parameters by name. Raises: ValueError without a way back."""
        if self.converter is None:
            return {self.keys[0]: values[self.names[0]]}
        reverse: Any = self.converter.reverse_transform()
        renamed = [reverse.rename_source_key(name) for name in self.names]
        if any(pattern is None for _, pattern in renamed):
            raise ValueError("the conversion has no inverse")
        patterns = tuple(str(pattern) for _, pattern in renamed)
        back = converted(reverse, self.model, renamed[0][0], self.names, patterns, values)
        prefix = f"{self.model.base_model_prefix}."
        inner = {name.removeprefix(prefix): tensor for name, tensor in back.items()}
        result = {
            key: inner[name.removeprefix(prefix)]
            for key, name in zip(self.keys, self.inner, strict=True)
            if name.removeprefix(prefix) in inner
        }
        if len(result) < len(self.keys) or len(inner) > len(self.keys):
            raise ValueError("the conversion has no inverse")
        return result


def split(group: KeyGroup, count: int, shapes: Mapping[str, Tensor]) -> list[KeyGroup] | None:
    """A group for each of `count` experts, whose tensors make the slices (1, …) of the parameters;
    None where conversions of experts by themselves are not what they are of all.
    """
    keys: dict[str, list[int]] = defaultdict(list)
    for i, pattern in enumerate(group.patterns):
        keys[pattern].append(i)
    if any(len(own) != count for own in keys.values()):
        return None
    inner = tuple(group.inner[own[0]] for own in keys.values())  # each is the first of its own slices
    groups = list[KeyGroup]()
    for i in range(count):
        own = tuple(group.keys[numbers[i]] for numbers in keys.values())
        groups.append(replace(group, keys=own, patterns=tuple(keys), inner=inner))
    return groups if all(_is_slice(group, groups, i, shapes) for i in {0, count - 1}) else None


def _is_slice(group: KeyGroup, groups: Sequence[KeyGroup], index: int, shapes: Mapping[str, Tensor]) -> bool:
    """Whether a part makes a slice of each parameter: by shapes, and by values of small tensors."""
    own = groups[index]
    generator = torch.Generator().manual_seed(0)
    small = {key: torch.rand([4] * shapes[key].ndim, generator=generator) for key in group.keys}
    try:
        whole, part = group.values(shapes), own.values(shapes)
        fits = all(part[name].shape == (1, *whole[name].shape[1:]) for name in group.names)
        fits &= all(len(whole[name]) == len(groups) for name in group.names) and has_inverse(own, shapes)
        values, slices = group.values(small), own.values(small)
        return fits and all(torch.equal(values[name][index], slices[name][0]) for name in group.names)
    except Exception:  # whatever a conversion of transformers raises
        return False


def converted(
    converter: Any,
    model: Any,
    first: str,
    keys: Iterable[str],
    patterns: Iterable[str],
    tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    own = deepcopy(converter)
    for key, pattern in zip(keys, patterns, strict=True):
        own.add_tensor(first, key, pattern, tensors[key])
    values: dict[str, Any] = own.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def key_groups(model: Any, shapes: Mapping[str, Tensor]) -> tuple[list[KeyGroup], list[str]]:
    """The groups of a checkpoint's keys, and those keys that name nothing in the model.

    Args: `shapes`: tensors on the meta device, by key.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    plain, unknown = list[KeyGroup](), list[str]()
    sources: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            unknown.append(key)
        elif pattern is None:
            plain.append(KeyGroup((key,), (name,), model))
        else:
            sources[name].append((key, pattern))
    groups = list[KeyGroup]()
    for name, pairs in sources.items():
        keys, patterns = zip(*pairs, strict=True)
        converter = by_pattern[patterns[0]]
        names = converted(converter, model, name, keys, patterns, shapes)
        inner = tuple(rename_source_key(key, renamings, [])[0] for key in keys)
        groups.append(KeyGroup(keys, (name, *(n for n in names if n != name)), model, converter, patterns, inner))
    return [*plain, *groups], unknown


def has_inverse(group: KeyGroup, shapes: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of a group can be made of its parameters again, by names and shapes."""
    try:
        back = group.tensors(group.values(shapes))
    except Exception:  # whatever a conversion of transformers raises
        return False
    return all(back[key].shape == shapes[key].shape for key in group.keys)


def meta(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
