"""What `peftc explain CODE` prints of a code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeInfo:
    title: str
    explanation: str


WRONG, RIGHT = "Wrong:", "Right:"


def explained(title: str, why: str, wrong: str, right: str) -> CodeInfo:
    """An explanation with an example and its correction; tests hold both to what they say."""
    return CodeInfo(title, f"{why}\n\n{WRONG}\n{_indented(wrong)}\n{RIGHT}\n{_indented(right)}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.strip("\n").split("\n")) + "\n"
