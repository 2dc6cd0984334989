"""The base model of an adapter: its description, samples of weights, and how another differs.

Weights may have no values, be offloaded, or be sharded over processes (FSDP2).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peftc.adapters.metadata import Base, BaseTensor, WeightsDigest
from peftc.adapters.origin import origin_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.installation.record import Installation, InstalledSpec, installation_of, is_installed
from peftc.models import settings
from peftc.models.identity import VERSION, any_name, fingerprint_of, identity, parameter_count
from peftc.modules.offload import offloaded_error, offloaded_parameters
from peftc.modules.packed import packed_names
from peftc.modules.sharded_tensors import entries_at, is_sharded, local_part, require_gathered
from peftc.rewriting.edits import CONTAINER, SHARED

_LISTED = 5  # differences of the configuration
VALUES = 16  # of each parameter, at equal distances from the first to the last
_HALF = 2.0**-7  # the largest relative difference between float16 and bfloat16 of one number
Sample = tuple[float, ...]


def base_of(
    model: nn.Module,
    record: Installation,
    values: Mapping[str, Tensor] | None = None,
    parts: Iterable[InstalledSpec] = (),
) -> Base:
    """Describes the base of a compiled model, without edits and without values of `train`.

    `values`: those of a state dict, in the place of the model's. `parts`: attached adapters; what
    they train is left out, too.
    """
    trained = record.trained_in(parts)
    id = record.specs[0].plan.model.id
    return describe_base(model, id, is_base_parameter(model, record), trained, values)


def is_base_parameter(model: nn.Module, record: Installation) -> Callable[[str], bool]:
    """A predicate on dotted names: whether a parameter existed before the edits."""
    regions = {id(model.get_submodule(name)) for name, _ in record.regions}
    names = (name for name, module in model.named_modules(remove_duplicate=False) if id(module) in regions)
    added = (f"{SHARED}.", *(f"{name}.{CONTAINER}.".lstrip(".") for name in names))
    return lambda name: not name.startswith(added)


def describe_base(
    model: nn.Module,
    id: str,
    keep: Callable[[str], bool] = any_name,
    trained: Collection[str] = (),
    values: Mapping[str, Tensor] | None = None,
) -> Base:
    facts = identity(model, keep)
    first: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if keep(n)}
    if values is not None:  # others do not take part in a collective call
        first = {n: values.get(n, p) for n, p in first.items() if n in values or not is_sharded(p)}
    packed = packed_names(model)
    sample = samples(first, {n: VALUES for n in first if n not in trained and n not in packed})
    every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if keep(n)}
    configuration = facts["configuration"]
    return Base(
        id=id,
        type=facts["type"],
        parameters=parameter_count(model, keep),
        fingerprint=fingerprint_of(facts),
        fingerprint_version=VERSION,
        facts=facts["facts"],
        configuration=configuration,
        configured=tuple(sorted(settings.not_default(configuration, settings.defaults(model)))),
        tied=facts["tied"],
        tensors={
            name: BaseTensor(
                shape=tuple(packed.get(name, p.shape)), dtype=dtype_name(p), sample=finite(sample.get(name))
            )
            for name, p in every.items()
        },
        origin=origin_of(model),
    )


def differences(base: Base, model: nn.Module) -> list[str]:
    """How a model without its edits differs from a base; empty for the same architecture."""
    keep = is_base_parameter(model, installation_of(model)) if is_installed(model) else any_name
    facts = identity(model, keep, base.fingerprint_version)
    if fingerprint_of(facts) == base.fingerprint:
        return []
    notes: list[str] = []
    if facts["type"] != base.type:
        notes = [f"it was saved for a model of type {base.type}, this is {facts['type']}"]
    elif base.fingerprint_version > 1:  # newer transformers may have more keys, at the defaults of their classes
        here, defaults = facts.get("configuration", {}), settings.defaults(model)
        keys = settings.differences(base.configuration, frozenset(base.configured), here, defaults)
        notes = [f"`{key}` of the configuration is {saved} there and {value} here" for key, saved, value in keys]
        more = len(notes) - _LISTED
        notes[_LISTED:] = [f"and {more} more keys of the configuration"] if more > 0 else []
    for name in {**base.facts, **facts["facts"]}:
        saved, here = base.facts.get(name), facts["facts"].get(name)
        if saved != here and name not in base.configuration:
            notes.append(f"`{name}` of the configuration is {saved} there and {here} here")
    notes += _shape_differences({n: list(t.shape) for n, t in base.tensors.items()}, facts["parameters"])
    if not notes and [list(group) for group in base.tied] != [list(group) for group in facts["tied"]]:
        notes.append("other parameters are tied to each other")
    if not notes and base.fingerprint_version == 1:
        notes.append("its fingerprint differs")
    return notes


def _shape_differences(saved: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> Iterator[str]:
    missing, added = [n for n in saved if n not in here], [n for n in here if n not in saved]
    reshaped = [n for n in saved if n in here and saved[n] != here[n]]
    if missing:
        yield f"{_list_parameters(missing)} of the adapter's base {'are' if len(missing) > 1 else 'is'} not here"
    if added:
        yield f"{_list_parameters(added)} of this model {'are' if len(added) > 1 else 'is'} not in the adapter's base"
    if reshaped:
        shapes = f"{saved[reshaped[0]]} there and {here[reshaped[0]]} here"
        subject = f"{_list_parameters(reshaped)} {'have' if len(reshaped) > 1 else 'has'}"
        yield f"{subject} another shape: the first is {shapes}"


def _list_parameters(names: list[str]) -> str:
    first = ", ".join(f"`{name}`" for name in names[:3])
    return f"{len(names)} parameter{'s' * (len(names) > 1)} ({first}{', …' if len(names) > 3 else ''})"


def distance_from(base: Base, model: nn.Module) -> Distance:
    """The distance of a model's weights, before any training, from the described ones."""
    originals = installation_of(model).originals if is_installed(model) else dict[str, Tensor]()
    packed = packed_names(model)
    here = {name: originals.get(name, p.detach()) for name, p in model.named_parameters()}
    # codes are no values, in whatever dtype they are stored
    return distance(base.tensors, {name: p.view(torch.uint8) if name in packed else p for name, p in here.items()})


