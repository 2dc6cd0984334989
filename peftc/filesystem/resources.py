"""The grammar and the standard recipes: in the wheel, or at the root of a checkout."""

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def folder(name: str) -> Path:
    """The folder `grammar` or `specs`."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def grammar() -> str:
    """The text of `peft.lark`."""
    return (folder("grammar") / "peft.lark").read_text(encoding="utf-8")


def parser_tables() -> str:
    """The tables that `tools/parser_tables.py` makes of the grammar, as JSON."""
    return (folder("grammar") / "peft.tables.json").read_text(encoding="utf-8")


def recipes() -> dict[str, Path]:
    """The standard recipes by name: `scaled_parallel` is the file scaled-parallel.peft."""
    return {path.stem.replace("-", "_"): path for path in sorted(folder("specs").glob("*.peft"))}
