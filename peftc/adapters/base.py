"""The base model of an adapter: its description, and how another model differs from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn

from peftc.adapters.metadata import Base, BaseTensor
from peftc.adapters.weight_access import dtype_name
from peftc.adapters.weight_sample import VALUES, Distance, distance, finite, samples
from peftc.installation.record import Installation, installation_of, is_installed
from peftc.models import settings
from peftc.models.identity import VERSION, any_name, fingerprint_of, identity, parameter_count
from peftc.rewriting.container import CONTAINER, SHARED

_LISTED = 5  # differences of the configuration


def base_of(model: nn.Module, record: Installation) -> Base:
    """Describes the base of a compiled model, without edits and without values of `train`."""
    trained = frozenset(record.trained.values())
    return describe_base(model, record.specs[0].plan.model.id, is_base_parameter(model, record), trained)


def is_base_parameter(model: nn.Module, record: Installation) -> Callable[[str], bool]:
    """A predicate on dotted names: whether a parameter existed before the edits."""
    regions = {id(model.get_submodule(name)) for name, _ in record.regions}
    names = (name for name, module in model.named_modules(remove_duplicate=False) if id(module) in regions)
    added = (f"{SHARED}.", *(f"{name}.{CONTAINER}.".lstrip(".") for name in names))
    return lambda name: not name.startswith(added)


def describe_base(
    model: nn.Module, id: str, keep: Callable[[str], bool] = any_name, trained: Collection[str] = ()
) -> Base:
    facts = identity(model, keep)
    first = {n: p for n, p in model.named_parameters() if keep(n)}
    sample = samples(first, {n: VALUES for n in first if n not in trained})
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
            name: BaseTensor(shape=tuple(p.shape), dtype=dtype_name(p), sample=finite(sample.get(name)))
            for name, p in every.items()
        },
    )


def differences(base: Base, model: nn.Module) -> list[str]:
    """How a model without its edits differs from a base; empty for the same architecture."""
    keep = is_base_parameter(model, installation_of(model)) if is_installed(model) else any_name
    facts = identity(model, keep, base.fingerprint_version)
    if fingerprint_of(facts) == base.fingerprint:
        return []
    if facts["type"] != base.type:
        notes = [f"it was saved for a model of type {base.type}, this is {facts['type']}"]
    else:
        notes = _configuration_differences(base, facts.get("configuration", {}), model)
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


def _configuration_differences(base: Base, here: Mapping[str, settings.Value], model: nn.Module) -> list[str]:
    """The differences from version 2 of the fingerprint on.

    A newer version of transformers may have more keys, at the defaults of their classes.
    """
    if base.fingerprint_version == 1:
        return []
    keys = settings.differences(base.configuration, frozenset(base.configured), here, settings.defaults(model))
    notes = [f"`{key}` of the configuration is {saved} there and {value} here" for key, saved, value in keys]
    more = len(notes) - _LISTED
    return notes[:_LISTED] + ([f"and {more} more keys of the configuration"] if more > 0 else [])


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
    return distance(base.tensors, {name: originals.get(name, p.detach()) for name, p in model.named_parameters()})
