"""Weights that can be read as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values


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