class Distance(NamedTuple):
    """The distance of a model's weights from saved samples."""

    changed: tuple[str, ...]  # parameters with other values
    unreadable: tuple[str, ...]  # parameters that cannot be compared, since they are quantised
    compared: int  # the number of parameters that were compared
    relative: float  # ‖here − there‖ / ‖there‖ over all samples
    farthest: tuple[str, float]  # the parameter with the largest relative distance, and this distance


def samples(parameters: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Sample | None]:
    """As many values of each parameter as `counts` says; None if quantised, fake or integer.

    Values are copied once per device and dtype.
    """
    result: dict[str, Sample | None] = dict.fromkeys(counts)
    pieces: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, count in counts.items():
        parameter = parameters[name]
        values = local_part(parameter.detach())
        is_plain = type(values.data) is torch.Tensor and has_values(parameter) and parameter.is_floating_point()
        if is_plain and parameter.element_size() >= 2 and parameter.numel() > 0:
            places = torch.linspace(0, parameter.numel() - 1, count, dtype=torch.float64).long()
            piece = entries_at(parameter.detach(), places)
            pieces.setdefault((values.device, values.dtype), {})[name] = piece
    for group in pieces.values():
        flat: list[float] = torch.cat(list(group.values())).cpu().double().tolist()
        start = 0
        for name, piece in group.items():
            result[name] = tuple(flat[start : start + piece.numel()])
            start += piece.numel()
    return result


def finite(sample: Sample | None) -> Sample:
    return sample if sample is not None and all(map(math.isfinite, sample)) else ()


