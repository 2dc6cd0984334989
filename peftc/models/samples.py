"""Samples: the arguments of the forwards that an analysis observes."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from peftc.diagnostics import Diagnostic, PeftcError

Sample = Mapping[str, Any]


class Samples(dict[str, Any]):
    """The arguments of one forward; `others` are those of further ones."""

    others: tuple[Sample, ...] = ()


def joint_sample(sample: Sample | None, samples: Sequence[Sample] | None) -> Sample | None:
    """`sample` and `samples` as one value, None without any. Raises: P545 for anything else."""
    check_sample(sample)
    if samples is None:
        return sample
    if isinstance(samples, Mapping | str) or not isinstance(samples, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`samples` is a list of dictionaries, not a {type(samples).__name__}"
        raise PeftcError(Diagnostic("P545", message, help='write `samples=[{"name": tensor}, {"name": other}]`'))
    for one in samples:
        check_sample(one)
    every = [one for one in (sample, *samples) if one is not None]
    if len(every) < 2:
        return every[0] if every else None
    joint = Samples(every[0])
    joint.others = tuple(every[1:])
    return joint


def further_samples(sample: Sample | None) -> tuple[Sample, ...]:
    return sample.others if isinstance(sample, Samples) else ()


def copy_sample(sample: Sample) -> dict[str, Any]:
    """A sample with tensors and objects of its own: a model may write into its arguments."""
    arguments = dict(sample)
    tensors = (leaf for leaf in tree_leaves(arguments) if type(leaf) is torch.Tensor)
    memo: dict[int, Any] = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors}
    for name, value in sample.items():
        with suppress(Exception):  # an object that has no copy stays
            arguments[name] = copy.deepcopy(value, memo)
    return arguments


def is_same_sample(one: Sample | None, other: Sample | None) -> bool:
    """Whether two samples have the same objects as arguments."""
    if one is None or other is None or one is other:
        return one is other
    pairs = list(zip((one, *further_samples(one)), (other, *further_samples(other)), strict=False))
    same_length = len(further_samples(one)) == len(further_samples(other))
    return same_length and all(a.keys() == b.keys() and all(a[key] is b[key] for key in a) for a, b in pairs)


def check_sample(sample: object) -> None:
    """Raises: P545 if a sample is not the keyword arguments of a forward."""
    if sample is not None and not (isinstance(sample, Mapping) and all(isinstance(k, str) for k in sample)):  # pyright: ignore[reportUnknownVariableType]
        message = f"a sample is a dictionary of the forward's arguments, not a {type(sample).__name__}"
        raise PeftcError(Diagnostic("P545", message, help='write `sample={"name": tensor}`'))
