"""A spec on a model as a picture, and as a page with the generated code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from peftc.compiler import plan_edits, sites, warn_of_places
from peftc.concurrency.garbage_collection import paused_gc
from peftc.fakes.tensors import fake_mode
from peftc.installation.compiled_model import CompiledModel, analyse_base, plan_on
from peftc.installation.record import InstalledSpec
from peftc.installation.spec_names import task_names
from peftc.models.samples import joint_sample
from peftc.observation.own_source import own_source
from peftc.pictures.code import GeneratedCode, Variant
from peftc.pictures.panels import diagram_of
from peftc.pictures.picture import Picture
from peftc.recognition.analysis import ModelLike
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike, flat_spec
from peftc.specialization.generated_class import GeneratedClass
from peftc.specialization.variants import captions
from peftc.syntax import ast
from peftc.syntax.printer import print_spec


def show(
    spec: SpecLike,
    model: ModelLike,
    *,
    settings: Settings | None = None,
    include: Include = (),
    sample: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> Picture:
    """What a spec adds to a model, as a picture: one layer of each kind, as papers draw them.

    The residual stream is a thick line. What is frozen is plain, and what is added has the colour
    of its edit: in sequence or in parallel, with its gate or scale, its equation and the parameters
    that it stores at each place. What folds into the weights is dashed.

    Args:
        spec: as in `plan`.
        model: as in `plan`.
        settings: as in `plan`.
        include: as in `plan`.
        sample: as in `plan`.
        samples: as in `plan`.
        tasks: as in `plan`.
        trust_remote_code: as in `plan`.
        cache: as in `plan`.

    Returns:
        A picture, which notebooks show, and which `save` writes as `.svg`, `.html`, `.md` (Mermaid)
        or `.dot` (Graphviz).

    Raises:
        PeftcError: as `plan`.

    Warns:
        PeftcWarning: P217, P220, P320, P325 and P326, as `plan`.

    Source: the figures of Houlsby et al. 2019, arXiv:1902.00751 (Figure 2), and of He et al. 2022,
    arXiv:2110.04366 (Figures 1 and 3).
    """
    with paused_gc():
        flat, one = flat_spec(spec, settings, include), joint_sample(sample, samples)
        planned = plan_edits(flat, model, one, tasks, trust_remote_code, cache)
        warn_of_places(planned)
        table = sites(model, sample=one, trust_remote_code=trust_remote_code, cache=cache)
        diagram = diagram_of(table, planned.plan, planned.site_edits, flat, planned.warnings)
        listing = partial(generated_code, flat, model, one, tasks, trust_remote_code)
        return Picture(diagram, planned.plan, table, print_spec(flat), listing=listing)


def generated_code(
    flat: ast.Spec,
    model: ModelLike,
    sample: Mapping[str, Any] | None = None,
    tasks: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> tuple[GeneratedCode, ...]:
    """What compiling an expanded spec generates, beside the model's code. No weight is read.

    Raises: as `peftc.compile`.
    """
    analysis, names = analyse_base(model, sample, trust_remote_code), task_names(tasks)
    planned, skeleton = plan_on(analysis, flat, names), analysis.structure.model
    with fake_mode(skeleton):
        compiled = CompiledModel(skeleton, analysis=analysis)
        compiled.add(InstalledSpec("page", flat, planned.deferred_plan, 0), planned, tasks=names)
        try:
            return tuple(_listings(compiled))
        finally:
            compiled.remove()


def _listings(compiled: CompiledModel) -> Iterator[GeneratedCode]:
    modules: dict[int, list[str]] = {}
    kinds: dict[int, GeneratedClass] = {}
    for name, kind in compiled.installation.regions:
        kinds[id(kind)] = kind
        modules.setdefault(id(kind), []).append(name)
    for key, kind in kinds.items():
        forward, pairs = own_source(kind.base), zip(captions(kind.variants), kind.variants, strict=True)
        variants = tuple(Variant(one.name, caption, tuple(one.source.splitlines())) for caption, one in pairs)
        yield GeneratedCode(kind.name, tuple(modules[key]), forward.name, tuple(forward.lines), variants)
