"""An adapter of AdapterHub as equations at sites, and parameters of the base that it replaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.exchange.adapterhub.bottlenecks import bottlenecks, is_bottleneck
from peftc.exchange.adapterhub.folder import HEAD_CONFIG, HubAdapter
from peftc.exchange.adapterhub.fusion import fusions
from peftc.exchange.adapterhub.interventions import ARCHITECTURE, interventions
from peftc.exchange.adapterhub.invertible import HOLDER, KIND, invertible
from peftc.exchange.adapterhub.low_rank import ARCHITECTURES, low_rank
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.prefixes import prefixes
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.places import aliases
from peftc.forms.module import has_values
from peftc.recognition.analysis import Analysis

_ARCHITECTURES = (*ARCHITECTURES, "prefix_tuning", ARCHITECTURE)
_NONE = {
    "prompt_tunings": "a prompt behind the embeddings' norm and positions",
}
# The kinds of parts that tensors are of.
_KINDS = {
    "adapters": {"bottleneck"},
    "prefix_tunings": {"prefix"},
    "loras": {"lora", "ia3"},
    "refts": {"reft"},
    HOLDER: {KIND},
}


@dataclass(eq=False)
class HubParts:
    """The parts by site, and the parameters of a head by name."""

    parts: list[SitePart]
    heads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def read_parts(adapter: HubAdapter, analysis: Analysis, model: nn.Module) -> HubParts:
    """Raises: P802, P803, P804."""
    for holder, what in _NONE.items():
        if next(adapter.of(holder), None) is not None:
            raise PeftcError(Diagnostic("P802", f"the adapter has {what}, for which there is no equation"))
    for config in adapter.configs:
        if not is_bottleneck(config) and (kind := config.values.get("architecture")) not in _ARCHITECTURES:
            raise refusal("architecture", kind, f"peftc reads bottlenecks, {join_names(list(_ARCHITECTURES))}")
        config.seen.add("architecture")
    places = HubPlaces(analysis, model)
    readers = (invertible, fusions, prefixes, bottlenecks, low_rank, interventions)
    parts = [part for read in readers for part in read(adapter, places)]
    if not parts:
        raise damaged("the adapter has no tensors")
    unused = {one.kind for one in parts}
    for holder, kinds in _KINDS.items():
        if next(adapter.of(holder), None) is not None and not kinds & unused:
            raise damaged(f"the adapter has tensors of {holder}, and the configuration has none")
    return HubParts(parts, _heads(adapter, model))


def _heads(adapter: HubAdapter, model: nn.Module) -> dict[str, Tensor]:
    """What a head has of its own. Raises: P802 for a head that the library builds."""
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    heads = dict[str, Tensor]()
    for name, tensor in adapter.heads.items():
        present = parameters.get(name, buffers.get(name))
        if adapter.is_own(name) or (present is not None and _is_same(present, tensor)):
            continue
        if name not in parameters:
            message = f"the folder has a prediction head ({HEAD_CONFIG}), and the base has no parameter `{name}`"
            help_ = "name a base with such a head, or import a copy of the folder without the files of the head"
            raise PeftcError(Diagnostic("P802", message, help=help_))
        heads[aliases(model, name)[0]] = tensor
    return heads


def _is_same(present: Tensor, tensor: Tensor) -> bool:
    return has_values(present) and present.shape == tensor.shape and bool((present == tensor).all())
