"""What an export did."""

from __future__ import annotations

from pydantic import BaseModel as Record
from pydantic import ConfigDict


class ExportedModule(Record):
    """One module of the base in the exported adapter.

    Attributes:
        module: its dotted name.
        rank: of its change; 0 of a type that has none.
        exact: whether the tensors have the bits of the adapter's parameters. Others are products of
            them, rounded once.
        error: ‖Δ − B A‖ / ‖Δ‖ of an approximation; None where there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    rank: int
    exact: bool = True
    error: float | None = None


class ExportReport(Record):
    """The outcome of `peftc.export`.

    Attributes:
        output: the new folder.
        type: the adapter's type there, as PEFT names it: LORA.
        modules: those that it changes.
        saved: modules of the base that it holds as a whole.
        notes: what the other program will not do as the adapter did, while training.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    type: str
    modules: tuple[ExportedModule, ...]
    saved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = len(self.modules)
        lines = [f"exported {count} module{'s' * (count != 1)} as {self.type}"]
        rounded = [one for one in self.modules if not one.exact and one.error is None]
        if rounded:
            lines.append(f"rounded  {len(rounded)}, such as {rounded[0].module}")
        if near := [one for one in self.modules if one.error is not None]:
            worst = max(near, key=lambda one: one.error or 0.0)
            lines.append(f"approximated {len(near)}: relative error at most {worst.error:.2g}, in {worst.module}")
        if self.saved:
            lines.append(f"saved    {', '.join(self.saved)}")
        return "\n".join([*lines, *(f"note     {note}" for note in self.notes), f"wrote {self.output}"])
