"""The pipeline, in order. Read this first.

text → `parse` → Spec → `expand` → a flat Spec → `analyse` a model → `make_plan` → `regions_of` → `Surgery` → the same model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.model.fakes import fake_copy
from peftc.model.load import load_model
from peftc.model.resolve import resolve
from peftc.planning.plan import Plan, Planned, make_plan
from peftc.rewriting.install import (
    Installation,
    Surgery,
    installed,
    is_installed,
    regions_of,
    suspended,
    uninstall,
    warm,
)
from peftc.semantics.expand import expand
from peftc.semantics.load import read_spec
from peftc.semantics.settings import settings_of
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec
from peftc.tracing.analysis import Analysis, ModelLike, analyse
from peftc.tracing.sites import SiteTable

SpecLike = str | PathLike[str] | ast.Spec
Settings = Mapping[str, object]  # of a method's parameters: numbers, truths, texts as after `--set`, expressions


def parse(text: str, path: str = "<text>") -> ast.Spec:
    """The spec that a text states.

    Raises: P0xx, every syntax error of the text.
    """
    return parse_text(text, path)


def spec_of(spec: SpecLike) -> ast.Spec:
    """A spec from a path, from text (anything with a line break in it, or that begins as specs do), or as it is."""
    if isinstance(spec, ast.Spec):
        return spec
    if not isinstance(spec, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        raise PeftcError(Diagnostic("P112", f"a spec is a path, a text or a parsed Spec, not a {type(spec).__name__}"))
    name = fspath(spec)
    if isinstance(spec, str) and (not name or "\n" in name or name.lstrip().startswith("peft ")):
        return parse_text(name)
    return read_spec(name)


def flat_of(spec: SpecLike, settings: Settings | None = None) -> ast.Spec:
    """A spec expanded: nothing but edits, `train`, `expect` and shared parameters is left."""
    return expand(spec_of(spec), settings_of(settings or {}))


def sites(model: ModelLike, *, sample: Mapping[str, Any] | None = None) -> SiteTable:
    """Every place of a model that an edit can name, with its hidden states, shapes and weights. No weight is read.

    Args: `model`: a module, a config, or a name (hub id, folder, config.json). `sample`: the keyword arguments of one
    forward, for a model that cannot be fed from its config.
    """
    return analysed(model, sample).table


def plan(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    sample: Mapping[str, Any] | None = None,
) -> Plan:
    """What compiling `spec` onto `model` would do: sites, exact parameter counts, fold verdicts. No weight is read.

    Args: `settings`: parameters of the spec's method to override, as `--set` does. `sample`: as in `sites`.
    Raises: P0xx syntax, P1xx names and arguments, P2xx sites, P3xx shapes, P5xx the model.
    """
    return planned(flat_of(spec, settings), analysed(model, sample)).plan


def planned(flat: ast.Spec, analysis: Analysis) -> Planned:
    """The plan of an expanded spec, and what it was made from."""
    return make_plan(flat, analysis.table)


def analysed(model: ModelLike, sample: Mapping[str, Any] | None = None) -> Analysis:
    """The analysis of a model as it is without edits."""
    if isinstance(model, nn.Module) and is_installed(model):
        model = uninstall(fake_copy(model))
    return analyse(model, sample)


def compile(
    spec: SpecLike,
    model: ModelLike,
    seed: int | None = None,
    *,
    settings: Settings | None = None,
    sample: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Changes `model` in place as `spec` says, and returns it. A name is loaded with its weights, a config gets random ones.

    The base is frozen; the parameters of the edits (and those that `train` names) require gradients. The forward of each
    edited region becomes a generated subclass of its own class; everything else of the model stays as it is.
    `remove(model)` undoes it bit for bit.

    Args: `seed`: of the initial values, which depend on it, the edit, the site and the parameter alone (default: torch's
    initial seed).
    Raises: as `plan`; P304 for an expectation that does not hold; P411 for a model that is compiled already. After an
    error the model is as it was.
    """
    if is_installed(model):
        raise PeftcError(Diagnostic("P411", "this model is compiled already", help="peftc.remove(model) first"))
    if not isinstance(model, nn.Module):
        model = load_model(resolve(model))
    flat = flat_of(spec, settings)
    analysis = analyse(model, sample)
    found = planned(flat, analysis)
    if found.findings:
        raise PeftcError(found.findings)
    return installed_on(model, flat, found, analysis, torch.initial_seed() if seed is None else seed, sample)


def installed_on(
    model: nn.Module,
    flat: ast.Spec,
    found: Planned,
    analysis: Analysis,
    seed: int,
    sample: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Installs what was planned: all or nothing."""
    surgery = Surgery(model, seed)
    regions = regions_of(found.placed, analysis.anatomy)
    surgery.prepare(regions)
    parameters = dict(model.named_parameters())
    flags = {n: p.requires_grad for n, p in parameters.items()}
    trained = found.trained
    originals = {n: parameters[n].detach().clone() for n in trained.values()}

    def record(done: Surgery) -> Installation:
        made = [(name, kind) for name, _, kind, _ in done.prepared]
        text = print_spec(flat)
        return Installation(
            text, found.plan, seed, made, flags, dict(trained), originals, done.places, list(found.placed)
        )

    surgery.apply(trained, record)
    try:
        warm(model, sample)
    except BaseException:
        uninstall(model)
        raise
    return model


def remove(model: nn.Module) -> nn.Module:
    """The base model again: classes, parameters and `requires_grad` as they were before `compile`, bit for bit.

    What `fold` has written into the weights is part of the base from then on, and stays.
    Raises: P410 for a model that is not compiled.
    """
    return uninstall(model)


@contextmanager
def disabled(model: nn.Module) -> Generator[nn.Module]:
    """Inside the block the model computes what the base computes; parameters of edits are kept.

    Raises: P410 for a model that is not compiled.
    """
    with suspended(model):
        yield model


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a compiled model trains, by the names under which it is saved: `<edit>/<site>/<form>.<parameter>`.

    Parameters of the base that `train` unfroze are named `<edit>/<dotted name>`.
    Raises: P410 for a model that is not compiled.
    """
    record = installed(model)
    found: dict[str, nn.Parameter] = {}
    for name, place in record.places.items():
        found |= {f"{name}.{n}": p for n, p in model.get_submodule(place).named_parameters()}
    return found | {name: model.get_parameter(place) for name, place in record.trained.items()}


@dataclass(frozen=True)
class InstalledRegion:
    """A rewritten module: its dotted name, the graph of each variant of its forward, and the code they became."""

    module: str
    graphs: tuple[torch.fx.Graph, ...]
    code: str


def graphs(model: nn.Module) -> dict[str, InstalledRegion]:
    """The rewritten regions of a compiled model, by dotted name.

    Raises: P410 for a model that is not compiled.
    """
    return {
        name: InstalledRegion(name, tuple(v.graph for v in kind.variants), kind.source)
        for name, kind in installed(model).regions
    }
