"""The operators that torchvision expects from its C++ library.

PyPI's torchvision is compiled against a torch with CUDA. Beside a torch without CUDA its library
does not load, and `import torchvision` fails: it registers answers for operators that do not
exist. Their schemas are all that it needs. No model here calls them.
"""

from __future__ import annotations

import torch

SCHEMAS = (
    "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
)


def declare() -> torch.library.Library | None:
    """Declare the schemas, if this process has none: call it before torchvision is imported."""
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


# The operators live as long as the library.
LIBRARY = declare()
