"""Invertible adapters of AdapterHub: behind the embeddings, and the inverse before the head, which
the library applies in models that it knows by an interface.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.bottlenecks import activation, is_bottleneck
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

HOLDER, KIND = "invertible_adapters", "invertible"
FORM, KEY, FACTOR = "coupling", "inv_adapter", "inv_adapter_reduction_factor"
NICE = "nice"  # the value of `inv_adapter` for which there is a form
_SHARED, _INVERSE = "nice", "inverse"  # names of the spec
_MODULES = {"0.weight": "down", "0.bias": "down_bias", "2.weight": "up", "2.bias": "up_bias"}
# The library's names of the parameters.
NAMES = {f"{net}.{end}": f"{FORM}.{net}_{name}" for net in "FG" for end, name in _MODULES.items()}


def invertible(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    config = next((one for one in adapter.configs if is_bottleneck(one) and one.values.get(KEY) is not None), None)
    own = list(adapter.of(HOLDER))
    if config is None:
        return
    if config.read(KEY, None) != NICE:
        raise refusal(KEY, config.values[KEY], f"there is an equation for `{NICE}` alone")
    if {one.end for one in own} != set(NAMES):
        raise damaged(f"the configuration has `{KEY}: {NICE}`, and the tensors disagree")
    tensors: dict[str, Tensor] = {NAMES[one.end]: one.value for one in own}
    factor = config.number(FACTOR, 2.0)
    options = [*([] if factor == 2 else [f"reduction={shown(factor)}"])]
    options += [*([] if (act := activation(config)) == "relu" else [f"act={act}"])]
    site = places.embeddings(own[0].owner, adapter.embeddings)
    head = places.output_embeddings if adapter.embeddings else None
    if head is None:
        yield SitePart(KIND, site, (f"h = {FORM}({', '.join(['h', *options])})",), tensors)
        return
    if "head" not in head.frozen_modules:
        raise PeftcError(Diagnostic("P802", f"the inverse stands before `{head.module}`, which no equation calls"))
    text = f"let {_SHARED} = shared({FORM}({', '.join(options)}))"
    yield SitePart(KIND, site, (f"h = {_SHARED}(h)",), tensors, (text,))
    yield SitePart(_INVERSE, head, (f"h = head({_SHARED}(x, inverse=true))",), tensors, (text,))
