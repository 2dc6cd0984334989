"""The operators that torchvision expects from its C++ library; `make foreign` copies this file into
the environment, where Python imports it at the start of every process.

PyPI's torchvision is compiled against a torch with CUDA. Beside a torch without CUDA its library
does not load, and `import torchvision` fails: it registers answers for operators that do not
exist. Their schemas are all that it needs, and no model of the benchmark calls them. They are
declared when somebody looks for torchvision, since they need torch, which takes a second to import.
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMAS = (
    "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
)


class Declaration(MetaPathFinder):
    """Finds nothing. Before torchvision is found by others, its operators are declared."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations" and self.library is None:
            from torch.library import Library

            self.library = Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                self.library.define(schema)


sys.meta_path.insert(0, Declaration())
