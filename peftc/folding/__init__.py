"""Folding edits into what the base has: weights, the width of a feed-forward network, caches."""

from peftc.folding.dispatch import State, fold
from peftc.folding.report import FoldReport

__all__ = ["FoldReport", "State", "fold"]
