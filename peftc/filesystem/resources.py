"""The grammar, the recipes and the forms: in the wheel, or at the root of a checkout."""

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def folder(name: str) -> Path:
    """The folder `grammar`, `specs` or `forms`."""
    inside = _PACKAGE / "data" / name
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


@cache
def forms() -> dict[str, Path]:
    """The forms that are texts, by name."""
    return {path.stem: path for path in sorted(folder("forms").glob("*.peft"))}
