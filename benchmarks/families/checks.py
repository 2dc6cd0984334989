"""The checks of peftc on one model: sites, and five edits compiled, run, trained, decoded and
removed.

found = checked(model, inputs)
found["edits"]["a"]["verdict"]    # pass | refused | fail
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

import peftc
from benchmarks.families.edits import TRIALS, Trial
from benchmarks.families.failures import reason_of
from benchmarks.families.forward import main_output, run, same
from benchmarks.families.observation import Observation, observe
from benchmarks.families.roles import plan_disagreements
from benchmarks.families.rolling import cache_difference, described
from benchmarks.families.state import difference, state_of

Answer = dict[str, Any]
TOLERANCE = 1e-4


class Wrong(Exception):
    """A compiled model that does not do what its edit requires."""


def checked(model: nn.Module, inputs: Mapping[str, Any], edits: str = "abcde") -> Answer:
    """The verdicts for a model, with their evidence. Leaves the model unchanged."""
    observations = observe(model, inputs)
    result: Answer = {"attention": len(observations.attending), "feed_forward": len(observations.feed_forward)}
    sample = None
    try:
        table = peftc.sites(model)
    except peftc.PeftcError as error:
        if not any(d.code == "P507" for d in error.diagnostics):
            return result | {"sites_error": reason_of(error)} | _all_fail(edits, error)
        sample = dict(inputs)
    except Exception as error:
        return result | {"sites_error": reason_of(error)} | _all_fail(edits, error)
    if sample is not None:
        result["sample"] = True
        try:
            table = peftc.sites(model, sample=sample)
        except Exception as error:
            return result | {"sites_error": reason_of(error)} | _all_fail(edits, error)
    result["sites"] = _counted(table)
    result["kinds"] = len({s.kind for s in table.sites if s.steps[-1][0] == "layer"})
    if disagreements := plan_disagreements(model, table):
        result["plan"] = disagreements
    if table.warnings:
        result["warnings"] = list(table.warnings)
    base = _Base(model, inputs, sample)
    result["base"] = base.cache
    result["edits"] = {name: tried(base, TRIALS[name], observations, result["sites"]) for name in edits}
    return result


def _all_fail(edits: str, error: BaseException) -> Answer:
    return {"edits": {name: {"verdict": "fail", "reason": f"sites: {reason_of(error)}"} for name in edits}}


def _counted(table: Any) -> dict[str, int]:
    """The number of sites by the end of their paths: `layer.attn.q`, `layer.ffn` …"""
    return dict(Counter(".".join(_steps(s)) for s in table.sites))


def _steps(site: Any) -> list[str]:
    names = [name for name, _ in site.steps]
    return names[names.index("layer") :] if "layer" in names else names[-1:]


class _Base:
    """A model before an edit: its output, its state, and whether cached decoding agrees with
    uncached decoding.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], sample: Mapping[str, Any] | None) -> None:
        self.model, self.inputs, self.sample = model, inputs, sample
        self.state = state_of(model)
        self.out = run(model, inputs)
        self.frozen = _frozen(model, inputs)
        worst = cache_difference(model, inputs)
        self.cache = described(worst, TOLERANCE)
        self.tolerance = TOLERANCE if isinstance(worst, str) else max(TOLERANCE, 10 * worst)


def _frozen(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    # As an edit leaves the base. Some code computes in another order where nothing requires a
    # gradient, even under no_grad.
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    out = run(model, inputs)
    for parameter, flag in zip(model.parameters(), flags, strict=True):
        parameter.requires_grad_(flag)
    return out


def tried(base: _Base, trial: Trial, observations: Observation, sites: Mapping[str, int]) -> Answer:
    """The verdict on one edit. Arms whose sub-layer neither peftc nor `observe` sees are left
    out; if none is left, peftc must refuse.
    """
    arms = tuple(arm for arm in trial.arms if observations.has(arm[1]) or _matches(arm[0], sites))
    try:
        return _compiled(base, trial, arms) if arms else _refused(base, trial)
    except peftc.PeftcError as error:
        return {"verdict": "fail", "reason": reason_of(error), "codes": [d.code for d in error.diagnostics]}
    except Exception as error:  # any exception of the model or of peftc is a failure with its reason
        return {"verdict": "fail", "reason": reason_of(error) if not isinstance(error, Wrong) else str(error)}
    finally:
        _restored(base)


def _matches(selector: str, sites: Mapping[str, int]) -> bool:
    path = selector.replace("[*]", "")
    return any(name == path or name.replace(".self.", ".").replace(".cross.", ".") == path for name in sites)


def _restored(base: _Base) -> None:
    """After a failure in the middle, the model is restored for the next edit."""
    with suppress(peftc.PeftcError):
        peftc.remove(base.model)


def _refused(base: _Base, trial: Trial) -> Answer:
    try:
        peftc.compile(trial.text(), base.model, seed=0, sample=base.sample)
    except peftc.PeftcError as error:
        codes = [d.code for d in error.diagnostics]
        if all(code.startswith("P2") for code in codes):
            return {"verdict": "refused", "reason": reason_of(error), "codes": codes}
        raise
    raise Wrong("compiled although there is no such sub-layer")


def _compiled(base: _Base, trial: Trial, arms: tuple[tuple[str, str], ...]) -> Answer:
    model = base.model
    try:
        peftc.compile(trial.text(arms), model, seed=0, sample=base.sample)
    except BaseException:
        if change := difference(base.state, state_of(model)):
            raise Wrong(f"an error left the model changed: {change}") from None
        raise
    parameters = peftc.parameters(model)
    start = run(model, base.inputs)
    if trial.identity and not same(start, base.frozen):
        raise Wrong(f"is not the identity at the start (off by {_gap(start, base.frozen):.1e})")
    _draw(parameters)
    outputs = run(model, base.inputs)
    if _gap(outputs, base.frozen) == 0.0:
        raise Wrong("does not change the output")
    share = _gradients(base, parameters)
    cache = (
        described(cache_difference(model, base.inputs), base.tolerance)
        if base.cache == "equal"
        else "base " + base.cache
    )
    if base.cache == "equal" and cache != "equal":
        raise Wrong(f"decoding with a cache {cache}")
    peftc.remove(model)
    if change := difference(base.state, state_of(model)):
        raise Wrong(f"is not gone after remove: {change}")
    if not same(run(model, base.inputs), base.out):
        raise Wrong("removed, the model does not compute what it did")
    untested = [s for s, _ in trial.arms if (s, _) not in arms]
    answer: Answer = {"verdict": "pass", "parameters": len(parameters), "with_gradient": share, "cache": cache}
    return answer | ({"without": untested} if untested else {})


def _gap(one: Any, other: Any) -> float:
    return float((main_output(one) - main_output(other)).abs().max())


@torch.no_grad()
def _draw(parameters: Mapping[str, nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _gradients(base: _Base, parameters: Mapping[str, nn.Parameter]) -> float:
    """The share of the edit's tensors with a gradient; all finite, at least one not zero."""
    torch.manual_seed(0)
    takes_cache = "use_cache" in inspect.signature(base.model.forward).parameters
    out = main_output(base.model(**base.inputs, **({"use_cache": False} if takes_cache else {})))  # as for training
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out.float() * weights).sum().backward()
    gradients = [p.grad for p in parameters.values()]
    base.model.zero_grad(set_to_none=True)
    if any(g is not None and not torch.isfinite(g).all() for g in gradients):
        raise Wrong("has a gradient that is not finite")
    touched = sum(g is not None and bool(g.any()) for g in gradients)
    if not touched:
        raise Wrong("receives no gradient")
    return round(touched / len(gradients), 3)
