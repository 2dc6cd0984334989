"""What the styles of `torch.distributed.tensor.parallel` see of an edited Linear: the Linear alone.

They split every parameter of each module in it, and know no other module there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

PARALLELIZED = "_distribute_module_applied"  # which `parallelize_module` sets in the end
_STYLES = ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.style")


def parallel_members(base: type[nn.Module]) -> dict[str, Any]:
    """Members of the generated class of a Linear, derived from `base`."""
    if not issubclass(base, nn.Linear):
        return {}

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter([("", self)]) if _is_asked_by_style() else base.named_modules(self, *args, **kwargs)

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if _is_asked_by_style():
            return base.named_parameters(self, recurse=False)
        return base.named_parameters(self, *args, **kwargs)

    return {"named_modules": named_modules, "named_parameters": named_parameters}


def _is_asked_by_style() -> bool:
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    return caller.f_globals.get("__name__") in _STYLES
