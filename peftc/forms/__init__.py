"""Functional forms: `FORMS` holds one row for each; importing this package registers them all. No torch."""

from peftc.forms import adapter, lora, magnitude, prefix, scaling
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
    "lora",
    "magnitude",
    "prefix",
    "register",
    "scaling",
]