def digest_of(tensors: Mapping[str, BaseTensor]) -> WeightsDigest:
    """sha256 over names and samples. It depends on the dtype of the base."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if tensor.sample:
            sha.update(f"{name}\0".encode() + struct.pack(f"<{len(tensor.sample)}d", *tensor.sample))
    return WeightsDigest(values=VALUES, sha256=sha.hexdigest())


def distance(tensors: Mapping[str, BaseTensor], parameters: Mapping[str, Tensor]) -> Distance:
    """Compares samples to parameters, up to a cast to another dtype."""
    counts = {name: len(t.sample) for name, t in tensors.items() if t.sample and name in parameters}
    changed, unreadable = list[str](), list[str]()
    total, norm, farthest = 0.0, 0.0, ("", 0.0)
    for name, here in samples(parameters, counts).items():
        saved = tensors[name]
        if here is None:
            unreadable.append(name)
            continue
        size = math.fsum(value * value for value in saved.sample)
        norm += size
        if not _is_same(saved, here, parameters[name].dtype):
            changed.append(name)
            square = sum((a - b) ** 2 for a, b in zip(here, saved.sample, strict=True))
            total += square
            farthest = max(farthest, (name, _ratio(square, size)), key=lambda pair: pair[1])
    return Distance(tuple(changed), tuple(unreadable), len(counts) - len(unreadable), _ratio(total, norm), farthest)


def _ratio(square: float, norm: float) -> float:
    if not math.isfinite(square) or not norm:
        return math.inf if square else 0.0
    return math.sqrt(square / norm)


def _is_same(saved: BaseTensor, here: Sample, dtype: torch.dtype) -> bool:
    saved_dtype = getattr(torch, saved.dtype, None)
    if here == saved.sample or not isinstance(saved_dtype, torch.dtype) or saved_dtype == dtype:
        return here == saved.sample
    a, b = torch.tensor(saved.sample, dtype=torch.float64), torch.tensor(here, dtype=torch.float64)
    if torch.equal(a.to(dtype).double(), b) or torch.equal(b.to(saved_dtype).double(), a):
        return True
    is_half = {saved_dtype, dtype} == {torch.float16, torch.bfloat16}
    return is_half and torch.allclose(a, b, rtol=_HALF, atol=2.0**-24)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def require_values(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P527 for a tensor without values, P450 for one that ZeRO-3 has partitioned."""
    pairs = list(tensors)
    require_gathered(pairs)
    missing = [name for name, tensor in pairs if not has_values(tensor)]
    if missing:
        message = f"{len(missing)} of the parameters have no values, such as `{missing[0]}`"
        raise PeftcError(Diagnostic("P527", message, help="load the weights of the model first"))


def require_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P561 for infinite or NaN values."""
    pairs = list(tensors)
    # torch has few functions for 8-bit floats
    floats = [(n, t if t.element_size() > 1 or t.is_meta else t.float()) for n, t in pairs if t.is_floating_point()]
    if infinite := [n for n, values in floats if not values.is_meta and not _is_finite(values)]:
        note = f"{len(infinite)} of {len(pairs)} tensors, such as `{infinite[0]}`"
        raise PeftcError(Diagnostic("P561", "the adapter has infinite or NaN values", notes=(note,)))


def _is_finite(values: Tensor) -> bool:
    """`values.isfinite().all()`: a finite sum has no other terms, and is five times as fast."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def other_gradients(model: nn.Module, record: Installation) -> Diagnostic | None:
    """P583 for base parameters that require gradients and are of no edit: adapters are without."""
    is_base, trained = is_base_parameter(model, record), {*record.trained.values()}
    others = [n for n, p in model.named_parameters() if p.requires_grad and is_base(n) and n not in trained]
    if not others:
        return None
    message = f"{len(others)} parameters require gradients and are of no edit, such as `{others[0]}`"
    module = others[0].rpartition(".")[0]
    help_ = f'state them in the spec, so that the adapter has them: `train NAME = [w, b] at "{module}"`'
    return Diagnostic("P583", message, help=help_)


def require_base(model: nn.Module) -> None:
    """Raises: P566 for offloaded weights, P527 for weights without values."""
    if elsewhere := offloaded_parameters(model):
        raise PeftcError(offloaded_error(elsewhere, "weights are changed in the places where they are"))
    require_values(model.named_parameters())


@contextmanager
def elect_writer(tensors: Iterable[Tensor]) -> Generator[bool]:
    """Whether this process writes; others wait for rank 0 if tensors are sharded. Raises: P526."""
    if not (any(map(is_sharded, tensors)) and dist.is_initialized()):
        yield True
        return
    done = [False]
    try:
        yield dist.get_rank() == 0
        done = [True]
    finally:
        dist.broadcast_object_list(done, src=0)
    if not done[0]:
        message = "the adapter has not been saved: the process that writes it has failed"
        raise PeftcError(Diagnostic("P526", message, help="the error of rank 0 says why"))
