"""The base that an adapter belongs to: how it is written down, and how another model differs from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from peftc.forms.module import has_values
from peftc.model.identity import everything, fingerprint_of, identity, parameters
from peftc.rewriting.container import CONTAINER
from peftc.rewriting.install import SHARED
from peftc.rewriting.record import Installation, installed, is_installed
from peftc.weights.adapter import Base, BaseTensor
from peftc.weights.sharded import whole

_SAMPLES = 4  # values of each parameter that are written down
_HALF = 2.0**-7  # what float16 and bfloat16 of one number differ by at most, relatively


def base_of(model: nn.Module, record: Installation) -> Base:
    """What identifies the base of a compiled model: nothing that edits added, and no values that `train` changed."""
    return described(model, record.parts[0].plan.model.id, not_added(record), frozenset(record.trained.values()))


def not_added(record: Installation) -> Callable[[str], bool]:
    """Chooses, by dotted name, the parameters that were there before the edits."""
    added = (f"{SHARED}.", *(f"{name}.{CONTAINER}.".lstrip(".") for name, _ in record.regions))
    return lambda name: not name.startswith(added)


def described(
    model: nn.Module, id: str, keep: Callable[[str], bool] = everything, trained: Collection[str] = ()
) -> Base:
    found = identity(model, keep)
    first = dict(model.named_parameters())
    every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if keep(n)}
    return Base(
        id=id,
        type=found["type"],
        parameters=parameters(model, keep),
        fingerprint=fingerprint_of(found),
        facts=found["facts"],
        tied=found["tied"],
        tensors={
            name: BaseTensor(
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
                sample=_sample(p) if name in first and name not in trained else (),
            )
            for name, p in every.items()
        },
    )


def differences(base: Base, model: nn.Module) -> list[str]:
    """What a model, without its edits, differs in from the base that was written down; empty where it is the same
    architecture.
    """
    here = identity(model, not_added(installed(model)) if is_installed(model) else everything)
    if fingerprint_of(here) == base.fingerprint:
        return []
    found = (
        [] if here["type"] == base.type else [f"it was saved for a model of type {base.type}, this is {here['type']}"]
    )
    found += _facts(base.facts, here["facts"])
    found += _shapes({n: list(t.shape) for n, t in base.tensors.items()}, here["parameters"])
    if not found and [list(group) for group in base.tied] != [list(group) for group in here["tied"]]:
        found.append("other parameters are tied to each other")
    return found or ["its fingerprint is another one"]


def _facts(there: Mapping[str, object], here: Mapping[str, object]) -> Iterator[str]:
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
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


# Values --------------------------------------------------------------------------------------------------------------


def other_values(base: Base, model: nn.Module) -> list[str]:
    """The parameters whose values are not those that were written down, allowing for a cast to another dtype; before
    anything was trained.
    """
    first = installed(model).originals if is_installed(model) else dict[str, Tensor]()
    values = {name: first.get(name, p.detach()) for name, p in model.named_parameters()}
    return [
        name
        for name, p in values.items()
        if (there := base.tensors.get(name)) and there.sample and (here := _sample(p)) and not _same(there, here, p)
    ]


def _sample(parameter: Tensor) -> tuple[float, ...]:
    """Some values of a plain parameter, spread over it; none where a value is not finite."""
    values = whole(parameter.detach())
    plain = type(values.data) is torch.Tensor and has_values(parameter) and parameter.is_floating_point()
    if not plain or parameter.element_size() < 2 or not parameter.numel():
        return ()
    places = torch.linspace(0, parameter.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    values = values.flatten()[places.to(values.device)].double()
    return tuple(values.tolist()) if bool(values.isfinite().all()) else ()


def _same(there: BaseTensor, here: tuple[float, ...], parameter: Tensor) -> bool:
    """Equal, or one of the two rounded to the other's dtype."""
    then, now = torch.tensor(there.sample, dtype=torch.float64), torch.tensor(here, dtype=torch.float64)
    dtype = getattr(torch, there.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype == parameter.dtype:
        return torch.equal(then, now)
    if torch.equal(then.to(parameter.dtype).double(), now) or torch.equal(now.to(dtype).double(), then):
        return True
    halves = {dtype, parameter.dtype} == {torch.float16, torch.bfloat16}
    return halves and torch.allclose(then, now, rtol=_HALF, atol=2.0**-24)
