"""Requires weights that can be read in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.modules.offload import offloaded_error, offloaded_parameters


def require_values(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P527 for a tensor without values."""
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


def require_base(model: nn.Module) -> None:
    """Raises: P566 for offloaded weights, P527 for weights without values."""
    if elsewhere := offloaded_parameters(model):
        raise PeftcError(offloaded_error(elsewhere, "weights are changed in the places where they are"))
    require_values(model.named_parameters())
