"""Weights at rest and at work: saving and loading adapters, folding edits into the base."""

from peftc.weights.fold import fold
from peftc.weights.load import load
from peftc.weights.report import FoldReport
from peftc.weights.save import save

__all__ = ["FoldReport", "fold", "load", "save"]
