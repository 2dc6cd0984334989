"""Functional forms: `FORMS` holds one row for each; importing this package registers them all. No torch."""

from peftc.forms import adapter, kron, lora, magnitude, phm, prefix, projected, prompt, reft, scaling, svd, weights
from peftc.forms.registry import FORMS, Args, AtInit, Count, Dims, Form, Illegal, Param, Value, register

__all__ = [
    "FORMS",
    "Args",
    "AtInit",
    "Count",
    "Dims",
    "Form",
    "Illegal",
    "Param",
    "Value",
    "adapter",
    "kron",
    "lora",
    "magnitude",
    "phm",
    "prefix",
    "projected",
    "prompt",
    "reft",
    "register",
    "scaling",
    "svd",
    "weights",
]
