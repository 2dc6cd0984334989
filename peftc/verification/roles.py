"""Queries, keys and values, witnessed at the attention: noise in the rows of `attn.q` changes the queries that arrive there, all of
them, and nothing else; so do `attn.k` and `attn.v`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Site, Slice
from peftc.models.configs import error_summary
from peftc.verification.batches import Batch
from peftc.verification.checks import Results
from peftc.verification.movement import sampled
from peftc.verification.report import Finding
from peftc.verification.trial import WITH_GRADIENTS, Trial, passes
from peftc.verification.witness.hooks import Witness
from peftc.verification.witness.interpreter import features, with_features
from peftc.verification.witness.locations import Location, Unreachable
from peftc.verification.witness.outputs import first_tensor, with_first

NAMES = {"q": "queries", "k": "keys", "v": "values"}
WHOLE = 0.99  # of the numbers that arrive; some may be cut off by rounding


class _Arrived(Exception):
    """Ends a call of the base as soon as all has arrived."""


def check_roles(trial: Trial, batch: Batch, everywhere: bool, sites: Mapping[str, Site], done: Results) -> int:
    """Checks the q, k and v that edits name, where the base shows what arrives; returns the number of them."""
    name = "q, k and v arrive as such at the attention"
    chosen: dict[str, Site] = {}
    for placed in sampled(trial.record.site_edits, everywhere):
        if placed.site.steps[-1][0] in NAMES:
            chosen.setdefault(placed.site.path, placed.site)
    failures: list[Finding] = []
    unseen: list[str] = []
    for site in chosen.values():
        try:
            failures += wrong_role(trial, batch, site, sites)
        except Unreachable as reason:
            unseen.append(f"`{site.path}`: {reason}")
    count = len(chosen) - len(unseen)
    if failures:
        done.fails(name, *failures)
    elif unseen:
        done.skip(name, f"{len(unseen)} of {len(chosen)} sites not witnessed; {unseen[0]}")
    elif chosen:
        done.holds(name, f"{count} sites")
    return count


def wrong_role(trial: Trial, batch: Batch, site: Site, sites: Mapping[str, Site]) -> list[Finding]:
    """What else changes, or does not change, when the output of a site does. Raises: Unreachable."""
    role, owner = site.steps[-1][0], site.path.rpartition(".")[0]
    if owner not in sites:
        raise Unreachable(f"without edits the model has no `{owner}`: classes were changed since it was compiled")
    rows = trial.witness.locator.rows(site, "h")
    attention = trial.witness.locator.attention(sites[owner], "query")
    location = trial.witness.locator.of(site, "h")
    before = arrivals(trial, batch, attention, None, rows)
    after = arrivals(trial, batch, attention, location, rows)
    if before.keys() != set(NAMES) or after.keys() != set(NAMES):
        raise Unreachable("no attention was seen that its queries go into")
    for name, said in NAMES.items():
        changed = (before[name] != after[name]).double().mean().item()
        if name == role and changed < WHOLE:
            message = f"a change of `{site.path}` reaches {changed:.0%} of the {said} at the attention"
        elif name != role and changed:
            message = f"a change of `{site.path}` changes the {said} at the attention"
        else:
            continue
        return [
            Finding(
                code="P606",
                message=message,
                site=site.path,
                state=name,
                module=site.module,
                size=changed,
                edit=_edit(trial, site),
            )
        ]
    return []


def _edit(trial: Trial, site: Site) -> str | None:
    return next((placed.edit for placed in trial.record.site_edits if placed.site.path == site.path), None)


def arrivals(
    trial: Trial, batch: Batch, attention: Location, noisy: Location | None, rows: Slice | None
) -> dict[str, Tensor]:
    """What arrives at an attention of the base, with noise in the rows of an output where one is named."""
    found: dict[str, Tensor] = {}
    witness = Witness(trial.base, (), trial.witness.locator.sites, trial.witness.interpreter.forms, {})
    witness.watched[attention.owner] = attention

    def arrival(_: str, state: str, value: Tensor) -> None:
        found[state] = value.detach().clone()
        if state == "v":
            raise _Arrived

    witness.arrival, witness.operations.roles = arrival, True
    with WITH_GRADIENTS.of(trial.base):  # of scores: all parameters are frozen
        handle = None if noisy is None else add_noise(trial.base, noisy, rows)
        try:
            with witness.acting():
                trial.base(**batch)
        except _Arrived:
            pass
        except Exception as error:  # whatever the model's own code raises of noise
            if passes(error):
                raise
            raise Unreachable(error_summary(error)) from error
        finally:
            if handle is not None:
                handle()
    return found


def add_noise(base: nn.Module, location: Location, rows: Slice | None) -> Any:
    """Adds noise to the rows of an output in calls within its layer; what is returned takes the hooks away again."""
    inside = [0]
    module, root = base.get_submodule(location.module), base.get_submodule(location.root)

    def enter(_: nn.Module, args: Any) -> None:
        inside[0] += 1

    def leave(_: nn.Module, args: Any, result: Any) -> None:
        inside[0] -= 1

    def noise(_: nn.Module, args: Any, result: Any) -> Any:
        value = first_tensor(result)
        if not inside[0] or value is None:
            return result
        part = features(rows, value)
        drawn = torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part.device, part.dtype)
        return with_first(result, with_features(rows, value, part + drawn))

    handles = [
        root.register_forward_pre_hook(enter),
        module.register_forward_hook(noise),
        root.register_forward_hook(leave, always_call=True),
    ]
    return lambda: [handle.remove() for handle in handles]
