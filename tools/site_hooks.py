"""What the site needs beside mkdocs.yml: two readers of Markdown differ in one thing."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Pipes in code in tables are escaped for GitHub. Python-Markdown would show the backslash."""
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`\n]*`", _without_escape, row[0]), markdown, flags=re.M)


def _without_escape(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
