"""Which specs have been checked against the graphs of a model, beside its table of sites.

The table decides nearly all of a plan. Prompts, positions and names of tasks need more, which is
torch: what these have allowed once, they allow as long as the table is the same entry.
"""

import hashlib
from typing import Any

from peftc.cache.entries import read, table_digest, write
from peftc.models.names import Request
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


def _key(request: Request, spec: ast.Spec, tasks: Tasks) -> dict[str, Any] | None:
    digest = table_digest(request)
    if digest is None:
        return None
    text = hashlib.sha256(print_spec(spec).encode()).hexdigest()
    return {"check": 1, "table": digest, "spec": text, "tasks": None if tasks is None else list(tasks)}
