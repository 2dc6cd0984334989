"""What a site table depends on besides its configuration: versions, source files, switches.

Nothing is imported to find out. Distributions are read off the names of their folders; source files
that a trace has used are listed with the table, and compared when it is read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MethodDescriptorType, ModuleType
from typing import Any

LIBRARIES = ("torch", "transformers")
_DECORATORS = ("huggingface_hub",)  # whose functions stand around those of configurations
_PACKAGES = ("transformers.", "peftc.")  # how the names of modules begin whose code a trace may run
_METADATA = (".dist-info", ".egg-info")
# Variables that change what these libraries do, and so the code that a trace meets.
_SWITCHES = ("TRANSFORMERS_", "TORCH_", "PYTORCH_", "USE_", "ATTN_", "FLASH_", "CUDA_VISIBLE_DEVICES", "PEFTC_")
_INDIFFERENT = frozenset(
    {"PEFTC_CACHE", "PEFTC_TRACEBACK", "PEFTC_TESTS", "TRANSFORMERS_VERBOSITY", "TRANSFORMERS_CACHE"}
)

_WITHOUT_CODE = frozenset(
    {bool, int, float, str, type(None), list, tuple, dict, MethodDescriptorType, GetSetDescriptorType}
)

# Path, size, time of the last change in ns, sha256 or "", and the time, which no program can set,
# of the last change that the system noted; 0 where a later change may have the same time.
FileRecord = list[Any]
_TICK = 2_000_000_000  # the longest that the clock of a file system stands still, in ns


def environment() -> dict[str, Any]:
    """Versions, places and switches, as JSON data."""
    switches = {name: value for name, value in os.environ.items() if name.startswith(_SWITCHES)}
    return {
        "python": sys.version,
        "machine": f"{sys.platform} {platform.machine()}",
        "distributions": _digest(distributions()),
        "origins": [_origin(library) for library in LIBRARIES],
        "peftc": __file__,
        "switches": {name: switches[name] for name in sorted(switches.keys() - _INDIFFERENT)},
    }


def distributions() -> list[str]:
    """The names of all installed distributions with their versions, in the order of `sys.path`."""
    names: list[str] = []
    for folder in dict.fromkeys(sys.path):
        try:
            names += sorted(f"{folder}:{name}" for name in os.listdir(folder or ".") if name.endswith(_METADATA))
        except OSError:
            continue
    return names


def _origin(library: str) -> str | None:
    if library in sys.modules:
        return getattr(sys.modules[library], "__file__", None)
    try:
        spec = find_spec(library)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def source_records(classes: Iterable[type]) -> list[FileRecord]:
    """The source files of these classes, with their content, and those of all loaded modules of
    transformers and peftc, which may be in development, with their size and time.
    """
    names = {name for cls in classes if (name := cls.__module__).partition(".")[0] in LIBRARIES}
    loaded = {name for name in list(sys.modules) if name.startswith(_PACKAGES)}
    files = {file: name in names for name in sorted(loaded | names) if (file := _file(sys.modules.get(name)))}
    records = [_status(file, with_content) for file, with_content in files.items()]
    return [record for record in records if record is not None]


def is_unchanged(records: Iterable[FileRecord]) -> bool:
    """Whether files are what they were when these records were made."""
    return all(_is_unchanged(*record) for record in records)


def _is_unchanged(file: str, size: int, modified: int, content: str, noted: int) -> bool:
    try:
        status = os.stat(file)
        if (status.st_size, status.st_mtime_ns) != (size, modified):
            return False
        return not content or status.st_ctime_ns == noted or _sha256(file) == content
    except OSError:
        return False


def _file(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _status(file: str, with_content: bool) -> FileRecord | None:
    try:
        status = os.stat(file)
        content = _sha256(file) if with_content else ""
    except OSError:
        return None
    noted = status.st_ctime_ns
    is_unique = time.time_ns() - noted > _TICK and sys.platform != "win32"  # where it is that of the creation
    return [file, status.st_size, status.st_mtime_ns, content, noted if is_unique else 0]


def _sha256(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def are_pristine(classes: Iterable[Sequence[str]]) -> bool:
    """Whether this process has left classes, named by module and name, as their files define them.

    All functions of the classes, and of transformers' modules of models, are from the files of
    these libraries or Python's. What has not been imported has not been patched.
    """
    roots = library_folders()
    loaded = [(sys.modules[module], name) for module, name in classes if module in sys.modules]
    modules = {module for module, _ in loaded if module.__name__.startswith("transformers.models.")}
    functions = ((value, name) for module in modules for name, value in list(vars(module).items()))
    if not all(_is_from(value, name, roots) for value, name in functions if isinstance(value, FunctionType)):
        return False
    return all(_is_own(getattr(module, name, None), module, name, roots) for module, name in loaded)


def library_folders() -> tuple[str, ...]:
    """How the names of files of these libraries, and of Python's, begin."""
    folders = (os.path.dirname(origin) + os.sep for origin in map(_origin, LIBRARIES + _DECORATORS) if origin)
    return (*folders, os.path.dirname(os.__file__) + os.sep, "<frozen")


def _is_own(cls: object, module: ModuleType, name: str, roots: tuple[str, ...]) -> bool:
    """Whether this is the class that a module defines, with the functions that it had there."""
    if not isinstance(cls, type) or (cls.__module__, cls.__qualname__) != (module.__name__, name):
        return False
    if module.__name__.partition(".")[0] not in LIBRARIES:
        return True
    members = [(name, value) for name, value in vars(cls).items() if type(value) not in _WITHOUT_CODE]
    return all(_is_from(value, name, roots) for name, value in members)


def _is_from(value: Any, name: str, roots: tuple[str, ...]) -> bool:
    if type(value) is FunctionType and not value.__dict__ and value.__code__.co_filename.startswith(roots):
        return True  # most are
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while value is not None:
        code = getattr(value, "__code__", None)
        if code is not None and not code.co_filename.startswith(roots):
            # The methods that `dataclass` generates have no file.
            return code.co_filename.startswith("<") and name.startswith("__")
        value = getattr(value, "__wrapped__", None)
    return True
