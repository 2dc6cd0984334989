"""The line of a model's code at which an error was raised, or that is running."""

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

_OWN = str(Path(__file__).parent.parent)
_STDLIB = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class ModelLine:
    """A line of some code; its text is made when someone asks for it."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        path = self.code.co_filename
        source = linecache.getline(path, self.number).strip()
        folders = [folder for folder in sys.path if folder and path.startswith(folder.rstrip(os.sep) + os.sep)]
        name = os.path.relpath(path, max(folders, key=len)) if folders else path
        return f"{name}:{self.number}, in {self.code.co_qualname}" + (f": `{source}`" if source else "")


def running_frame() -> FrameType | None:
    """The innermost frame of code not peftc's, PyTorch's or Python's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not is_model_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def running_line() -> ModelLine | None:
    """The innermost line that is running of code not peftc's, PyTorch's or Python's."""
    frame = running_frame()
    return None if frame is None else ModelLine(frame.f_code, frame.f_lineno)


def model_line(error: BaseException | None) -> str | None:
    """`file.py:12, in Attention.forward: q = self.q(x)`; None if no such code ran.

    Of the frames of the error, and of the one that caused it, the innermost that is neither
    peftc's nor PyTorch's nor Python's.
    """
    while error is not None:
        last, traceback = None, error.__traceback__
        while traceback is not None:
            if is_model_code(traceback.tb_frame.f_code.co_filename):
                last = str(ModelLine(traceback.tb_frame.f_code, traceback.tb_lineno))
            traceback = traceback.tb_next
        if last is not None:
            return last
        error = error.__cause__
    return None


def definition_line(function: Any) -> ModelLine | None:
    """Where a function, a method, a partial or the call of an object is defined; None for C code,
    and for code of peftc's, PyTorch's or Python's.
    """
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    function = unwrap(getattr(function, "__func__", function))
    call: Any = type(function).__call__ if callable(function) else None
    code = getattr(function, "__code__", None) or getattr(call, "__code__", None)
    if not isinstance(code, CodeType) or not is_model_code(code.co_filename):
        return None
    return ModelLine(code, code.co_firstlineno)


def is_model_code(filename: str) -> bool:
    """Whether code of a file is neither peftc's nor PyTorch's nor Python's."""
    torch = sys.modules.get("torch")
    folders = [_OWN, *([] if torch is None or torch.__file__ is None else [os.path.dirname(torch.__file__)])]
    if filename.startswith("<") or any(filename.startswith(folder + os.sep) for folder in folders):
        return False
    return not filename.startswith(_STDLIB + os.sep) or "-packages" in filename
