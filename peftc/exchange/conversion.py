"""`peftc.convert`: an adapter as one of LoRA alone."""

from __future__ import annotations

from os import PathLike

from torch import Tensor

from peftc.adapters.files import path_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapter_import import ImportedAdapter, output_name, write_adapter
from peftc.exchange.edited_model import Model, edited
from peftc.exchange.export import check_rank, exported_modules, whole_modules
from peftc.exchange.lora_export import LoraAdapter, lora_of, no_product
from peftc.exchange.peft_format.reading import Incoming
from peftc.exchange.peft_format.types import shown
from peftc.exchange.report import ExportedModule
from peftc.exchange.spec_text import ModulePart
from peftc.folding.weights import Folding
from peftc.installation.compiled_model import CompiledModel


def convert(
    adapter: str | PathLike[str],
    output: str | PathLike[str],
    *,
    rank: int,
    model: Model | None = None,
    other_weights: bool = False,
    trust_remote_code: bool = False,
) -> tuple[ImportedAdapter, list[ExportedModule]]:
    """Writes a saved adapter as one of LoRA alone, for any edits that fold.

    A change of at most this rank is exact, as in `export`. Of any other, and of any edit that
    folds, it is the nearest one: W' − W = U S Vᵀ, and B A has the largest singular values.

    Args:
        adapter: a folder that `save` wrote.
        output: a new folder, or one with an adapter, which is replaced.
        rank: of each LoRA, at most.
        model: as in `export`.
        other_weights: as in `load`.
        trust_remote_code: as in `plan`.

    Returns:
        The new adapter, and for each module ‖Δ − B A‖ / ‖Δ‖, where it is not exact.

    Raises:
        PeftcError: P501-P506 (the base), P520-P526 (the adapters), P545 (arguments), P801 (an edit
            that does not fold), P806 (weights are needed).
    """
    check_rank("rank", rank)
    if not isinstance(adapter, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise PeftcError(Diagnostic("P545", "a saved adapter is converted", help="save the model first"))
    with edited(adapter, model, other_weights, trust_remote_code) as base:
        folding = Folding(base.module, None, None, None)
        lora = lora_of(base, folding, rank, svd=True)
        if not lora.weights:
            raise no_product(", ".join(folding.names), "it changes no Linear")
        saved = {
            name: tensor.clone()
            for own in whole_modules(base, folding, lora.weights).values()
            for name, tensor in own.items()
        }
        report = exported_modules(lora)
        CompiledModel(base.module).remove()
        parts = [lora_part(module, lora) for module in lora.weights]
        return write_adapter(base, Incoming("lora", parts, saved), path_of(output), output_name(output)), report


def lora_part(module: str, adapter: LoraAdapter) -> ModulePart:
    weights = adapter.weights[module]
    alpha = weights.scale * weights.rank
    number = "" if alpha == weights.rank else f"{shown(weights.scale)} * "
    options = f", dropout={shown(adapter.dropout)}" if adapter.dropout and module not in adapter.tables else ""
    tensors: dict[str, Tensor] = {"lora.A": weights.a, "lora.B": weights.b}
    return ModulePart(module, f"h += {number}lora(x, r={weights.rank}{options})", tensors)
