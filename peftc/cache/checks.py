"""Which specs have been checked on a model, beside its table of sites.

The table decides nearly all of a plan. Prompts, positions and names of tasks need more, which is
torch: what these have allowed once, they allow as long as the table is the same entry. So has a
spec without a diagnostic none as long as it is the same text, and the table the same entry.
"""

import hashlib
from typing import Any

from peftc.cache.entries import has_table, read, table_digest, write
from peftc.diagnostics import PeftcError
from peftc.models.names import Request, local_request
from peftc.syntax import ast
from peftc.syntax.printer import print_spec

Tasks = tuple[str, ...] | None


def is_allowed(request: Request, spec: ast.Spec, tasks: Tasks) -> bool:
    """Whether an expanded spec is known to have a plan."""
    key = _key(request, spec, tasks)
    return key is not None and read(key, lambda entry: entry["allowed"] is True) is True


def keep_allowed(request: Request, spec: ast.Spec, tasks: Tasks) -> None:
    """Keeps that an expanded spec has a plan."""
    if (key := _key(request, spec, tasks)) is not None:
        write(lambda: key, lambda: {"allowed": True}, ())


_MOST_SPECS = 2_000  # without a diagnostic, of a model


class CleanSpecs:
    """The specs that have no diagnostic on a model, by the digests of their expanded texts."""

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        self._key: dict[str, Any] | None = None
        self._digests: list[str] = []
        try:
            request = local_request(model, trust_remote_code)
        except PeftcError:  # which the plan raises, with a span
            return
        if request is not None and has_table(request):
            self._key = {"clean": 1, "table": table_digest(request)}
            self._digests = read(self._key, lambda entry: list(map(str, entry["specs"]))) or []

    def has(self, spec: ast.Spec, tasks: Tasks) -> bool:
        """Whether an expanded spec is one of them."""
        return _digest(spec, tasks) in self._digests

    def add(self, spec: ast.Spec, tasks: Tasks) -> None:
        """Keeps that an expanded spec is one of them."""
        if (key := self._key) is not None:
            self._digests = [*self._digests[1 - _MOST_SPECS :], _digest(spec, tasks)]
            write(lambda: key, lambda: {"specs": self._digests}, ())

    @property
    def is_kept(self) -> bool:
        """Whether there is a table, beside which they can be kept."""
        return self._key is not None


def _digest(spec: ast.Spec, tasks: Tasks) -> str:
    text = f"{spec.version} {None if tasks is None else list(tasks)}\n{print_spec(spec)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _key(request: Request, spec: ast.Spec, tasks: Tasks) -> dict[str, Any] | None:
    digest = table_digest(request)
    if digest is None:
        return None
    text = hashlib.sha256(print_spec(spec).encode()).hexdigest()
    return {"check": 1, "table": digest, "spec": text, "tasks": None if tasks is None else list(tasks)}
