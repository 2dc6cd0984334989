"""The line of a model's code at which an error was raised."""

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent.parent)
_STDLIB = sysconfig.get_path("stdlib")


def model_line(error: BaseException | None) -> str | None:
    """`file.py:12, in Attention.forward: q = self.q(x)`; None if no such code ran.

    Of the frames of the error, and of the one that caused it, the innermost that is neither
    peftc's nor PyTorch's nor Python's.
    """
    while error is not None:
        last, traceback = None, error.__traceback__
        while traceback is not None:
            if _is_model_code(traceback.tb_frame.f_code.co_filename):
                last = _shown(traceback.tb_frame, traceback.tb_lineno)
            traceback = traceback.tb_next
        if last is not None:
            return last
        error = error.__cause__
    return None


def _is_model_code(filename: str) -> bool:
    torch = sys.modules.get("torch")
    folders = [_OWN, *([] if torch is None or torch.__file__ is None else [os.path.dirname(torch.__file__)])]
    if filename.startswith("<") or any(filename.startswith(folder + os.sep) for folder in folders):
        return False
    return not filename.startswith(_STDLIB + os.sep) or "-packages" in filename


def _shown(frame: FrameType, number: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    folders = [path for path in sys.path if path and code.co_filename.startswith(path.rstrip(os.sep) + os.sep)]
    name = os.path.relpath(code.co_filename, max(folders, key=len)) if folders else code.co_filename
    return f"{name}:{number}, in {code.co_qualname}" + (f": `{source}`" if source else "")
