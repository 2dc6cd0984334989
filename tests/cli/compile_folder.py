"""The spec, and the contents of output folders, of the tests of `peftc compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import peftc
from peftc.filesystem.atomic import MARKER

SPEC = """peft 1

method both(r = 2) {
    edit q at layer[*].attn.q { h += lora(x, r=r) }
    edit ffn at layer[*].ffn { h += adapter(x, r=r) }
}
"""
OLD = {"plan.json": "old plan", "spec.peft": "old spec", "README.md": "old", "forward_old.py": "old forward"}
NEW = {"plan.json": "new plan", "spec.peft": "new spec", "README.md": "new", "forward_new.py": "new forward"}

Out = pytest.CaptureFixture[str]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes; None for anything that is not a regular file."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in paths}


def texts(folder: Path) -> dict[str, str]:
    return {name: (content or b"").decode() for name, content in contents(folder).items() if name != MARKER}


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(peftc.PeftcError) as excinfo:
        action()
    (diagnostic,) = excinfo.value.diagnostics
    return diagnostic.code
