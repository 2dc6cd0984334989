"""The state of a model as a text, for other processes. Only models of torch's and transformers' own
classes have one: other code may change without a trace.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch

from peftc.cache.environment import LIBRARIES, library_folders
from peftc.installation.model_state import ModelState, NotComparable

_SIMPLE = frozenset({str, int, float, bool, type(None), torch.Size, torch.dtype, torch.device})


@dataclass(frozen=True)
class StateText:
    """The sha256 of a state's text, and the classes of the model."""

    sha256: str
    classes: frozenset[type]


def state_text(state: ModelState) -> StateText:
    """Raises: NotComparable for a state with code that is in no file of the libraries."""
    writer = _Writer()
    text = f"{state.modules} {writer.text(state.parts)} {state.flags} {torch.get_default_dtype()}"
    return StateText(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), frozenset(writer.classes))


class _Writer:
    def __init__(self) -> None:
        self.folders = library_folders()
        self.classes: dict[type, str] = {}
        self.functions: dict[FunctionType | CodeType, str] = {}

    def text(self, value: Any) -> str:
        """A text that is equal in another process exactly for an equal value."""
        kind = type(value)
        if kind in _SIMPLE:
            return repr(value)
        if kind is tuple:
            return f"({','.join(map(self.text, value))})"
        if isinstance(value, type):
            return self.classes.get(value) or self.of_class(value)
        if kind is FunctionType or kind is CodeType:
            return self.functions.get(value) or self.of_function(value)
        if kind is frozenset:
            return f"{{{','.join(sorted(map(self.text, value)))}}}"
        if kind is BuiltinFunctionType:
            return f"{value.__module__}.{value.__qualname__}"
        raise NotComparable

    def of_class(self, cls: type[Any]) -> str:
        library = cls.__module__.partition(".")[0]
        if library not in LIBRARIES and cls.__module__ != "builtins":
            raise NotComparable
        if library in LIBRARIES:
            self.classes[cls] = f"{cls.__module__}.{cls.__qualname__}"
        return f"{cls.__module__}.{cls.__qualname__}"

    def of_function(self, function: FunctionType | CodeType) -> str:
        code = function if isinstance(function, CodeType) else function.__code__
        if not code.co_filename.startswith(self.folders):
            raise NotComparable
        self.functions[function] = text = f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}"
        return text
