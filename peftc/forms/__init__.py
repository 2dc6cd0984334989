"""Forms: what they are to the planner, and those whose equation is code. No torch.

A form that a text can say needs nothing of this: `form NAME(…) { … }` in a spec. A form that is a
Python class derives from `Form`, its module from `FormModule`, and a program makes it known by
`register`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from peftc.forms.form import Args, Argument, ArgumentValue, Count, Dims, Form, Parameter, PlacementError, Scope
from peftc.forms.registry import PYTHON_FORMS, register, register_entry_point, unregister

if TYPE_CHECKING:
    from peftc.forms.module import FormModule
    from peftc.forms.selective_module import SelectiveModule

_TORCH = {"FormModule": "module", "SelectiveModule": "selective_module"}

__all__ = [
    "PYTHON_FORMS",
    "Args",
    "Argument",
    "ArgumentValue",
    "Count",
    "Dims",
    "Form",
    "FormModule",
    "Parameter",
    "PlacementError",
    "Scope",
    "SelectiveModule",
    "register",
    "register_entry_point",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """Imports what needs torch at its first use."""
    if name in _TORCH:
        return getattr(import_module(f"peftc.forms.{_TORCH[name]}"), name)
    raise AttributeError(f"module 'peftc.forms' has no attribute {name!r}")
