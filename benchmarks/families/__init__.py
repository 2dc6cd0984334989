"""A tiny random model of every model type of the installed transformers, for the coverage benchmark
and its tests.
"""

from benchmarks.families.build import Unbuildable, build
from benchmarks.families.pairs import MAPPINGS, Pair, pair_of, pairs

__all__ = ["MAPPINGS", "Pair", "Unbuildable", "build", "pair_of", "pairs"]
