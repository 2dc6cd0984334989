"""The cached table of a model that files name."""

import os
from os import PathLike

from peftc.addressing.sites import SiteTable
from peftc.cache.entries import read_table
from peftc.diagnostics import PeftcError
from peftc.diagnostics.activity import note
from peftc.models.names import local_request


def cached_table(model: object, trust_remote_code: bool = False) -> SiteTable | None:
    """The cached table of a catalogue id, a folder or a config.json; None for all else."""
    if not isinstance(model, str | PathLike):
        return None
    try:
        request = local_request(os.fspath(model), trust_remote_code)
    except PeftcError:  # which resolving the model raises, with a span
        return None
    if request is None:
        return None
    table = read_table(request)
    note(f"the sites of {request.name} are {'from' if table else 'not in'} the cache")
    return table
