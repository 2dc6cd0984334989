"""Text for terminals of any width, without colours."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain_text(result: RenderableType, width: int) -> str:
    """Text without colours and without blanks at the ends of lines."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False, highlight=False).print(result)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
