"""A spec on a model as a picture, and as a page with the generated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peftc.compiler import plan_edits, sites, warn_of_unplaced
from peftc.concurrency.garbage_collection import paused_gc
from peftc.models.samples import joint_sample
from peftc.pictures.panels import diagram_of
from peftc.pictures.picture import Picture
from peftc.recognition.analysis import ModelLike
from peftc.semantics.files import Include
from peftc.semantics.spec_argument import Settings, SpecLike, flat_spec


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
        A picture, which notebooks show, and which `save` writes as `.svg`, `.md` (Mermaid) or
        `.dot` (Graphviz).

    Raises:
        PeftcError: as `plan`.

    Warns:
        PeftcWarning: P217, as `plan`.

    Source: the figures of Houlsby et al. 2019, arXiv:1902.00751 (Figure 2), and of He et al. 2022,
    arXiv:2110.04366 (Figures 1 and 3).
    """
    with paused_gc():
        flat, one = flat_spec(spec, settings, include), joint_sample(sample, samples)
        planned = plan_edits(flat, model, one, tasks, trust_remote_code, cache)
        warn_of_unplaced(planned)
        table = sites(model, sample=one, trust_remote_code=trust_remote_code, cache=cache)
        return Picture(diagram_of(table, planned.plan, planned.site_edits, flat, planned.warnings))
