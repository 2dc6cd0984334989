"""The models that a spec is for."""

from dataclasses import dataclass

from peftc.diagnostics import Source, Span


@dataclass(frozen=True)
class Target:
    """A model that a spec is for.

    Attributes:
        model: its name.
        tasks: None for a single one.
        source: the configuration that names it, if one does.
        span: the place there.
    """

    model: str
    tasks: tuple[str, ...] | None = None
    source: Source | None = None
    span: Span | None = None
