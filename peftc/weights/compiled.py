"""A compiled model whose weights can be read as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.rewriting.install import Installation, installed


def compiled(model: nn.Module) -> Installation:
    """The record of a compiled model whose edits act.

    Raises: P410 for a model that is not compiled, P529 inside of `peftc.disabled`.
    """
    record = installed(model)
    if not all(isinstance(model.get_submodule(name), kind.cls) for name, kind in record.regions):
        raise PeftcError(Diagnostic("P529", "the edits of this model are switched off by `peftc.disabled`"))
    return record


def require_values(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P527 where a tensor has a shape and no values."""
    pairs: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    missing = [name for name, tensor in pairs if not has_values(tensor)]
    if missing:
        raise PeftcError(
            Diagnostic(
                "P527",
                f"{len(missing)} of the parameters have no values, such as `{missing[0]}`",
                help="load the weights of the model first",
            )
        )
