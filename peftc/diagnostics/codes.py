"""Every diagnostic code, as `peftc explain CODE` prints it; never reused. See `explanations/`."""

import re
from dataclasses import dataclass
from pathlib import Path

WRONG, RIGHT = "Wrong:", "Right:"  # the headings of an example and its correction


@dataclass(frozen=True)
class CodeInfo:
    title: str
    explanation: str


def sections() -> list[tuple[str, CodeInfo]]:
    """The sections `## CODE: title` of all files, in order."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("explanations/*.md")))
    headings = re.compile(r"^## (P\d{3}): (.+)\n+((?:(?!## ).*\n)+)", re.MULTILINE)
    return [(code, CodeInfo(title, body.strip())) for text in texts for code, title, body in headings.findall(text)]


CODES: dict[str, CodeInfo] = dict(sections())
