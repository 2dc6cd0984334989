"""The edits that stay, as an adapter for the merged checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from peftc.adapters.base import base_of
from peftc.adapters.saving import save_as
from peftc.folding.weights import Folding
from peftc.installation.journal import transaction
from peftc.installation.record import installation_of
from peftc.merging.base_model import BaseModel
from peftc.merging.checkpoint import Checkpoint, sample_places
from peftc.merging.other_files import REST


def save_rest(base: BaseModel, folding: Folding, folded: Collection[str], work: Path, target: Path) -> None:
    """Takes the folded edits out of the model, and saves the others on the merged weights.

    `target`: where these will be.
    """
    merged = Checkpoint.open(work)
    with transaction() as (journal, _):
        if folded:
            folding.remove_edits(folded, (), journal)
    for name in dict.fromkeys(names[0] for names in base.names.values()):
        parameter = base.parameters[name]
        first = base.first(name)
        assert first is not None
        group = base.groups[first]
        if id(parameter) in base.own_values:
            continue
        if group.converter is None:
            parameter.data = merged.sample(group.keys[0])
        else:
            value, places = (
                group.values({k: merged.read(k) for k in group.keys})[first],
                sample_places(parameter.numel()),
            )
            parameter.data.view(-1)[places] = value.reshape(-1)[places]
    merged.close()
    description = base_of(base.model, installation_of(base.model))
    if (origin := description.origin) is not None:
        origin = origin.model_copy(update={"name": str(target.resolve()), "revision": None})
    save_as(base.model, work / REST, description=description.model_copy(update={"origin": origin}))
