"""Quantised checkpoints as dense ones: each weight is dequantised when it is read."""

from peftc.merging.dequantization.checkpoint import DenseCheckpoint, open_dense
from peftc.merging.dequantization.configuration import quantization_of, without_quantization

__all__ = ["DenseCheckpoint", "open_dense", "quantization_of", "without_quantization"]
