"""Merging adapters into checkpoints, tensor by tensor."""

from peftc.merging.merge import merge
from peftc.merging.report import MergedTensor, MergeReport

__all__ = ["MergeReport", "MergedTensor", "merge"]
