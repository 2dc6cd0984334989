"""Weights at rest and at work: saving and loading adapters, folding edits into the base."""

from peftc.weights.folding import fold
from peftc.weights.fusing import fuse
from peftc.weights.loading import load
from peftc.weights.report import FoldReport
from peftc.weights.saving import save
from peftc.weights.start import warm_start
from peftc.weights.state import State

__all__ = ["FoldReport", "State", "fold", "fuse", "load", "save", "warm_start"]
