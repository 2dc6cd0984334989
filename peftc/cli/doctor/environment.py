"""What a program runs on: versions, devices, the cache, the files of peftc and users' forms."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import peftc
from peftc.cache.entries import count_entries
from peftc.cache.location import cache_folder
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.forms.registry import entry_points
from peftc.models.names import error_summary
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

# What models and their trainers come from, beside what pyproject.toml names.
LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "diffusers",
    "lark",
    "peft",
    "sentence-transformers",
    "tokenizers",
    "trl",
)
OF_DEVELOPERS = ("dev", "docs")  # extras: tools
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)""")


@dataclass(frozen=True)
class Library:
    """A library that peftc needs, or works with.

    Attributes:
        version: the installed one; None if it is not installed.
        requirement: the versions that peftc takes; empty for any.
        extra: the extra of peftc that installs it; empty for none, None if peftc needs it.
    """

    name: str
    version: str | None
    requirement: str = ""
    extra: str | None = None

    @property
    def is_unsuitable(self) -> bool:
        """Whether peftc needs it, or another version of it."""
        if self.version is None:
            return self.extra is None
        return not SpecifierSet(self.requirement).contains(self.version, prereleases=True)


@dataclass(frozen=True)
class Device:
    """A device of torch.

    Attributes:
        memory: in bytes; None where torch does not say.
        dtypes: in which it multiplies matrices, and computes their gradients.
    """

    name: str
    model: str
    memory: int | None
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Cache:
    """The folder of cached site tables; None where there is none.

    Attributes:
        unusable: the entries that are damaged, or that another user may write.
        size: of all entries, in bytes.
    """

    folder: str | None
    writable: bool = False
    entries: int = 0
    unusable: int = 0
    size: int = 0


@dataclass(frozen=True)
class Language:
    """The recipes and the forms that come with peftc, read by the tables of its parser.

    Attributes:
        problem: of the first that is not what it is when it is printed and read again.
    """

    recipes: int
    forms: int
    problem: str | None = None


@dataclass(frozen=True)
class Environment:
    """All of it. `forms`: where entry points of installed distributions offer forms, by name."""

    peftc: str
    package: str
    python: str
    platform: str
    libraries: tuple[Library, ...]
    devices: tuple[Device, ...]
    cache: Cache
    language: Language
    forms: dict[str, str]


def environment() -> Environment:
    """The environment of this process."""
    return Environment(
        peftc=peftc.__version__,
        package=str(Path(peftc.__file__).parent),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        libraries=libraries(),
        devices=devices(),
        cache=cache(),
        language=language(),
        forms=entry_points(),
    )


def libraries() -> tuple[Library, ...]:
    """Those that peftc requires, those of its extras, and those around it, in this order."""
    known: dict[str, Library] = {}
    for requirement in map(Requirement, _requirements()):
        extra = match[1] if (match := _EXTRA.search(str(requirement.marker))) else None
        if extra not in OF_DEVELOPERS and (extra is None or requirement.name not in known):
            range_ = str(requirement.specifier)
            known[requirement.name] = Library(requirement.name, installed(requirement.name), range_, extra)
    for name in LIBRARIES:
        known.setdefault(name, Library(name, installed(name), extra=""))
    return tuple(sorted(known.values(), key=lambda one: (one.extra is not None, one.name)))


def _requirements() -> list[str]:
    try:
        return requires("peftc") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return ["torch", "transformers"]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices() -> tuple[Device, ...]:
    """The CPU, and the accelerators that torch has."""
    processor = platform.processor() or platform.machine()
    cpu = Device("cpu", f"{processor}, {torch.get_num_threads()} threads", None, dtypes_of(torch.device("cpu")))
    if not torch.accelerator.is_available():
        return (cpu,)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    numbers = range(torch.accelerator.device_count())
    return (cpu, *(_accelerator(torch.device(kind.type, number)) for number in numbers))


def _accelerator(device: torch.device) -> Device:
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    memory = getattr(properties, "total_memory", None)
    return Device(str(device), getattr(properties, "name", device.type), memory, dtypes_of(device))


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The dtypes in which a device has products of matrices, with gradients."""
    return tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES if has_products(device, dtype))


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        weight = torch.ones(8, 8, device=device, dtype=dtype, requires_grad=True)
        (torch.ones(4, 8, device=device, dtype=dtype) @ weight).sum().backward()
        return bool((weight.grad == 4).all())
    except (RuntimeError, TypeError):  # as torch says that it has no such kernel
        return False


def cache() -> Cache:
    folder = cache_folder()
    if folder is None:
        return Cache(None)
    above = next(path for path in (folder, *folder.parents) if path.exists())
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    return Cache(str(folder), writable, *count_entries(folder))


def language() -> Language:
    recipes, forms = resources.recipes(), resources.forms()
    problem: str | None = None
    for path in (*recipes.values(), *forms.values()):
        problem = problem or _problem(path)
    return Language(len(recipes), len(FORMS), problem)


def _problem(path: Path) -> str | None:
    """Why a file is not what it is when it is printed and read again; None if it is."""
    try:
        text = print_spec(parse_text(path.read_text(encoding="utf-8"), path.name))
        again = print_spec(parse_text(text, path.name))
    except Exception as error:  # whatever damaged tables raise
        return f"{path.name}: {error_summary(error)}"
    return None if again == text else f"{path.name} is another spec when it is printed"
