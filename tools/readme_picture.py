"""The picture at the head of README.md, for wide and for small screens.

python -m tools.readme_picture
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import peftc

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
WIDE = 900  # pixels


def pictures(cache: bool = True) -> Mapping[str, str]:
    """MAM on BART-large, by the names of its files."""
    picture = peftc.show("specs/mam.peft", "facebook/bart-large", cache=cache)
    return {"mam-on-bart.svg": replace(picture, width=WIDE).svg(), "mam-on-bart-small.svg": picture.svg()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FIGURES / name).write_text(svg, encoding="utf-8", newline="\n")
