"""The folder in which sessions take place."""

from __future__ import annotations

from pathlib import Path

import pytest

import peftc
from tests import zoo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models whose tables are cached, so that the server needs no torch."""
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("bart", "gpt2"):
        zoo.config(name).to_json_file(f"{name}.json", use_diff=False)
        peftc.sites(f"{name}.json")
    return tmp_path
