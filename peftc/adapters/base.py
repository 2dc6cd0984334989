"""The base that an adapter belongs to: how it is written down, and how another model differs from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn

from peftc.adapters.metadata import Base, BaseTensor
from peftc.adapters.weight_sample import VALUES, Distance, distance, finite, samples
from peftc.installation.record import Installation, installation_of, is_installed
from peftc.models import settings
from peftc.models.identity import VERSION, any_name, fingerprint_of, identity, parameter_count
from peftc.rewriting.container import CONTAINER, SHARED

_SHOWN = 5  # differences of the configuration


def base_of(model: nn.Module, record: Installation) -> Base:
    """What identifies the base of a compiled model: nothing that edits added, and no values that `train` changed."""
    return described(model, record.specs[0].plan.model.id, not_added(model, record), frozenset(record.trained.values()))


def not_added(model: nn.Module, record: Installation) -> Callable[[str], bool]:
    """Chooses, by dotted name, the parameters that were there before the edits."""
    regions = {id(model.get_submodule(name)) for name, _ in record.regions}
    names = (name for name, module in model.named_modules(remove_duplicate=False) if id(module) in regions)
    added = (f"{SHARED}.", *(f"{name}.{CONTAINER}.".lstrip(".") for name in names))
    return lambda name: not name.startswith(added)


def described(model: nn.Module, id: str, keep: Callable[[str], bool] = any_name, trained: Collection[str] = ()) -> Base:
    found = identity(model, keep)
    first = {n: p for n, p in model.named_parameters() if keep(n)}
    sample = samples(first, {n: VALUES for n in first if n not in trained})
    every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if keep(n)}
    configuration = found["configuration"]
    return Base(
        id=id,
        type=found["type"],
        parameters=parameter_count(model, keep),
        fingerprint=fingerprint_of(found),
        fingerprint_version=VERSION,
        facts=found["facts"],
        configuration=configuration,
        configured=tuple(sorted(settings.not_default(configuration, settings.defaults(model)))),
        tied=found["tied"],
        tensors={
            name: BaseTensor(
                shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."), sample=finite(sample.get(name))
            )
            for name, p in every.items()
        },
    )


def differences(base: Base, model: nn.Module) -> list[str]:
    """What a model, without its edits, differs in from the base that was written down; empty where it is the same
    architecture.
    """
    keep = not_added(model, installation_of(model)) if is_installed(model) else any_name
    here = identity(model, keep, base.fingerprint_version)
    if fingerprint_of(here) == base.fingerprint:
        return []
    found = list[str]()
    if here["type"] != base.type:
        found.append(f"it was saved for a model of type {base.type}, this is {here['type']}")
    else:
        found += _configuration(base, here.get("configuration", {}), model)
    found += _facts(base.facts, here["facts"], {*base.configuration})
    found += _shapes({n: list(t.shape) for n, t in base.tensors.items()}, here["parameters"])
    if not found and [list(group) for group in base.tied] != [list(group) for group in here["tied"]]:
        found.append("other parameters are tied to each other")
    if not found and base.fingerprint_version == 1:
        found.append("its fingerprint is another one")
    return found


def _configuration(base: Base, here: Mapping[str, settings.Value], model: nn.Module) -> list[str]:
    """What differs from version 2 on. A newer transformers may have other keys, at the defaults of their classes."""
    if base.fingerprint_version == 1:
        return []
    keys = settings.differences(base.configuration, frozenset(base.configured), here, settings.defaults(model))
    found = [f"`{key}` of the configuration is {there} there and {now} here" for key, there, now in keys]
    more = len(found) - _SHOWN
    return found[:_SHOWN] + ([f"and {more} more keys of the configuration"] if more > 0 else [])


def _facts(there: Mapping[str, object], here: Mapping[str, object], known: Collection[str]) -> Iterator[str]:
    for name in {**there, **here}:
        if name not in known and there.get(name) != here.get(name):
            yield f"`{name}` of the configuration is {there.get(name)} there and {here.get(name)} here"


def _shapes(there: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> Iterator[str]:
    lost, more = [n for n in there if n not in here], [n for n in here if n not in there]
    other = [n for n in there if n in here and there[n] != here[n]]
    if lost:
        yield f"{_many(lost)} of the adapter's base {_are(lost)} not here"
    if more:
        yield f"{_many(more)} of this model {_are(more)} not in the adapter's base"
    if other:
        shapes = f"{there[other[0]]} there and {here[other[0]]} here"
        yield f"{_many(other)} {'have' if len(other) > 1 else 'has'} another shape: the first is {shapes}"


def _many(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return f"{len(names)} parameter{'s' * (len(names) > 1)} ({shown}{', …' if len(names) > 3 else ''})"


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def distance_from(base: Base, model: nn.Module) -> Distance:
    """How far the weights of a model, before anything was trained, are from those that were written down."""
    first = installation_of(model).originals if is_installed(model) else dict[str, Tensor]()
    return distance(base.tensors, {name: first.get(name, p.detach()) for name, p in model.named_parameters()})
